"""What a program imports before it does anything: what only some uses need comes later."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("storage_svc.app", "pyarrow opentelemetry.sdk"),
        ("broker_svc.app", "pyarrow opentelemetry.sdk"),
        ("lifecycle_svc.app", "pyarrow opentelemetry.sdk"),
        ("tidemark.cli.main", "grpc asyncio"),
    ],
)
def test_a_program_starts_without_what_only_some_uses_need(program: str, heavy: str) -> None:
    """S6."""
    code = f"import {program}, sys; print(*sys.modules.keys() & set({heavy.split()}))"

    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout

    assert imported.split() == []
