"""Connections of the redis engine: users with few rights, and TLS."""

from pathlib import Path

import pytest

from storage_svc.engines.engine import Table
from storage_svc.engines.keys import u64
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from tests.model.conftest import IDENTITY
from tests.model.redis.conftest import Servers, puts
from tests.support.acl import create_documented_user
from tests.support.tls_proxy import HOST, make_certificate, tls_proxy


async def test_a_user_needs_no_rights_beyond_those_that_are_documented(servers: Servers) -> None:
    """S9: the command in docs/ENGINES.md."""
    create_documented_user(servers.redis, "tidemark", "secret")
    url = servers.url.replace("redis://", "redis://tidemark:secret@")
    try:
        engine = await servers.open(url=url)

        await engine.commit(puts(Table.RUN_HEADERS, *(u64(each) for each in range(3000))))

        assert await engine.load(Table.RUN_HEADERS, [u64(1)]) == [b"value of " + u64(1)]
        assert len(await engine.scan(Table.RUN_HEADERS, b"", None, limit=9999)) == 3000
        await engine.verify()
        assert await engine.free_bytes() > 0
        assert await RedisEngines(ServerUrl.parse(url)).time_ms(IDENTITY.cluster_id) > 0
    finally:
        servers.redis.execute_command("ACL DELUSER tidemark")


async def test_tls_checks_both_certificates(servers: Servers, tmp_path: Path) -> None:
    """S9: the options of the URL. TLS ends before the server, as the one in the wheel has none;
    `test_tls.py` has one where it is installed."""
    certificate = make_certificate(tmp_path)
    port = int(servers.url.rpartition(":")[2])
    async with tls_proxy(HOST, port, certificate, mutual=True) as port:
        trusting = f"rediss://{HOST}:{port}?ssl_ca_certs={certificate.cert}"

        engine = await servers.open(
            url=f"{trusting}&ssl_certfile={certificate.cert}&ssl_keyfile={certificate.key}"
        )

        await engine.commit(puts(Table.GROUPS, b"a"))
        assert await engine.load(Table.GROUPS, [b"a"]) == [b"value of a"]
        for refused in (trusting, f"rediss://{HOST}:{port}", f"redis://{HOST}:{port}"):
            with pytest.raises(ConnectionError):
                await servers.open(url=refused)
        await engine.close()
