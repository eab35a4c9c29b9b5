"""The examples of the documentation, run as a newcomer would run them."""

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.repository import ROOT
from tidemark.local.cluster import LocalCluster

EXAMPLES = ROOT / "examples"
HELLO = EXAMPLES / "hello.py"

OUTPUTS: dict[str, Sequence[str]] = {
    "chat_sessions": (
        "laptop: Hi Ada",
        "phone: Are you there?",
        "the phone's epoch is higher: True",
        "laptop: lost chats/ada",
        "laptop: too late, the phone has it",
    ),
    "fair_tenants": ("tiny is done: True", "gold got about three times as much: True"),
    "idempotent_publish": (
        "parts there before the crash: 0",
        "parts there after it: 6",
        "every line once: True",
    ),
    "work_queue": (
        "dog.png: done at attempt 1",
        "cat.png: the disk was slow, retrying",
        "notes.txt: not a picture, given up",
        "cat.png: done at attempt 2",
        "notes.txt: dead, because not a picture",
    ),
    "delayed_jobs": (
        "published stand up scheduled",
        "published drink water scheduled",
        "published good morning for now",
        "now: good morning",
        "now: drink water",
        "now: stand up",
    ),
}


async def test_the_hello_example_works_and_works_again(cluster: LocalCluster) -> None:
    """S6."""
    for offset in (0, 1):
        output = await run_example(HELLO, cluster.address("broker"))

        assert output == [f"published at offset {offset}", "received Hello, Ada! in en"]


async def test_each_example_does_what_it_says_and_does_it_again(cluster: LocalCluster) -> None:
    """S6, L5, L6: all at once on one cluster, since each has a topic of its own."""
    address = cluster.address("broker")

    for _ in range(2):
        outputs = await asyncio.gather(
            *(run_example(EXAMPLES / f"{name}.py", address) for name in OUTPUTS)
        )

        for (name, expected), output in zip(OUTPUTS.items(), outputs, strict=True):
            assert sorted(output) == sorted(expected), name


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {HELLO.stem, *OUTPUTS}


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


async def test_the_program_of_the_readme_works(cluster: LocalCluster, tmp_path: Path) -> None:
    """S6."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(program.replace("127.0.0.1:7400", cluster.address("broker")))

    assert len([line for line in program.splitlines() if line]) <= 10
    for _ in range(2):
        assert await run_example(script, "") == ["Hello, Ada!"]
