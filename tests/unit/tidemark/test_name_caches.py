"""Caches of names: what they save, and that they are emptied."""

import asyncio

from tidemark.clock import ManualClock
from tidemark.name_caches import NAMES_MAX, empty_name_caches, name_cache
from tidemark.service.memory import NAMES_KEPT_MS, keep_name_caches_young

made: list[str] = []


@name_cache
def upper(name: str) -> str:
    made.append(name)
    return name.upper()


def test_a_value_is_made_once_until_the_caches_are_emptied() -> None:
    made.clear()

    assert [upper("a"), upper("b"), upper("a")] == ["A", "B", "A"]
    assert made == ["a", "b"]

    empty_name_caches()
    assert upper("a") == "A"
    assert made == ["a", "b", "a"]


def test_a_cache_is_bounded() -> None:
    for number in range(NAMES_MAX + 1):
        upper(str(number))
    made.clear()

    upper("0")

    assert made == ["0"]


async def test_a_service_empties_its_caches_every_minute() -> None:
    """So that names of a burst of queues do not keep its memory while they are idle (I1)."""
    clock = ManualClock()
    made.clear()
    ageing = asyncio.create_task(keep_name_caches_young(clock))
    upper("a")

    await clock.advance_ms(NAMES_KEPT_MS - 1)
    upper("a")
    assert made == ["a"]

    await clock.advance_ms(1)
    upper("a")
    assert made == ["a", "a"]
    ageing.cancel()
