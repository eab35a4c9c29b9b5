"""The exchange as a stream: frames, their order and their end."""

from contextlib import suppress
from typing import Any

import pytest

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    bind_frame,
    frame_of,
    operation,
    reserve,
)
from tests.support.faulty_engine import FaultyEngines
from tests.support.storage_client import RunningStorage
from tests.support.storage_fixtures import StartStorage
from tidemark import errors, limits
from tidemark.api.storage.v1.exchange_pb2 import (
    HeldReservation,
    Materialize,
    RenewReservations,
)
from tidemark.clock import SystemClock
from tidemark.receipts import Receipt

pytestmark = pytest.mark.slow


async def test_one_bad_operation_spoils_no_other_of_its_frame(exchange: ExchangeClient) -> None:
    """S3."""
    good, bad, also_good = await exchange.ask_all(
        append("jobs", b"x"), append("no-such-topic", b"x"), append("jobs", b"y")
    )

    assert isinstance(bad, errors.TopicNotFound)
    assert (good.first_offset, also_good.first_offset) == (0, 1)


async def test_many_frames_in_flight_share_commits_and_answers(
    start_storage: StartStorage, faulty_disks: list[FaultyEngines]
) -> None:
    """What gathered while the last commit ran, or the last frame was sent, goes into the next.

    The first commit runs until all are sent, however slowly a busy machine sends them.
    """
    storage = await start_storage()
    await storage.create_topic("jobs")
    (disk,) = faulty_disks
    frames = 400

    async with storage.exchange() as exchange:
        before = (await storage.info()).commits
        disk.gate.clear()
        sent = [(await exchange.send(append(f"jobs/{n}", b"x")))[0] for n in range(frames)]
        disk.gate.set()
        for each in sent:
            assert (await each).HasField("append")

        assert exchange.frames < frames / 2
        assert (await storage.info()).commits - before < frames / 2


async def test_a_broker_that_stops_writing_gets_its_answers_and_the_end_of_the_stream(
    exchange: ExchangeClient,
) -> None:
    (result,) = await exchange.send(append("jobs", b"x"))

    await exchange.done_writing()

    assert (await result).HasField("append")
    assert isinstance(await exchange.ended, errors.Unavailable)


async def test_a_broker_that_never_reads_is_no_longer_read_from_and_delays_no_other(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """Its answers wait in a bounded number of frames; the exchange beside it goes on."""
    frames_max = 200
    epoch = (await storage.info()).broker_epoch
    deaf: Any = storage.storage.Exchange()
    await deaf.write(bind_frame(epoch))
    frame = frame_of(epoch, append("jobs", bytes(1_000_000)), reserve("jobs"))

    await deaf.write(frame)
    written = 1
    with suppress(TimeoutError):  # the only sign of a stream that is not read from
        while written < frames_max:
            await SystemClock().wait_for(deaf.write(frame), 2000)
            written += 1
    beside = await exchange.ask(append("jobs/beside", b"x"))

    deaf.cancel()
    assert written < frames_max
    assert beside.queue_id


async def test_answers_that_gathered_fit_the_frames_in_which_they_leave(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S3: also refusals, which have no bodies and long names."""
    epoch = (await storage.info()).broker_epoch
    slow: Any = storage.storage.Exchange()
    await slow.write(bind_frame(epoch))
    nowhere = "n" * limits.TOPIC_NAME_BYTES_MAX + "/" + "x" * limits.LITE_NAME_BYTES_MAX
    refused = [
        operation(materialize=Materialize(lmq_name=nowhere))
    ] * limits.UNANSWERED_OPERATIONS_MAX
    frames = 2  # more than a broker may leave unanswered: no further one would be taken

    for _ in range(frames):
        await slow.write(frame_of(epoch, *refused))
    await exchange.ask(append("jobs", b"behind them"))
    await slow.done_writing()

    sizes = [
        (sum(len(part.results) for part in frame.parts), frame.ByteSize()) async for frame in slow
    ]
    assert sum(results for results, _ in sizes) == frames * limits.UNANSWERED_OPERATIONS_MAX
    assert max(size for _, size in sizes) <= limits.FRAME_BYTES_MAX


async def test_renewals_with_many_refusals_fit_the_frames_in_which_they_leave(
    exchange: ExchangeClient,
) -> None:
    """S3: each refusal has its reason, so that one result may be as large as thousands."""
    held = [HeldReservation(receipt=Receipt(0, 1, number, 0).encode()) for number in range(10_000)]
    renewals = [operation(renew=RenewReservations(held=held))] * 10

    answers = await exchange.ask_all(*renewals)

    assert [len(each.refused) for each in answers] == [len(held)] * len(renewals)
    assert exchange.frames > 1
