"""Wrong arguments of any kind: each is refused with its name, and the client goes on (K3)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tidemark
import tidemark.sync
from tests.support.local_broker import LocalBroker, in_time, local_broker
from tests.support.sdk_calls import publish, take
from tidemark.client.publish.batching import RunOptions
from tidemark.client.transport.connection import SessionPart
from tidemark.client.transport.session import Session
from tidemark.errors import ClientError, Internal, InvalidArgument, TidemarkError, Unavailable
from tidemark.topics import TopicSettings

QUEUE, CHECK, OWN = "orders/a", "orders/check", "own/a"

Arguments = Mapping[str, Any]


class Call(NamedTuple):
    """A public call, with arguments that it would take."""

    name: str
    arguments: Arguments


async def no_callback(_: object) -> None: ...


VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64 - 1,
    2**64,
    2**70,
    -(2**70),
    10**4000,
    0.0,
    1500.0,
    1.5,
    float("nan"),
    float("inf"),
    1j,
    Decimal("1.5"),
    timedelta(milliseconds=5),
    timedelta(-1),
    timedelta.max,
    timedelta.min,
    "",
    "x",
    " ",
    "a/b/c",
    "\ud800",
    "orders/\udfff",
    "a\x00b",
    "x" * 100_000,
    b"",
    b"x",
    bytearray(b"x"),
    [],
    [None],
    [b"x", "y"],
    ["orders/b", 5],
    ("orders/b",),
    {},
    {"k": 1},
    {1: "v"},
    {"k": "\ud800"},
    {"k" * 70_000: "v"},
    {str(number): "" for number in range(100)},
    {"max_attempts": 1.5},
    object(),
    print,
    no_callback,
    int,
    Exception("x"),
]
"""What a mistaken program passes: other types, and numbers and texts beyond every range."""

PUBLISH = {"fairness_key": "", "delay_ms": 0, "ttl_ms": None, "sequence": 0}
CALLS = [
    Call("connect", {"addresses": "", "client_id": "eve", "producer_id": None}),
    Call(
        "connect",
        {
            "addresses": "",
            "publish_timeout_ms": 1000,
            "connect_timeout_ms": 1000,
            "buffer_bytes_max": 1000,
            "credentials": None,
            "clock": None,
            "random": None,
        },
    ),
    Call("publisher", {"lmq_name": QUEUE}),
    Call("publish", {"payload": b"x", "headers": None, **PUBLISH}),
    Call("publish_many", {"messages": [b"x"], **PUBLISH}),
    Call("publish_message", {"payload": b"x", "headers": {"k": "v"}}),
    Call("subscribe", {"lmq_names": [OWN], "group": "g", "credit": 5, "visibility_ms": 0}),
    Call("subscribe", {"lmq_names": [OWN], "on_evicted": None, "on_settle_failed": None}),
    Call("pull", {"lmq_name": QUEUE, "group": "g", "max_messages": 1, "wait_ms": 0}),
    Call("pull", {"lmq_name": QUEUE, "visibility_ms": 0}),
    Call("settle", {"pulled": None, "ack": False, "delay_ms": 0}),
    Call("nack", {"delay_ms": 0}),
    Call("extend", {"visibility_ms": 1000}),
    Call("dead_letter", {"why": "broken"}),
    Call("create_topic", {"name": "orders", "max_attempts": 0, "dead_letter_topic": ""}),
    Call("create_topic", {"name": "orders", "subscription": "shared", "fairness_weights": {}}),
    Call("create_topic", {"name": "orders", "idle_after_ms": 0, "retention_enabled": False}),
]
ADMIN = [
    Call("create_topic", {"name": "orders", "settings": TopicSettings()}),
    Call("get_topic", {"name": "orders"}),
    Call("update_topic", {"name": "other", "changes": {}, "expected_version": 0}),
    Call("delete_topic", {"name": "missing", "force": True}),
    Call("list_queues", {"topic": "orders", "lite_prefix": "", "page_size": 10}),
    Call("get_queue", {"lmq_name": QUEUE}),
    Call("peek_queue", {"lmq_name": QUEUE, "offset": 0, "max_messages": 1, "group": ""}),
    Call("purge_queue", {"lmq_name": "other"}),
    Call("delete_queue", {"lmq_name": "other/missing"}),
    Call("evict_queue", {"lmq_name": QUEUE}),
    Call("cancel_scheduled", {"lmq_name": QUEUE, "partition": 0, "schedule_id": 1}),
    Call("redrive", {"lmq_name": "other", "reason": "", "source_lmq_name": "", "limit": 0}),
    Call("redrive", {"lmq_name": "other", "after_time_ms": 0, "before_time_ms": 0}),
    Call("list_dead_letters", {"lmq_name": "other", "reason": "", "page_size": 10}),
    Call("delete_dead_letters", {"lmq_name": "other", "limit": 0, "on_progress": None}),
    Call("drop_outbox", {"destination_lmq_name": "other", "partition": 0, "on_progress": None}),
    Call("list_groups", {"lmq_name": QUEUE}),
    Call("reset_group", {"lmq_name": "other", "group": "g", "position": "offset", "number": 0}),
    Call("reset_group", {"lmq_name": "other", "group": "g", "position": "time", "number": 0}),
    Call("delete_group", {"lmq_name": "other", "group": "missing"}),
]


@st.composite
def mistaken(draw: st.DrawFn, calls: list[Call]) -> Call:
    """A call of which one or two arguments are something else."""
    name, arguments = draw(st.sampled_from(calls))
    fields = st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2, unique=True)
    wrong = {field: draw(st.sampled_from(VALUES)) for field in draw(fields)}
    return Call(name, {**arguments, **wrong})


async def perform(client: tidemark.Client, address: str, call: Call) -> object:
    """Make a call; a handle that it returns is used once and closed."""
    name, arguments = call.name, dict(call.arguments)
    match name:
        case "connect":
            addresses = arguments.pop("addresses")
            arguments["addresses"] = address if addresses == "" else addresses
            with suppress(Unavailable):  # the timeout may be too short
                async with tidemark.connect(**arguments):
                    return None
            return None
        case "publish" | "publish_many":
            publisher = await client.publisher(QUEUE)
            return await getattr(publisher, name)(**arguments)
        case "publish_message":
            publisher = await client.publisher(QUEUE)
            return await publisher.publish_many([tidemark.Message(**arguments)])
        case "subscribe":
            async with client.subscribe(**arguments):
                return None
        case "settle" | "nack" | "extend" | "dead_letter":
            await publish(client, QUEUE, b"x")
            pulled = await client.pull(QUEUE, group="g", max_messages=1)
            try:
                if name == "settle":
                    await client.settle(**{"pulled": pulled, **arguments})
                    return None
                return await getattr(next(iter(pulled)), name)(**arguments)
            finally:
                with suppress(TidemarkError):  # it may be settled
                    await client.settle(pulled)
        case _:
            return await getattr(client, name)(**arguments)


async def administer(client: tidemark.Client, call: Call) -> object:
    made = getattr(client.admin, call.name)(**call.arguments)
    if isinstance(made, AsyncIterator):
        return [each async for each in made]
    return await made


async def allowed(work: Awaitable[object]) -> None:
    """It succeeds, or is refused as the caller's mistake: nothing hangs, breaks or ends."""
    with suppress(ClientError):
        await in_time(work)


async def goes_on(client: tidemark.Client) -> None:
    """What is published is received."""
    await publish(client, CHECK, b"after")
    pulled = await in_time(client.pull(CHECK, wait_ms=60_000))
    assert pulled.payloads == [b"after"]
    await in_time(client.settle(pulled))


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    async with local_broker(tmp_path, partitions=2) as local:
        yield local


@pytest.fixture
async def client(local: LocalBroker) -> AsyncIterator[tidemark.Client]:
    async with tidemark.connect(local.address, client_id="ada") as client:
        await client.create_topic("orders")
        await client.create_topic("own", subscription="exclusive")
        await client.create_topic("other")
        await publish(client, "other", b"x")
        yield client


ONE_CLIENT = settings(
    max_examples=3000 if settings.get_current_profile_name() == "long" else 200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""All examples meet the same client: none of them may have harmed it."""


@pytest.mark.slow
@ONE_CLIENT
@given(call=mistaken(CALLS))
async def test_a_client_survives_any_arguments(
    local: LocalBroker, client: tidemark.Client, call: Call
) -> None:
    await allowed(perform(client, local.address, call))

    await goes_on(client)


@pytest.mark.slow
@ONE_CLIENT
@given(call=mistaken(ADMIN))
async def test_administrative_calls_survive_any_arguments(
    client: tidemark.Client, call: Call
) -> None:
    await allowed(administer(client, call))

    await goes_on(client)


def perform_blocking(client: tidemark.sync.Client, call: Call) -> None:
    name, arguments = call.name, dict(call.arguments)
    match name:
        case "publish" | "publish_many":
            getattr(client.publisher(QUEUE), name)(**arguments)
        case "subscribe":
            with client.subscribe(**arguments):
                pass
        case "settle" | "nack" | "extend" | "dead_letter":
            client.publisher(QUEUE).publish(b"x")
            pulled = client.pull(QUEUE, group="g", max_messages=1)
            with suppress(TidemarkError):
                if name == "settle":
                    client.settle(**{"pulled": pulled, **arguments})
                else:
                    getattr(next(iter(pulled)), name)(**arguments)
            with suppress(TidemarkError):
                client.settle(pulled)
        case _:
            getattr(client, name)(**arguments)


BLOCKING = [call for call in CALLS if call.name not in ("connect", "publish_message")]


@pytest.mark.slow
@ONE_CLIENT
@given(call=mistaken(BLOCKING))
async def test_a_blocking_client_survives_any_arguments(
    client: tidemark.Client, blocking: tidemark.sync.Client, call: Call
) -> None:
    def script() -> None:
        with suppress(ClientError):
            perform_blocking(blocking, call)
        blocking.publisher(CHECK).publish(b"after")
        pulled = blocking.pull(CHECK, wait_ms=60_000)
        assert pulled.payloads == [b"after"]
        blocking.settle(pulled)

    await in_time(asyncio.to_thread(script))


@pytest.fixture
async def blocking(local: LocalBroker) -> AsyncIterator[tidemark.sync.Client]:
    blocking = tidemark.sync.connect(local.address, client_id="bob")
    await asyncio.to_thread(blocking.__enter__)
    yield blocking
    await asyncio.to_thread(blocking.close)


# --- what got past the checks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration", "taken"),
    [(1500.0, False), (1500.5, False), (timedelta(seconds=1.5), True), (1500, True)],
)
async def test_a_delay_is_whole_milliseconds_or_a_timedelta(
    client: tidemark.Client, duration: Any, taken: bool
) -> None:
    """A float never returned, and every other publish failed with it."""
    publisher = await client.publisher(QUEUE)

    if taken:
        receipt = await in_time(publisher.publish(b"later", delay_ms=duration))
        assert receipt.schedule_id
    else:
        with pytest.raises(InvalidArgument) as refused:
            await in_time(publisher.publish(b"later", delay_ms=duration))
        assert refused.value.metadata == {"field": "delay_ms"}
    await goes_on(client)


async def test_a_run_that_cannot_be_encoded_fails_alone(client: tidemark.Client) -> None:
    """Whatever the checks let pass: its neighbours of the same lane are stored."""
    wrong: Any = 1.5
    wrong_bytes: Any = "text"
    outbox = client._publish_buffer
    partition = (await (await client.publisher(CHECK)).publish(b"first")).partition

    results = await in_time(
        asyncio.gather(
            outbox.begin(CHECK, partition, "", RunOptions(), b"before").answer,
            outbox.begin(CHECK, partition, "", RunOptions(), wrong_bytes).answer,
            outbox.begin(CHECK, partition, "", RunOptions(delay_ms=wrong), b"x").answer,
            outbox.begin(CHECK, partition, "", RunOptions(), b"after").answer,
            return_exceptions=True,
        )
    )

    assert [isinstance(each, InvalidArgument) for each in results] == [False, True, True, False]
    assert (await client.pull(CHECK)).payloads == [b"first", b"before", b"after"]


async def test_a_settlement_that_cannot_be_encoded_fails_alone(client: tidemark.Client) -> None:
    wrong: Any = "text"
    await publish(client, QUEUE, b"1", b"2")
    async with client.subscribe([QUEUE], group="g") as deliveries:
        first, second = await take(deliveries, 2)
        settlements = first._batch._settler

        with pytest.raises(InvalidArgument):
            await in_time(settlements.settle(first._batch, wrong, ()))
        await second.ack()
        await first.ack()
        await in_time(deliveries.flush())

    await goes_on(client)


@pytest.mark.parametrize("call", ["delete_dead_letters", "drop_outbox"])
async def test_a_wrong_callback_is_refused_before_anything_is_deleted(
    client: tidemark.Client, call: str
) -> None:
    """The first part was deleted, and then the callback failed with a TypeError."""
    with pytest.raises(InvalidArgument, match="on_progress"):
        await getattr(client.admin, call)("other", on_progress="text")
    with pytest.raises(InvalidArgument, match="on_progress"):
        await getattr(client.admin, call)("other", on_progress=no_callback)


class Broken(SessionPart):
    """Fails whenever a frame is made."""

    def __init__(self) -> None:
        self.error: TidemarkError | None = None

    def prepare(self, session: Session) -> bool:
        raise ZeroDivisionError

    def failed(self, error: TidemarkError) -> None:
        self.error = error


async def test_a_part_that_breaks_while_a_frame_is_made_fails_alone(
    client: tidemark.Client,
) -> None:
    broken, home = Broken(), client._routes.home
    home.attach(broken)
    session = home.session

    await goes_on(client)

    assert isinstance(broken.error, Internal)
    assert home.session is session
