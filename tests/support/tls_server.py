"""A real server that speaks TLS itself, where one is on PATH: the Valkey of the wheel has none."""

import gc
import shutil
import ssl
import subprocess
import threading
from asyncio.sslproto import _SSLProtocolTransport
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.tls_proxy import HOST, Certificate
from tidemark.clock import SystemClock
from tidemark.local.ports import free_ports

ADMIN = "admin"
ADMIN_PASSWORD = "of-the-admin"
_START_WITHIN_MS = 60_000
"""Only ends a hang."""
_CLOCK = SystemClock()


def find_tls_server() -> str:
    """The program of a server that has TLS; the test is skipped where none is installed."""
    for name in ("valkey-server", "redis-server"):
        program = shutil.which(name)
        if program is not None and _has_tls(program):
            return program
    pytest.skip("neither valkey-server nor redis-server on PATH is built with TLS")


def _has_tls(program: str) -> bool:
    """It ends at once, by the first argument that it cannot use: the directory, or the port."""
    asked = [program, "--port", "0", "--tls-port", "0", "--dir", "/nonexistent/directory"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
    return "nonexistent" in ended.stdout + ended.stderr


class TlsServer:
    """A durable server that takes TLS connections only, of clients with its own certificate."""

    def __init__(self, certificate: Certificate, port: int) -> None:
        self.port = port
        self.address = f"{HOST}:{port}"
        self.redis: Any = redis.Redis(
            HOST,
            port,
            username=ADMIN,
            password=ADMIN_PASSWORD,
            ssl=True,
            ssl_ca_certs=str(certificate.cert),
            ssl_certfile=str(certificate.cert),
            ssl_keyfile=str(certificate.key),
            ssl_min_version=ssl.TLSVersion.TLSv1_2,
        )

    def is_up(self) -> bool:
        try:
            return bool(self.redis.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False


@contextmanager
def tls_server(directory: Path, certificate: Certificate) -> Iterator[TlsServer]:
    """The default user is off: everything needs a name, a password and a certificate."""
    program = find_tls_server()
    (port,) = free_ports(HOST, 1)
    users = directory / "users.acl"
    users.write_text(f"user default off\nuser {ADMIN} on >{ADMIN_PASSWORD} ~* &* +@all\n")
    process = subprocess.Popen(
        [
            *(program, "--bind", HOST, "--port", "0", "--tls-port", str(port)),
            *("--tls-cert-file", str(certificate.cert), "--tls-key-file", str(certificate.key)),
            *("--tls-ca-cert-file", str(certificate.cert), "--tls-auth-clients", "yes"),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
            *("--dir", str(directory), "--aclfile", str(users)),
        ],
        stdout=subprocess.DEVNULL,
    )
    server = TlsServer(certificate, port)
    try:
        deadline_ms = _CLOCK.monotonic_ms() + _START_WITHIN_MS
        pause = threading.Event()
        while not server.is_up():
            assert process.poll() is None, "the server has ended"
            assert _CLOCK.monotonic_ms() < deadline_ms, "the server does not answer"
            pause.wait(0.05)
        yield server
        server.redis.close()
    finally:
        process.kill()
        process.wait()


async def abort_tls_connections() -> None:
    """redis-py does not wait until a connection is closed, which takes a trip to the server with
    TLS; the event loop of a test may end before."""
    for each in gc.get_objects():
        if isinstance(each, _SSLProtocolTransport):
            each.abort()
    await _CLOCK.sleep_ms(0)
    await _CLOCK.sleep_ms(0)
