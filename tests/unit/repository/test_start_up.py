"""What a program imports before it does anything: what only some uses need comes later."""

import subprocess
import sys

import pytest

from tidemark.settings.environment import given_or_own

_EXPERIMENTS = "GRPC_EXPERIMENTS"

_SERVICES = ("broker_svc", "lifecycle_svc", "storage_svc")

_SHOW_WHEN_GRPC_IS_IMPORTED = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))

sys.meta_path.insert(0, Finder())
"""

_USE_GRPC = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"


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


def _run(code: str, experiments: str | None = None) -> subprocess.CompletedProcess[str]:
    environ = dict(given_or_own(None))
    environ.pop(_EXPERIMENTS, None)
    if experiments is not None:
        environ[_EXPERIMENTS] = experiments
    run = [sys.executable, "-c", code]
    return subprocess.run(run, env=environ, capture_output=True, check=True, text=True)


@pytest.mark.parametrize("service", _SERVICES)
def test_a_service_turns_the_event_engine_off_before_grpc_is_imported(service: str) -> None:
    code = f"{_SHOW_WHEN_GRPC_IS_IMPORTED}import {service}.__main__"

    assert _run(code).stdout.split() == ["-event_engine_client,-event_engine_listener"]


def test_grpc_knows_what_services_turn_off() -> None:
    """gRPC reports an experiment that it does not know, and goes on without it."""
    code = f"import storage_svc.__main__; {_USE_GRPC}"

    assert "Unknown experiment" in _run(_USE_GRPC, "-nonesuch").stderr
    assert "Unknown experiment" not in _run(code).stderr


def test_an_operator_may_choose_experiments_of_grpc() -> None:
    code = f"{_SHOW_WHEN_GRPC_IS_IMPORTED}import broker_svc.__main__"

    assert _run(code, "").stdout == "\n"
