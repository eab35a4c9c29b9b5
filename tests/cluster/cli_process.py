"""The real command `tidemark`: in a pipe as programs run it, in a terminal as people do."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from typing import Any

from tidemark.local.cluster import LocalCluster

TIMEOUT_S = 120
_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


@dataclass(frozen=True)
class Finished:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """Runs commands against one cluster."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = [f"{name}={value}" for name, value in variables.items()]

    @staticmethod
    def of(cluster: LocalCluster) -> "Cli":
        variables = {
            "TIDEMARK_ADDRESS": cluster.address("broker"),
            "TIDEMARK_STORAGE_ADDRESS": cluster.address("storage"),
            "TIDEMARK_LIFECYCLE_ADDRESS": cluster.address("lifecycle"),
            "TIDEMARK_JOBS_ADDRESS": "127.0.0.1:1",
        }
        return Cli(variables)

    def run(self, *arguments: str | bytes, stdin: bytes = b"") -> Finished:
        """To its end, in a pipe."""
        done = subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
        return Finished(done.returncode, done.stdout.decode(), done.stderr.decode())

    def ok(self, *arguments: str, stdin: bytes = b"") -> Finished:
        """The same for a command that has to succeed."""
        done = self.run(*arguments, stdin=stdin)
        assert done.code == 0, done.err
        return done

    def start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """In pipes, for as long as the test wants."""
        return subprocess.Popen(
            self.command(*arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def in_terminal(
        self, *arguments: str, columns: int, keys: str = "", after: str = ""
    ) -> Finished:
        """In a terminal that wide; the keys are pressed once the text `after` is on the screen."""
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen(
            ["setsid", "--ctty", *self.command(*arguments)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        said = b""
        try:
            while select.select([ours], [], [], TIMEOUT_S)[0]:
                try:
                    said += os.read(ours, 65536)
                except OSError:  # the last process that had the terminal is gone
                    break
                if keys and after in said.decode(errors="replace"):
                    os.write(ours, keys.encode())
                    keys = ""
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        text = _ESCAPES.sub("", said.decode(errors="replace")).replace("\r", "")
        return Finished(code, text, "")

    def command(self, *arguments: str | bytes) -> list[str | bytes]:
        variables = [*self._variables, "TERM=xterm-256color"]
        # A width in the environment would go before that of the terminal.
        return [
            "env",
            "-u",
            "COLUMNS",
            *variables,
            sys.executable,
            "-m",
            "tidemark.cli.main",
            *arguments,
        ]
