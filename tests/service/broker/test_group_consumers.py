"""Which groups have a consumer, as a broker reports it to storage: those do not expire (R14)."""

from tests.service.broker.conftest import StartBroker
from tests.support.local_broker import QUEUE, LocalBroker, until
from tests.support.retention_calls import rows_of
from tidemark.api.storage.v1.retention_pb2 import SCAN_TABLE_NAME_GROUPS
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.rpc import open_channel

CLIENT_TIMEOUT_MS = 100
"""Soon after a claim, storage relies on what the broker has reported."""


async def in_use(local: LocalBroker) -> dict[str, bool]:
    """The groups of the queue, and whether storage takes them for used."""
    async with open_channel(local.storage_address) as channel:
        stub = RetentionServiceStub(channel)
        found = await rows_of(stub, SCAN_TABLE_NAME_GROUPS, lmq_name=QUEUE)
    return {row["group"]: row["in_use"] for row in found}


async def until_in_use(local: LocalBroker, **expected: bool) -> None:
    async def reported() -> bool:
        return await in_use(local) == expected

    await until(reported)


async def test_a_subscription_keeps_its_group_and_no_other(start: StartBroker) -> None:
    """R14: without credit, over a lost link, and until the last one ends."""
    local = await start(partitions=1, client_timeout_ms=CLIENT_TIMEOUT_MS)
    for group in ("mail", "audit"):
        await local.pull(QUEUE, group=group)
    first, second = await local.session("ada"), await local.session("bob")
    for session in (first, second):
        await session.open_consumer("mail").subscribe(QUEUE)

    await until_in_use(local, mail=True, audit=False)
    await local.stop_storage()
    await local.start_storage()
    await until_in_use(local, mail=True, audit=False)
    await first.abort()
    await second.publish(QUEUE, [b"after it has left"])
    still = await in_use(local)
    await second.abort()
    await until_in_use(local, mail=False, audit=False)

    assert still == {"mail": True, "audit": False}
