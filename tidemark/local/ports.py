"""Ports of this machine: find free ones, and check whether one is free.

For starting a server in another process when its address must be known beforehand.
"""

import errno
import random
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import repeat
from pathlib import Path
from typing import Any, Final

# A server on all interfaces is reached at the loopback address.
_REACHED_AT: Final[Mapping[str, str]] = {"0.0.0.0": "127.0.0.1", "::": "::1"}

_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST: Final = 10_240
"""Lower ports are well known, those of Tidemark included."""

_TRIES: Final = 1_000


def free_ports(host: str, count: int) -> list[int]:
    """Free ports that no other caller of this function gets.

    They are below the kernel's ephemeral range, so a port stays free while its server restarts. And
    each has had a connection that the server side closed first: during the minute of TIME_WAIT that
    follows, a server can bind it, but this function does not choose it again.
    """
    ports: list[int] = []
    with ExitStack() as closing:  # closed at the end, so that all are different
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
            client.recv(1)  # end of stream: the server closed first
            ports.append(port)
    if len(ports) < count:
        raise OSError(errno.EADDRINUSE, f"found {len(ports)} free ports of {count}")
    return ports


def free_address(host: str = "127.0.0.1") -> str:
    """`host:port` with a free port."""
    return join_address(host, free_ports(host, 1)[0])


def _candidates() -> Iterator[int]:
    """Ports to try; 0, the kernel's choice, if its ephemeral range leaves too little room."""
    try:
        highest = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:  # not Linux
        highest = 32_768
    if highest < 2 * _LOWEST:
        return repeat(0, _TRIES)
    return (random.randrange(_LOWEST, highest) for _ in range(_TRIES))


def _unused_socket(host: str, port: int) -> socket.socket:
    """A listening socket; unlike for a server, a port in TIME_WAIT counts as in use."""
    family, kind, protocol, _, address = _resolve(host, port)
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        address = probe.getsockname()
    # Only a socket with SO_REUSEADDR leaves a TIME_WAIT in which a server can bind.
    return socket.create_server(address, family=family)


def listening_socket(host: str, port: int) -> socket.socket:
    """A listening socket; raises OSError if the port cannot be used."""
    family, _, _, _, address = _resolve(host, port)
    return socket.create_server(address, family=family)


def _resolve(host: str, port: int) -> tuple[Any, Any, int, str, Any]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return found[0]


def reached_at(host: str) -> str:
    """The host at which a server that listens on `host` is reached from this machine."""
    return _REACHED_AT.get(host, host)


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
