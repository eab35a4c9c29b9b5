"""The registry in Valkey: liveness, compare and set, and what it does with garbage (S8)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

from tests.support.repository import ROOT
from tests.support.tls_proxy import HOST, make_certificate, tls_proxy
from tests.support.valkey import Members, valkey
from tidemark.errors import MemberReplaced, RegistryUnavailable
from tidemark.registry.protocol import Assignment, Member, Timers
from tidemark.registry.redis_registry import RedisRegistry

A = Member("a", "host-a:7400", 2**62 + 1)
B = Member("b", "host-b:7400", 2**62 + 2)
ENDS_A_HANG_S = 60


@asynccontextmanager
async def listening(registry: RedisRegistry) -> AsyncIterator[asyncio.Queue[None]]:
    """The notices of the registry, from the moment it listens."""
    notices: asyncio.Queue[None] = asyncio.Queue()

    async def read() -> None:
        async for _ in registry.changes():
            notices.put_nowait(None)

    task = asyncio.create_task(read())
    try:
        async with asyncio.timeout(ENDS_A_HANG_S):
            await notices.get()
            yield notices
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_members_see_each_other(cluster: Members) -> None:
    """S8."""
    registry, other = cluster.registry(), cluster.registry()

    await registry.beat(A, 0)
    await other.beat(B, 0)
    view = await registry.beat(A, 0)

    assert view.members == {"a": A, "b": B}
    assert view.assignment == Assignment()
    assert not view.settled


async def test_members_see_what_others_have_open_and_a_visitor_sees_all_of_it(
    cluster: Members,
) -> None:
    """S9: a visitor joins nothing, and a change of what is open is a notice."""
    registry, other = cluster.registry(), cluster.registry()
    await registry.beat(A, 0, {3, 10})
    await other.beat(B, 7)

    async with listening(other) as notices:
        first = await other.look()
        await registry.beat(A, 0, {10})
        await notices.get()

    assert first.members == {"a": A, "b": B}
    assert first.held == {"a": {3, 10}}
    assert first.seen_version == 7
    second = await cluster.registry().look()
    assert second.held == {"a": {10}}
    assert not second.is_held_by_others(3, "b")
    assert second.is_held_by_others(10, "b")
    assert not second.is_held_by_others(10, "a")


async def test_a_visitor_does_not_see_a_member_that_is_gone(cluster: Members) -> None:
    """S9."""
    registry, other = cluster.registry(), cluster.registry()
    await registry.beat(A, 0, {1})
    await other.beat(B, 0)

    await cluster.lose("a")

    view = await other.look()
    assert (view.members, view.held) == ({"b": B}, {})


async def test_members_meet_over_tls_at_a_server_that_they_trust(
    cluster: Members, server_url: str, tmp_path: Path
) -> None:
    """S8: calls and notices go over TLS; a certificate that is not trusted is refused."""
    certificate = make_certificate(tmp_path)
    async with tls_proxy(HOST, int(server_url.rpartition(":")[2]), certificate) as port:
        trusting = cluster.registry(f"rediss://{HOST}:{port}?ssl_ca_certs={certificate.cert}")
        async with listening(trusting) as notices:
            await cluster.registry().beat(B, 0)
            await notices.get()
            view = await trusting.beat(A, 0)

        with pytest.raises(RegistryUnavailable, match="certificate"):
            await cluster.registry(f"rediss://{HOST}:{port}").check()

    assert view.members == {"a": A, "b": B}


async def test_a_member_without_beats_is_gone_and_comes_back_with_its_next(
    cluster: Members,
) -> None:
    """S8: a process that was paused and wakes up."""
    registry, other = cluster.registry(), cluster.registry()
    await registry.beat(A, 0)
    await other.beat(B, 0)

    await cluster.lose("b")

    assert (await registry.beat(A, 0)).members == {"a": A}
    assert (await other.beat(B, 0)).members == {"a": A, "b": B}


async def test_a_member_that_leaves_is_gone_at_once(cluster: Members) -> None:
    """S8."""
    registry, other = cluster.registry(), cluster.registry()
    await registry.beat(A, 0)
    await other.beat(B, 0)

    await other.leave(B)

    assert (await registry.beat(A, 0)).members == {"a": A}


async def test_a_later_process_with_the_same_id_replaces_the_earlier(cluster: Members) -> None:
    """S8: the earlier one ends, and does not fight; also after the registry was flushed."""
    earlier, later = cluster.registry(), cluster.registry()
    again = Member("a", "elsewhere:7400", 1)
    await earlier.beat(A, 0)

    await later.beat(again, 0)

    with pytest.raises(MemberReplaced, match="elsewhere:7400"):
        await earlier.beat(A, 0)
    await earlier.leave(A)
    assert (await later.beat(again, 0)).members == {"a": again}
    await cluster.redis.delete(cluster.key("members"))
    await earlier.beat(A, 0)
    assert (await later.beat(again, 0)).members == {"a": again}
    with pytest.raises(MemberReplaced):
        await earlier.beat(A, 0)


async def test_a_suspected_member_stays_if_it_beats_and_is_gone_if_not(cluster: Members) -> None:
    """S8."""
    registry, other = cluster.registry(), cluster.registry()
    await registry.beat(A, 0)
    await other.beat(B, 0)

    await registry.suspect("b", B.incarnation)
    await other.beat(B, 0)
    assert await cluster.redis.hgetall(cluster.key("suspected")) == {}

    await registry.suspect("b", B.incarnation)
    deadline_ms = int(await cluster.redis.hget(cluster.key("suspected"), "b"))
    last_ms = int(await cluster.redis.hget(cluster.key("beats"), "b"))
    assert deadline_ms >= last_ms + 500 + 300  # its next beat may still come
    await cluster.redis.hset(cluster.key("suspected"), "b", 1)
    assert (await registry.beat(A, 0)).members == {"a": A}


async def test_a_suspicion_of_an_earlier_process_does_not_concern_the_present_one(
    cluster: Members,
) -> None:
    """S8."""
    registry = cluster.registry()
    await registry.beat(A, 0)

    await registry.suspect("a", A.incarnation - 1)
    await registry.suspect("unknown", 1)

    assert await cluster.redis.hgetall(cluster.key("suspected")) == {}


async def test_an_assignment_is_set_by_the_first_that_knows_the_version(cluster: Members) -> None:
    """S8: compare and set; versions only grow."""
    registry, other = cluster.registry(), cluster.registry()
    first = Assignment(1, {0: "a", 1: "b"}, frozenset({1}))

    assert await registry.assign(first, 0)
    assert not await other.assign(Assignment(2, {0: "b"}), 0)
    assert not await other.assign(Assignment(1, {0: "b"}), 1)

    assert (await other.beat(B, 0)).assignment == first


async def test_a_flushed_registry_does_not_go_below_a_version_that_a_member_has_seen(
    cluster: Members,
) -> None:
    """S8."""
    registry, other = cluster.registry(), cluster.registry()
    await registry.beat(A, 41)

    assert not await other.assign(Assignment(41, {0: "b"}), 0)
    assert (await other.beat(B, 0)).seen_version == 41
    assert await other.assign(Assignment(42, {0: "b"}), 0)


async def test_a_gap_in_all_beats_unsettles_the_registry(cluster: Members) -> None:
    """S8: it was away, so that a member that is missing may be alive."""
    registry = cluster.registry()
    await registry.beat(A, 0)
    await cluster.settle()
    assert (await registry.beat(A, 0)).settled

    await cluster.redis.hset(cluster.key("progress"), "beat_ms", 1)

    assert not (await registry.beat(A, 0)).settled


async def test_a_drained_member_stays_drained_until_it_starts_again(cluster: Members) -> None:
    """S8: also over a flush of the registry."""
    registry, other = cluster.registry(), cluster.registry()
    await registry.beat(A, 0)

    assert await other.drain("a", A.incarnation)
    assert not await other.drain("a", 1)
    assert not await other.drain("unknown", 1)
    assert (await registry.beat(A, 0)).draining == {"a"}
    await cluster.redis.delete(cluster.key("members"))
    assert (await registry.beat(A, 0)).draining == {"a"}

    restarted = Member("a", A.address, A.incarnation + 1)
    assert (await other.beat(restarted, 0)).draining == set()


async def test_listeners_are_woken_by_every_change_of_another_member(cluster: Members) -> None:
    """S8: a handover needs no polling."""
    registry, other = cluster.registry(), cluster.registry()
    async with listening(registry) as notices:
        await other.beat(B, 0)
        await notices.get()
        await other.assign(Assignment(1, {0: "b"}), 0)
        await notices.get()
        await other.drain("b", B.incarnation)
        await notices.get()
        await other.suspect("b", B.incarnation)
        await notices.get()
        await other.beat(B, 0)  # changes nothing
        await other.leave(B)
        await notices.get()

        assert notices.empty()


async def test_scripts_come_back_after_the_server_has_lost_them(cluster: Members) -> None:
    """S8."""
    registry = cluster.registry()
    await registry.beat(A, 0)

    await cluster.redis.script_flush()

    assert (await registry.beat(A, 0)).members == {"a": A}


@pytest.mark.parametrize("garbage", ["", "{}", "[1]", "\\xff", '{"address": 1}', "9" * 400])
async def test_garbage_in_values_is_no_value(cluster: Members, garbage: str) -> None:
    """S8: a registry that lies never crashes a member."""
    registry = cluster.registry()
    await cluster.redis.hset(cluster.key("members"), mapping={"a": garbage, "x": garbage})
    await cluster.redis.hset(cluster.key("beats"), mapping={"a": garbage, "x": garbage})
    await cluster.redis.hset(cluster.key("suspected"), mapping={"a": garbage, "x": garbage})
    progress = dict.fromkeys(("beat_ms", "since_ms", "seen_version"), garbage)
    await cluster.redis.hset(cluster.key("progress"), mapping=progress)
    await cluster.redis.hset(
        cluster.key("assignment"), mapping={"version": garbage, "picture": garbage}
    )

    view = await registry.beat(A, 0)

    assert view.members == {"a": A}
    assert view.assignment == Assignment()
    assert await registry.assign(Assignment(1, {0: "a"}), 0)


async def test_a_member_with_a_garbage_incarnation_is_left_out(cluster: Members) -> None:
    """S8."""
    registry = cluster.registry()
    entry = '{"address": "h:1", "incarnation": "x", "joined_us": "1"}'
    await cluster.redis.hset(cluster.key("members"), "x", entry)
    await cluster.redis.hset(cluster.key("beats"), "x", "9" * 15)

    assert (await registry.beat(A, 0)).members == {"a": A}


async def test_a_key_of_another_type_makes_the_registry_unavailable(cluster: Members) -> None:
    """S8."""
    await cluster.redis.set(cluster.key("members"), "garbage")

    with pytest.raises(RegistryUnavailable, match="WRONGTYPE"):
        await cluster.registry().beat(A, 0)


RIGHTS = "~{tidemark/* &{tidemark/* +@hash +evalsha +eval +publish +subscribe +time +ping +hello"


async def test_a_user_with_few_rights_is_enough(cluster: Members) -> None:
    """S8: as docs/OPERATIONS.md names them."""
    user = cluster.cluster_id
    operations = (ROOT / "docs" / "OPERATIONS.md").read_text()
    assert f"`{RIGHTS}`" in operations
    await cluster.redis.execute_command("ACL", "SETUSER", user, "on", ">secret", *RIGHTS.split())
    url = cluster.url.replace("redis://", f"redis://{user}:secret@")
    registry = cluster.registry(url)

    async with listening(registry) as notices:
        assert (await registry.beat(A, 0)).members == {"a": A}
        await notices.get()
        assert await registry.assign(Assignment(1, {0: "a"}), 0)
        assert await registry.drain("a", A.incarnation)
        await registry.suspect("a", A.incarnation)
        await registry.leave(A)


@pytest.mark.parametrize(
    "answer", [b":1\r\n", b"*1\r\n:1\r\n", b"*1\r\n$2\r\nOK\r\n", b"HTTP/1.1 400 Bad\r\n\r\n", b""]
)
async def test_a_server_that_answers_garbage_or_hangs_up_is_unavailable(
    cluster: Members, answer: bytes
) -> None:
    """S8: another program at the address never crashes a member."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answer and await reader.read(4096):
            writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        _, port = server.sockets[0].getsockname()
        # Some answers let the client wait for the rest of them.
        registry = cluster.registry(f"redis://127.0.0.1:{port}", Timers(answer_ms=100))
        with pytest.raises(RegistryUnavailable):
            await registry.beat(A, 0)


async def test_a_server_that_hangs_is_unavailable_after_the_timeout(cluster: Members) -> None:
    """S8."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        _, port = server.sockets[0].getsockname()
        registry = cluster.registry(f"redis://127.0.0.1:{port}", Timers(answer_ms=20))
        with pytest.raises(RegistryUnavailable, match="Timeout"):
            await registry.beat(A, 0)


async def test_a_server_that_does_not_answer_is_unavailable_and_its_password_stays_secret(
    tmp_path: Path, cluster: Members
) -> None:
    """S8: a dead port, a wrong password, and a server that needs one."""
    with valkey(tmp_path) as server:
        address = f"{server.host}:{server.port}"
        async with redis.asyncio.Redis(host=server.host, port=server.port) as operator:
            await operator.config_set("requirepass", "right")
        for login in ("", ":wrong-secret@", "user:wrong-secret@"):
            with pytest.raises(RegistryUnavailable) as refused:
                await cluster.registry(f"redis://{login}{address}").beat(A, 0)
            assert "secret" not in str(refused.value)
        allowed = cluster.registry(f"redis://:right@{address}")
        assert (await allowed.beat(A, 0)).members == {"a": A}

    with pytest.raises(RegistryUnavailable):
        await allowed.beat(A, 0)
    with pytest.raises(RegistryUnavailable):
        async for _ in allowed.changes():
            pass
