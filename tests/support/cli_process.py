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

from tests.support.cli_server import tidemark_command
from tidemark.local.cluster import LocalCluster

TIMEOUT_S = 120
SILENCE_S = 10
"""After so long without output, keys are pressed again."""

_ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9]|[=>])")


@dataclass(frozen=True)
class Finished:
    """The exit code and the output of a command."""

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
            "TIDEMARK_STORAGE_ADDRESSES": cluster.storage_addresses,
            "TIDEMARK_LIFECYCLE_ADDRESS": cluster.address("lifecycle"),
            "TIDEMARK_JOBS_ADDRESS": "127.0.0.1:1",
        }
        return Cli(variables)

    def run(self, *arguments: str | bytes, stdin: bytes = b"") -> Finished:
        """To its end, in a pipe."""
        done = subprocess.run(
            [*self._environment, *tidemark_command(), *arguments],
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
        """In a terminal that wide; the keys are pressed once the text `after` is on the screen.

        Where nothing follows they are pressed again, as people do: Python misses a Ctrl-C between
        writing a prompt and waiting for the answer.
        """
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
        to_press, silences = keys, 0
        try:
            while silences * SILENCE_S < TIMEOUT_S:
                if select.select([ours], [], [], SILENCE_S)[0]:
                    try:
                        said += os.read(ours, 65536)
                    except OSError:  # the last process that had the terminal is gone
                        break
                else:
                    to_press, silences = keys, silences + 1
                if to_press and after in said.decode(errors="replace"):
                    os.write(ours, to_press.encode())
                    to_press = ""
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        text = _ESCAPES.sub("", said.decode(errors="replace")).replace("\r", "")
        return Finished(code, text, "")

    def command(self, *arguments: str | bytes) -> list[str | bytes]:
        """As its users run it."""
        return [*self._environment, sys.executable, "-m", "tidemark.cli.main", *arguments]

    @property
    def _environment(self) -> list[str]:
        # A width in the environment would go before that of the terminal.
        return ["env", "-u", "COLUMNS", *self._variables, "TERM=xterm-256color"]
