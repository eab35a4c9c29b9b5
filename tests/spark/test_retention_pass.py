"""Passes end to end: a real Spark plans and applies, a real storage checks and deletes."""

from tests.rpc.storage_client import RunningStorage, append
from tests.spark.conftest import RunPass
from tidemark.clock import ManualClock


async def test_expired_messages_leave(
    storage: RunningStorage, clock: ManualClock, retention: RunPass
) -> None:
    """R1."""
    await storage.create_topic("kept", retention_enabled=True, retention_seconds=10)
    async with storage.exchange() as exchange:
        await exchange.ask(append("kept", b"1", b"2"))
        await clock.advance_ms(10_000)
        await exchange.ask(append("kept", b"3"))

        done = await retention()

    assert done.counts == {"expired": 2, "completed": 0, "inactive_queue": 0, "old_records": 0}
