"""Runs commands of `tidemark` in processes of their own, without importing its modules each time.

To import them takes several times as long as most commands do. The server imports them once, while
it has no thread, and forks for every command. This file also stands in the place of `tidemark`: it
imports next to nothing then, hands its arguments, environment, working directory and standard
streams to the server, and ends as the command does.
"""

import atexit
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys

_STREAMS = (0, 1, 2)
_ENVIRONMENT = os.environ  # noqa: TID251 - handed on, not read


@functools.cache
def tidemark_command() -> list[str]:
    """What stands in the place of `tidemark` in a command line; starts the server."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # Linux finds a name, which is in no directory
        listener.listen()
        name = listener.getsockname().decode().removeprefix("\0")
        # Ends with its standard input, also if this process is killed.
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    atexit.register(server.communicate)
    return [sys.executable, "-S", "-E", __file__, "run", name]


# --- in the place of the command ------------------------------------------------------------------


def _run(name: str, arguments: list[str]) -> int:
    """The exit code of the command."""
    here = os.getcwd()  # noqa: PTH109 - a pathlib that is not imported
    request = {"arguments": arguments, "environment": dict(_ENVIRONMENT), "cwd": here}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + name)
        socket.send_fds(connection, [b"\n"], _STREAMS)
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(100))


# --- in the server --------------------------------------------------------------------------------


def _import_everything() -> None:
    import importlib
    import pkgutil

    import pydantic

    import tidemark

    for module in pkgutil.walk_packages(tidemark.__path__, "tidemark."):
        importlib.import_module(module.name)
    pydantic.TypeAdapter(str)  # typer reads arguments by these; the first one imports much
    gc.freeze()  # no copy looks through what all of them share


def _next_command(listener: socket.socket) -> None:
    """Serve until the last client has gone; returns in each copy that is to be a command."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a copy that has ended leaves nothing behind
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            break
        connection.close()
    _, streams, _, _ = socket.recv_fds(connection, 1, len(_STREAMS))
    with connection.makefile("r") as sent:
        request = json.load(sent)
    command = os.fork()
    if command:
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(command, 0)
        connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    connection.close()
    for given, own in zip(streams, _STREAMS, strict=True):
        os.dup2(given, own)
        os.close(given)
    # Those of the server remember what they were opened on.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    _ENVIRONMENT.clear()
    _ENVIRONMENT.update(request["environment"])
    os.chdir(request["cwd"])
    sys.argv[1:] = request["arguments"]


if __name__ == "__main__":
    if sys.argv[1] == "run":
        code = _run(sys.argv[2], sys.argv[3:])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    _import_everything()
    _next_command(socket.socket(fileno=int(sys.argv[2])))
    from tidemark.cli.main import main

    main()
