"""Standard streams of the command: closed by the caller, or with an output that cannot be written.

`consume --ack` acknowledges messages that it has printed, so output is never silently discarded.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn


@contextmanager
def standard_streams() -> Iterator[None]:
    """Run a command: an output that cannot be written is one line and an exit code."""
    # Python has None for a stream that was closed.
    if sys.stdin is None:
        sys.stdin = Path(os.devnull).open()  # noqa: SIM115 - for the life of the process
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        _fail("stdout is closed; redirect it to /dev/null to discard the output", "USAGE")
    try:
        yield
    except OSError as error:
        discard_stdout()
        where = f" of {error.filename}" if error.filename else ""
        _fail(f"input or output{where} failed: {error.strerror or error}", "FAULT")


def discard_stdout() -> None:
    """Nothing more can be written: discard buffered output, without an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(line: str, code: str) -> NoReturn:
    from tidemark.cli.failures import ExitCode  # it imports gRPC, which takes long

    print(f"tidemark: {line}", file=sys.stderr)
    raise SystemExit(ExitCode[code])
