"""The redis engine and a server that speaks TLS itself, with users and certificates of both sides.

They run where such a server is on PATH; the Valkey of the wheel is built without TLS.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from storage_svc.engines.engine import EngineFenced, Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.checks import Durability
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.redis.layout import mark_key
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import puts
from tests.support.acl import create_documented_user
from tests.support.tls_proxy import HOST, Certificate, make_certificate
from tests.support.tls_server import TlsServer, abort_tls_connections, tls_server
from tidemark.errors import StoreNotFit

REFUSED_WITHIN_S = 20
"""Far above the limit of a connection: also on a busy machine, and never for ever."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A certificate that the server does not know, and which does not sign its own."""
    return make_certificate(tmp_path_factory.mktemp("foreign"))


@pytest.fixture(scope="module")
def running(
    tmp_path_factory: pytest.TempPathFactory, certificate: Certificate
) -> Iterator[TlsServer]:
    with tls_server(tmp_path_factory.mktemp("tls"), certificate) as server:
        create_documented_user(server.redis, "tidemark", "secret")
        yield server


@pytest.fixture
async def server(running: TlsServer) -> AsyncIterator[TlsServer]:
    running.redis.flushall()
    yield running
    await abort_tls_connections()


def _url(
    server: TlsServer,
    trusted: Certificate,
    own: Certificate | None,
    scheme: str = "rediss",
    login: str = "tidemark:secret@",
) -> str:
    url = f"{scheme}://{login}{server.address}?ssl_ca_certs={trusted.cert}"
    return url if own is None else f"{url}&ssl_certfile={own.cert}&ssl_keyfile={own.key}"


async def test_a_partition_is_committed_and_opened_again_over_tls(
    server: TlsServer, certificate: Certificate
) -> None:
    """S9: with the user of docs/ENGINES.md, on a server that takes nothing but TLS."""
    url = ServerUrl.parse(_url(server, certificate, certificate))
    engine = await RedisEngines(url).open(IDENTITY)

    await engine.commit(puts(Table.RUN_HEADERS, *(u64(each) for each in range(3000))))  # is staged
    await engine.commit(puts(Table.GROUPS, b"a"))
    await engine.verify()
    assert await engine.free_bytes() > 0
    assert await RedisEngines(url).time_ms(IDENTITY.cluster_id) > 0

    again = await RedisEngines(url).open(IDENTITY)
    assert len(await again.scan(Table.RUN_HEADERS, b"", None, limit=9999)) == 3000
    assert await again.load(Table.GROUPS, [b"a"]) == [b"value of a"]
    with pytest.raises(EngineFenced):
        await engine.commit(puts(Table.GROUPS, b"b"))
    await engine.close()
    await again.close()


async def test_a_tls_connection_that_breaks_is_made_again(
    server: TlsServer, certificate: Certificate
) -> None:
    """S9."""
    engine = await RedisEngines(ServerUrl.parse(_url(server, certificate, certificate))).open(
        IDENTITY
    )
    for number in range(5):
        commit = asyncio.ensure_future(engine.commit(puts(Table.HISTORY, u64(number))))
        await asyncio.wait({commit}, timeout=0)
        server.redis.execute_command("CLIENT KILL TYPE NORMAL SKIPME yes")
        await commit

    rows = await engine.scan(Table.HISTORY, b"", None, limit=10)
    assert [key for key, _ in rows] == [u64(number) for number in range(5)]
    await engine.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("authority", "certificate verify failed"),
        ("no certificate", "certificate required|reset by peer|closed"),
        ("foreign certificate", "unknown ca|reset by peer|closed"),
        ("password", "invalid username-password"),
        ("plain", "servers with TLS end plain connections: they need rediss"),
        ("plain, no login", "servers with TLS end plain connections: they need rediss"),
    ],
)
async def test_a_connection_that_the_certificates_or_the_url_do_not_allow_is_refused_in_time(
    server: TlsServer, certificate: Certificate, foreign: Certificate, wrong: str, why: str
) -> None:
    """S5, S9: the error has the reason and no password; nothing is written."""
    urls = {
        "authority": _url(server, foreign, certificate),
        "no certificate": _url(server, certificate, None),
        "foreign certificate": _url(server, certificate, foreign),
        "password": _url(server, certificate, certificate, login="tidemark:s3cret@"),
        "plain": f"redis://tidemark:s3cret@{server.address}",
        "plain, no login": f"redis://{server.address}",
    }

    async with asyncio.timeout(REFUSED_WITHIN_S):
        with pytest.raises(ConnectionError, match=f"(?i){why}") as refused:
            await RedisEngines(ServerUrl.parse(urls[wrong])).open(IDENTITY)

    assert "s3cret" not in str(refused.value)
    assert not server.redis.exists(mark_key(IDENTITY))


async def test_a_certificate_for_another_name_is_refused(
    server: TlsServer, certificate: Certificate
) -> None:
    """S5: the certificate names the address alone."""
    url = _url(server, certificate, certificate).replace(f"@{HOST}:", "@localhost:")

    async with asyncio.timeout(REFUSED_WITHIN_S):
        with pytest.raises(ConnectionError, match="not valid for 'localhost'"):
            await RedisEngines(ServerUrl.parse(url)).open(IDENTITY)


async def test_replicated_is_refused_by_a_server_that_cannot_wait_for_the_file_of_a_replica(
    server: TlsServer, certificate: Certificate
) -> None:
    """S9: Redis has WAITAOF since 7.2. A later one has no replica here, which is another error."""
    server.redis.execute_command("ACL SETUSER tidemark +wait")
    can_wait = b"waitaof" in server.redis.execute_command("COMMAND LIST")
    if can_wait:
        server.redis.execute_command("ACL SETUSER tidemark +waitaof")
    engines = RedisEngines(
        ServerUrl.parse(_url(server, certificate, certificate)), Durability.REPLICATED
    )

    expected = (ConnectionError, "no replica") if can_wait else (StoreNotFit, "WAITAOF")
    with pytest.raises(expected[0], match=f"(?i){expected[1]}"):
        await engines.open(IDENTITY)
