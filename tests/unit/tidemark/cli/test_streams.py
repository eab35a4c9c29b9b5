"""Standard streams of the command that are closed or full: one line, and no traceback."""

import subprocess
import sys

import pytest

COMMAND = f"{sys.executable} -m tidemark.cli.main"


def run(arguments: str) -> tuple[int, str]:
    ended = subprocess.run(
        ["sh", "-c", f"{COMMAND} {arguments}"], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == ""
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("arguments", ["--version", "--help", "completion bash"])
def test_output_that_cannot_be_written_is_one_line(arguments: str) -> None:
    assert run(f"{arguments} > /dev/full") == (
        5,
        "tidemark: input or output failed: No space left on device\n",
    )


def test_a_closed_stdout_is_refused_before_anything_is_sent() -> None:
    """Its descriptor would become that of a connection."""
    code, line = run("consume orders/a --ack >&-")

    assert code == 2
    assert line == "tidemark: stdout is closed; redirect it to /dev/null to discard the output\n"


def test_a_closed_stdin_and_stderr_are_empty_ones() -> None:
    assert run("--version <&- >/dev/null 2>&-") == (0, "")
    assert run("publish orders/a <&- >/dev/null 2>&-") == (0, "")  # there is nothing to send
