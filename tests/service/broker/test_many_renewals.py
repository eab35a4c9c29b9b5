"""A client that renews more than storage gets through is not read from (K1, S3)."""

import asyncio

import pytest

from tests.service.broker.conftest import Gated
from tests.support.local_broker import QUEUE, in_time, run_of
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, subscription_pb2
from tidemark.errors import InvalidName

pytestmark = pytest.mark.slow

FRAMES, CONSUMER = 10, 1
ADD = subscription_pb2.SYNC_MODE_PARTIAL_ADD


async def test_renewals_that_wait_for_storage_hold_up_the_frames_behind_them(gated: Gated) -> None:
    """K1, S3: a small frame may name ten thousand reservations, each of which costs memory."""
    local, gates = gated
    await local.publish(run_of(QUEUE, b"1"))
    call = local.api.Session()
    opening = broker_pb2.SessionRequest(hello=broker_pb2.Hello(client_id="greedy"))
    opening.open_consumers.add(consumer_id=CONSUMER, credit=1)
    opening.syncs.add(consumer_id=CONSUMER, mode=ADD).entries.add(lmq_name=QUEUE)
    await call.write(opening)
    frames = aiter(call)
    while not (frame := await in_time(anext(frames))).deliveries:
        pass
    renewing, wrong = broker_pb2.SessionRequest(), broker_pb2.SessionRequest()
    tags = [frame.deliveries[0].delivery_tag] * limits.RENEWALS_PER_FRAME_MAX
    renewing.renewals.add(request_id=1, delivery_tags=tags)
    wrong.credits.add(consumer_id=CONSUMER + 1)

    async def write_all() -> None:
        for _ in range(FRAMES):
            await call.write(renewing)
        await call.write(wrong)

    gates.links[0].requests.close()
    writing = asyncio.create_task(write_all())
    await in_time(gates.links[0].requests.until_held())
    for _ in range(100):  # the broker reads on meanwhile, if it does
        with pytest.raises(InvalidName):
            await local.pull(QUEUE, group="\n")
    gates.links[0].requests.let_go()
    renewed_before = 0
    while not (frame := await in_time(anext(frames))).errors:
        renewed_before += len(frame.renewed)
    await in_time(writing)
    call.cancel()

    assert renewed_before > 0
