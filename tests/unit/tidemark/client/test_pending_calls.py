"""Pending calls: every caller gets one result, whatever the others do with theirs."""

import asyncio

import pytest

from tidemark.client.transport.pending_calls import PendingCalls
from tidemark.errors import TidemarkError, Unavailable


async def test_a_caller_that_raises_keeps_no_other_from_its_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """S1: a fault of one caller is not one of the session."""
    calls = PendingCalls[str]()
    results: list[str | TidemarkError] = []
    calls.call_back(1, lambda _: 1 / 0)  # type: ignore[arg-type]
    calls.call_back(2, results.append)
    awaited = calls.expect(3)

    pending = [calls.answer(number, "done") for number in (1, 2, 3, 3)]

    assert (pending, results, await awaited) == ([True, True, True, False], ["done"], "done")
    assert "a result was not taken" in caplog.text


async def test_the_end_of_a_session_fails_callbacks_and_futures_alike() -> None:
    """S11: a run without a result is repeated; a caller that was cancelled is passed over."""
    calls = PendingCalls[str]()
    results: list[str | TidemarkError] = []
    calls.call_back(1, results.append)
    awaited, cancelled = calls.expect(2), calls.expect(3)
    cancelled.cancel()

    calls.fail(Unavailable("the session has ended"))

    assert [type(each) for each in results] == [Unavailable]
    with pytest.raises(Unavailable):
        await asyncio.wait_for(awaited, 60)
    assert not calls.answer(1, "late")
