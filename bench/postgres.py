"""A PostgreSQL of its own for a benchmark: found on the machine, started on a socket, removed.

It runs with its defaults, fsync included. Being root, it is run as nobody, because PostgreSQL
refuses to run as root.
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
    """The directory of its programs; None if there is none on this machine."""
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
        """What psql prints for some statements, without decoration."""
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
    """A server on a fresh directory; both are gone afterwards."""
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
