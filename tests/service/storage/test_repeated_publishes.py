"""Idempotent publishing: a repeat gets the first answer, never a second append (S11)."""

from tests.support.exchange_client import (
    ExchangeClient,
    append,
    published,
    reserve,
    reserved,
    settle,
)
from tests.support.storage_client import RunningStorage
from tidemark import errors, limits


async def test_a_repeated_publish_gets_the_first_answer(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S11: also after a restart, a scheduled run too, and never a second append."""
    first = await exchange.ask(published(1))
    delayed = await exchange.ask(published(2, b"later", delay_ms=1000))

    again = await exchange.ask(published(1))
    await storage.restart()
    async with storage.exchange() as after:
        after_restart = await after.ask(published(1))
        delayed_again = await after.ask(published(2, b"later", delay_ms=1000))

    assert not first.duplicate
    assert again.duplicate
    assert after_restart.duplicate
    assert again.first_offset == after_restart.first_offset == first.first_offset
    assert (delayed_again.duplicate, delayed_again.schedule_id) == (True, delayed.schedule_id)
    assert (await storage.queue("jobs")).queue.messages == 2


async def test_two_tries_of_one_run_in_one_frame_are_stored_once(exchange: ExchangeClient) -> None:
    """S11."""
    first, second = await exchange.ask_all(published(1), published(1))

    assert (first.duplicate, second.duplicate) == (False, True)
    assert first.first_offset == second.first_offset


async def test_another_run_under_a_used_sequence_is_a_conflict(exchange: ExchangeClient) -> None:
    """S11."""
    await exchange.ask(published(1))
    other_queue = append("jobs/other", b"x", producer_id="p", sequence=1)

    conflicts = await exchange.ask_all(published(1, b"another"), other_queue)

    assert [each.reason for each in conflicts] == ["SEQUENCE_CONFLICT"] * 2


async def test_repeats_are_answered_within_the_window_and_refused_before_it(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S11: at the limit and one past it."""
    last = limits.PRODUCER_SEQUENCES_MAX + 1
    await exchange.ask_all(*(published(sequence) for sequence in range(1, last + 1)))

    async def check(exchange: ExchangeClient) -> None:
        oldest, too_old = await exchange.ask_all(published(2), published(1))
        assert (oldest.duplicate, oldest.first_offset) == (True, 1)
        assert isinstance(too_old, errors.SequenceTooOld)

    await check(exchange)
    await storage.restart()
    async with storage.exchange() as after:
        await check(after)

    assert (await storage.queue("jobs")).queue.messages == last


async def test_what_a_producer_published_is_remembered_after_the_messages_are_gone(
    exchange: ExchangeClient,
) -> None:
    """S11: independently of retention."""
    await exchange.ask(published(1))
    await exchange.ask(settle((await reserved(exchange, "jobs")).receipt))

    again = await exchange.ask(published(1))

    assert again.duplicate
    assert not (await exchange.ask(reserve("jobs"))).slices


async def test_sequences_that_arrive_out_of_order_are_each_remembered(
    storage: RunningStorage, exchange: ExchangeClient
) -> None:
    """S11: the answers of one commit are stored together, whatever their order."""
    for sequences in ((5, 9, 7), (6, 8), (4,)):
        await exchange.ask_all(*(published(sequence) for sequence in sequences))
    await storage.restart()

    async with storage.exchange() as after:
        repeated = await after.ask_all(*(published(sequence) for sequence in range(4, 11)))

    assert [each.duplicate for each in repeated] == [True] * 6 + [False]
    assert [each.first_offset for each in repeated] == [5, 0, 3, 2, 4, 1, 6]
