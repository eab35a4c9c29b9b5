"""Repeating calls: which errors, and for how long."""

import asyncio
from random import Random

import pytest

from tidemark.client.transport.repeater import Repeater
from tidemark.clock import ManualClock
from tidemark.errors import TidemarkError, TopicExists, Unavailable


class Service:
    """Fails a number of times, then succeeds."""

    def __init__(self, *failures: TidemarkError) -> None:
        self.failures = list(failures)
        self.left_ms: list[int | None] = []

    async def call(self, left_ms: int | None) -> str:
        self.left_ms.append(left_ms)
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def unreachable() -> Unavailable:
    error = Unavailable("failed to connect to all addresses")
    error.answered = False
    return error


async def ended(clock: ManualClock, work: "asyncio.Task[str]") -> str:
    while not work.done():
        await clock.advance_ms(50)
    return await work


async def test_a_call_is_repeated_with_the_time_that_is_left() -> None:
    clock, service = ManualClock(), Service(Unavailable("1"), unreachable(), Unavailable("3"))
    repeater = Repeater(10_000, while_unreachable=True, clock=clock, random=Random(1))

    calling = asyncio.create_task(repeater.repeat(service.call))

    assert await ended(clock, calling) == "done"
    left_ms = [each for each in service.left_ms if each is not None]
    assert left_ms == sorted(left_ms, reverse=True)
    assert len(set(left_ms)) == 4
    assert left_ms[0] == 10_000


@pytest.mark.parametrize(
    "error", [TopicExists("exists"), unreachable()], ids=["refused", "unreachable"]
)
async def test_a_call_that_repeating_does_not_help_fails_at_once(error: TidemarkError) -> None:
    service = Service(error)
    repeater = Repeater(10_000, while_unreachable=False, clock=ManualClock())

    with pytest.raises(type(error)):
        await repeater.repeat(service.call)

    assert len(service.left_ms) == 1


async def test_a_call_fails_with_its_last_error_when_its_time_is_over() -> None:
    clock = ManualClock()
    service = Service(*(Unavailable(str(number)) for number in range(1000)))
    repeater = Repeater(5_000, while_unreachable=True, clock=clock)

    calling = asyncio.create_task(repeater.repeat(service.call))

    with pytest.raises(Unavailable):
        await ended(clock, calling)
    assert clock.monotonic_ms() <= 5_000
    assert len(service.left_ms) > 2


async def test_without_a_timeout_or_where_it_could_do_harm_a_call_is_made_once() -> None:
    for service, calling in (
        (one := Service(Unavailable("1")), Repeater(None, while_unreachable=True).repeat(one.call)),
        (two := Service(Unavailable("1")), Repeater(9, while_unreachable=True).once(two.call)),
    ):
        with pytest.raises(Unavailable):
            await calling
        assert len(service.left_ms) == 1
