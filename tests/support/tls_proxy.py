"""A proxy that ends TLS before a plain server, as a load balancer does, with its own certificate.

The servers of the tests speak no TLS themselves.
"""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

HOST = "127.0.0.1"


class Certificate(NamedTuple):
    """Files of a certificate for this machine that signs itself."""

    cert: Path
    key: Path


def make_certificate(directory: Path) -> Certificate:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    made = Certificate(directory / "tls.crt", directory / "tls.key")
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=tidemark-tests"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", f"subjectAltName=IP:{HOST}"),
            *("-out", str(made.cert), "-keyout", str(made.key)),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return made


@asynccontextmanager
async def tls_proxy(
    host: str, port: int, certificate: Certificate, *, mutual: bool = False
) -> AsyncIterator[int]:
    """The port at which the plain server is reached with TLS; with `mutual`, by clients that have
    the certificate as well."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    context.set_alpn_protocols(["h2"])  # gRPC requires it
    if mutual:
        context.load_verify_locations(certificate.cert)
        context.verify_mode = ssl.CERT_REQUIRED
    serving: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        with suppress(OSError):
            there = await asyncio.open_connection(host, port)
            writers.extend((writer, there[1]))
            passing = [_pass_on(reader, there[1]), _pass_on(there[0], writer)]
            await asyncio.gather(*passing, return_exceptions=True)
        serving.discard(task)

    server = await asyncio.start_server(serve, HOST, 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for each in writers:
            each.transport.abort()
        await asyncio.gather(*serving, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side ends, which ends the other."""
    try:
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
    finally:
        writer.close()
