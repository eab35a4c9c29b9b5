"""The schedule of retention has one holder (R11)."""

import pytest

from tests.support.storage_client import RunningStorage
from tidemark import errors
from tidemark.api.storage.v1.retention_pb2 import HoldScheduleRequest
from tidemark.clock import ManualClock


async def test_one_scheduler_holds_the_schedule_until_it_stops_saying_so(
    storage: RunningStorage, clock: ManualClock
) -> None:
    """R11: a second one stands by."""

    async def hold(holder: str, hold_ms: int = 1000) -> tuple[bool, str, int]:
        request = HoldScheduleRequest(holder=holder, hold_ms=hold_ms)
        answer = await storage.retention.HoldSchedule(request)
        return answer.held, answer.holder, answer.ends_in_ms

    assert await hold("a") == (True, "a", 1000)
    await clock.advance_ms(999)
    assert await hold("b") == (False, "a", 1)
    assert await hold("a") == (True, "a", 1000)
    await clock.advance_ms(1000)
    assert await hold("b") == (True, "b", 1000)
    assert await hold("a", 0) == (False, "b", 1000)
    assert await hold("b", 0) == (False, "", 0)
    assert await hold("a", 600_000) == (True, "a", 600_000)
    for refused in (("", 1), ("b", 600_001)):
        with pytest.raises(errors.InvalidArgument):
            await hold(*refused)
