"""The examples of the documentation, run as a newcomer would run them."""

import asyncio
import re
import sys
from pathlib import Path

from tidemark.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
HELLO = ROOT / "examples" / "hello.py"


async def test_the_hello_example_works_and_works_again(cluster: LocalCluster) -> None:
    """S6."""
    for offset in (0, 1):
        output = await run_example(HELLO, cluster.address("broker"))

        assert output == [
            f"published at offset {offset}",
            "received Hello, Ada!",
            "acknowledged 1",
        ]


async def run_example(script: Path, address: str) -> list[str]:
    """Its lines of output; a failure shows what it wrote to stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(script),
        address,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    return output.decode().splitlines()


def test_the_readme_shows_the_example_as_it_is() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    shown = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)

    assert shown == [HELLO.read_text(encoding="utf-8")]
