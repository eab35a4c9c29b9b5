"""Ports of this machine: finding free ones, and finding out whether one is free.

For whoever starts a server in another process and must know its address beforehand.
"""

import errno
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any, Final

# Who listens everywhere is reached at home.
_REACHED_AT: Final[Mapping[str, str]] = {"0.0.0.0": "127.0.0.1", "::": "::1"}

_GIVEN_OUT: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST: Final = 10_240
"""Below it are the ports that programs are known by, ours too."""

_TRIES: Final = 1_000


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody uses and that nobody else will be given.

    They lie below those that the kernel gives to whoever asks for any, so each stays free also
    while its server restarts. And each has had a connection that its server closed first: in the
    minute of TIME_WAIT that follows it can be bound by a server, but is not chosen here again.
    """
    ports: list[int] = []
    with ExitStack() as closing:  # at the end, so that all are different
        for port in _candidates():
            if len(ports) == count:
                break
            try:
                server = closing.enter_context(_unused_socket(host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            port = server.getsockname()[1]
            client = closing.enter_context(socket.create_connection((host, port)))
            server.accept()[0].close()
            client.recv(1)  # the end of the stream: the server was first
            ports.append(port)
    if len(ports) < count:
        raise OSError(errno.EADDRINUSE, f"found {len(ports)} free ports of {count}")
    return ports


def free_address(host: str = "127.0.0.1") -> str:
    """`host:port` with such a port."""
    return join_address(host, free_ports(host, 1)[0])


def _candidates() -> Iterator[int]:
    """Ports to try; 0 stands for the choice of a kernel that gives out nearly all of them."""
    try:
        highest = int(_GIVEN_OUT.read_text().split()[0])
    except OSError:  # not Linux
        highest = 32_768
    if highest < 2 * _LOWEST:
        return repeat(0, _TRIES)
    return (random.randrange(_LOWEST, highest) for _ in range(_TRIES))


def _unused_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there; unlike for a server, TIME_WAIT counts as in use."""
    family, kind, protocol, _, address = _resolve(host, port)
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        address = probe.getsockname()
    # Only a socket that allows it leaves a TIME_WAIT in which a server may bind.
    return socket.create_server(address, family=family)


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there, or the OSError that says why it cannot."""
    family, _, _, _, address = _resolve(host, port)
    return socket.create_server(address, family=family)


def _resolve(host: str, port: int) -> tuple[Any, Any, int, str, Any]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0]


def reached_at(host: str) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    return _REACHED_AT.get(host, host)


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
