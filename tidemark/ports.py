"""Ports of this machine: finding free ones, and finding out whether one is free.

For whoever starts a server in another process and must know its address beforehand.
"""

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final

# Who listens everywhere is reached at home.
_REACHED_AT: Final[Mapping[str, str]] = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def free_ports(host: str, count: int) -> list[int]:
    """Ports that nobody uses and that the kernel gives to nobody for the next minute.

    Each has had a connection that its server closed first. In the TIME_WAIT that follows, a port
    can be bound by number but is not handed out to those who ask for any.
    """
    ports = []
    with ExitStack() as closing:  # at the end, so that all are different
        for _ in range(count):
            server = closing.enter_context(listening_socket(host, 0))
            port: int = server.getsockname()[1]
            client = closing.enter_context(socket.create_connection((host, port)))
            server.accept()[0].close()
            client.recv(1)  # the end of the stream: the server was first
            ports.append(port)
    return ports


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there, or the OSError that says why it cannot."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return socket.create_server(address, family=family)


def reached_at(host: str) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    return _REACHED_AT.get(host, host)


def join_address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
