"""A temporary PostgreSQL server for a benchmark: started on a socket if installed, then removed.

It runs with its defaults, fsync included. If the benchmark runs as root, the server runs as the
user `nobody`, because PostgreSQL refuses to run as root.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NOBODY: Final = 65_534
_PACKAGED: Final = "usr/lib/postgresql/*/bin"


def find_postgres() -> Path | None:
    """The directory of its programs; None if it is not installed."""
    packaged = sorted(Path("/").glob(_PACKAGED))
    found = shutil.which("pg_ctl")
    candidates = [*reversed(packaged), *([Path(found).parent] if found else [])]
    return next((each for each in candidates if (each / "initdb").exists()), None)


class Postgres:
    """A running server."""

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs = programs
        self._directory = directory

    def run(self, sql: str) -> str:
        """The plain output of psql for some statements."""
        done = subprocess.run(
            [self._programs / "psql", "-h", self._directory, "-U", "bench", "-XqAt", "postgres"],
            input=sql,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or "ERROR" in done.stderr:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()


@contextmanager
def running_postgres(programs: Path) -> Iterator[Postgres]:
    """A server on a new directory; both are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="tidemark-bench-pg-") as temporary:
        directory = Path(temporary)
        user = _NOBODY if os.geteuid() == 0 else None
        if user is not None:
            os.chown(directory, user, user)

        def call(*command: str | Path) -> None:
            groups = None if user is None else [user]
            subprocess.run(
                command,
                check=True,
                stdout=subprocess.DEVNULL,
                cwd=directory,
                user=user,
                group=user,
                extra_groups=groups,
            )

        data = directory / "data"
        call(programs / "initdb", "-D", data, "-U", "bench", "-A", "trust", "--no-instructions")
        options = f"-k {directory} -c listen_addresses=''"
        log = directory / "log"
        call(programs / "pg_ctl", "-D", data, "-o", options, "-l", log, "-w", "start")
        try:
            yield Postgres(programs, directory)
        finally:
            call(programs / "pg_ctl", "-D", data, "-m", "fast", "-w", "stop")
