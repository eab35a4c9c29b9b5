"""The clock of a node against that of its engine (S9)."""

import asyncio

from storage_svc.placement.clock_check import CHECK_EVERY_MS, OFFSET_MS_MAX, ClockCheck
from tidemark.clock import ManualClock


class ServerClock:
    """The clock of a server, as far from that of the node as the test wants it."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.behind_ms = 0
        self.answers = True

    async def time_ms(self) -> int:
        if not self.answers:
            raise ConnectionError("away")
        return self._clock.wall_ms() - self.behind_ms


async def test_a_node_waits_until_its_clock_is_right_and_the_server_answers() -> None:
    """S9: in both directions; exactly 5 s are within the bound."""
    clock = ManualClock()
    server = ServerClock(clock)
    check = ClockCheck(server.time_ms, clock)
    server.behind_ms = -OFFSET_MS_MAX - 1
    waiting = asyncio.create_task(check.until_right())
    await clock.advance_ms(10_000)
    assert not waiting.done()
    assert check.offset_ms == -OFFSET_MS_MAX - 1

    server.answers, server.behind_ms = False, 0
    await clock.advance_ms(10_000)
    assert not waiting.done()

    server.answers, server.behind_ms = True, OFFSET_MS_MAX
    await clock.advance_ms(10_000)
    await waiting
    assert not check.is_off


async def test_a_node_that_serves_is_told_once_its_clock_has_become_wrong() -> None:
    """S9: a server that does not answer proves nothing."""
    clock = ManualClock()
    server = ServerClock(clock)
    check = ClockCheck(server.time_ms, clock)
    alarms: list[int] = []

    async def alarm() -> None:
        alarms.append(check.offset_ms)

    watching = asyncio.create_task(check.watch(alarm))
    server.answers, server.behind_ms = False, OFFSET_MS_MAX + 1
    await clock.advance_ms(2 * CHECK_EVERY_MS)
    assert alarms == []

    server.answers = True
    await clock.advance_ms(CHECK_EVERY_MS)
    await watching
    assert alarms == [OFFSET_MS_MAX + 1]
