"""Connections of the redis engine: users with few rights, and TLS."""

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from tests.model.redis.conftest import Servers, puts
from tests.support.repository import ROOT
from tidemark.clock import SystemClock


async def test_a_user_needs_no_rights_beyond_those_that_are_documented(servers: Servers) -> None:
    """S9: the command in docs/ENGINES.md, word for word."""
    text = (ROOT / "docs/ENGINES.md").read_text()
    (command,) = [each for each in text.split("\n\n") if "ACL SETUSER" in each]
    words = command.replace("\\\n", " ").replace("PASSWORD", "secret").split()
    servers.redis.execute_command(*words)
    host = servers.url.removeprefix("redis://")
    try:
        engine = await servers.open(url=f"redis://tidemark:secret@{host}")

        await engine.commit(puts(Table.RUN_HEADERS, *(u64(each) for each in range(3000))))

        assert await engine.load(Table.RUN_HEADERS, [u64(1)]) == [b"value of " + u64(1)]
        assert len(await engine.scan(Table.RUN_HEADERS, b"", None, limit=9999)) == 3000
        await engine.verify()
        assert await engine.free_bytes() > 0
        engines = RedisEngines(ServerUrl.parse(f"redis://tidemark:secret@{host}"))
        assert abs(await engines.time_ms("any") - SystemClock().wall_ms()) < 60_000
    finally:
        servers.redis.execute_command("ACL DELUSER tidemark")


async def test_tls_checks_both_certificates(servers: Servers, tmp_path: Path) -> None:
    """S9: the options of the URL. TLS ends before the server, as the one in the wheel has none."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificates")
    certificate, key = await _certificate(tmp_path)
    async with _tls_front(servers.url, certificate, key) as port:
        trusting = f"rediss://localhost:{port}?ssl_ca_certs={certificate}"

        engine = await servers.open(url=f"{trusting}&ssl_certfile={certificate}&ssl_keyfile={key}")

        await engine.commit(puts(Table.GROUPS, b"a"))
        assert await engine.load(Table.GROUPS, [b"a"]) == [b"value of a"]
        for refused in (trusting, f"rediss://localhost:{port}", f"redis://localhost:{port}"):
            with pytest.raises(ConnectionError):
                await servers.open(url=refused)
        await engine.close()


async def _certificate(directory: Path) -> tuple[Path, Path]:
    """A certificate of this machine that signs itself, and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    process = await asyncio.create_subprocess_exec(
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-days", "2", "-subj", "/CN=localhost"),
        *("-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
    return certificate, key


@asynccontextmanager
async def _tls_front(url: str, certificate: Path, key: Path) -> AsyncIterator[int]:
    """The port of a proxy that ends TLS, and requires a certificate of its clients."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificate))
    context.load_cert_chain(certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    behind = urlsplit(url)
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())  # type: ignore[arg-type]
        back_reader, back_writer = await asyncio.open_connection(behind.hostname, behind.port)
        await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))
        for each in (writer, back_writer):
            with suppress(OSError):
                await each.wait_closed()

    async with await asyncio.start_server(serve, "localhost", 0, ssl=context) as front:
        yield front.sockets[0].getsockname()[1]
    if served:
        await asyncio.wait(served)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(65536):
            writer.write(some)
            await writer.drain()
    writer.close()
