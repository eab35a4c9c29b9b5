"""Samples every second, a row every minute (R12)."""

import asyncio
from collections.abc import Sequence

from tidemark.clock import ManualClock
from tidemark.errors import Unavailable
from tidemark.system_metrics.aggregates import Aggregate, Aggregates
from tidemark.system_metrics.sampler import Sampler


def test_samples_come_to_their_least_most_mean_and_last() -> None:
    aggregates = Aggregates()

    for value in (3.0, 1.0, 2.0):
        aggregates.add({"b": value})
    aggregates.add({"a": -5.0})

    assert aggregates.read() == [
        Aggregate("a", 1, -5.0, -5.0, -5.0, -5.0),
        Aggregate("b", 3, 1.0, 3.0, 2.0, 2.0),
    ]


def test_nothing_is_left_after_a_clear() -> None:
    aggregates = Aggregates()
    aggregates.add({"a": 1.0})

    aggregates.clear()

    assert aggregates.read() == []


class Storage:
    """Keeps what it is given, unless the test makes it unavailable."""

    def __init__(self) -> None:
        self.rows: list[Sequence[Aggregate]] = []
        self.away = False

    async def store(self, rows: Sequence[Aggregate]) -> None:
        if self.away:
            raise Unavailable("storage is away")
        self.rows.append(rows)


async def test_sixty_samples_become_one_row_every_minute() -> None:
    """R12."""
    clock, storage = ManualClock(), Storage()
    sampler = Sampler(lambda: {"ms": clock.monotonic_ms()}, storage.store)
    running = asyncio.create_task(sampler.run(clock))

    await clock.advance_ms(59_999)
    before = list(storage.rows)
    await clock.advance_ms(60_001)
    running.cancel()

    assert before == []
    assert storage.rows == [
        [Aggregate("ms", 60, 1_000, 60_000, 30_500, 60_000)],
        [Aggregate("ms", 60, 61_000, 120_000, 90_500, 120_000)],
    ]


async def test_samples_add_up_while_storage_is_away() -> None:
    """R12: the rhythm is lost, the figures are not."""
    clock, storage = ManualClock(), Storage()
    running = asyncio.create_task(Sampler(lambda: {"one": 1.0}, storage.store).run(clock))
    storage.away = True
    await clock.advance_ms(60_000)
    storage.away = False

    await clock.advance_ms(60_000)
    running.cancel()

    ((row,),) = storage.rows
    assert (row.samples, row.mean) == (120, 1.0)


async def test_nothing_is_stored_without_samples() -> None:
    storage = Storage()

    assert await Sampler(dict, storage.store).store() == 0
    assert storage.rows == []
