"""Runs in columns: many are stored with one operation, each as by its own append (S2, S11)."""

from collections.abc import Sequence

import pytest

from tests.support.exchange_client import ExchangeClient, append, operation, reserved
from tidemark import errors, limits
from tidemark.api.storage.v1.exchange_pb2 import AppendRuns, Operation
from tidemark.bodies import body_of
from tidemark.rpc.statuses import from_status

pytestmark = pytest.mark.slow


def appends(
    lmq_names: Sequence[str], bodies: Sequence[bytes] = (), sequences: Sequence[int] = ()
) -> Operation:
    runs = AppendRuns(
        lmq_names=lmq_names,
        counts=[1] * len(lmq_names),
        bodies=bodies or [body_of([b"x"])] * len(lmq_names),
        sequences=sequences or [0] * len(lmq_names),
        producer_id="till-7" if sequences else "",
    )
    return operation(appends=runs)


async def test_a_refused_run_does_not_keep_the_others_from_being_stored(
    exchange: ExchangeClient,
) -> None:
    """S3, S11: a repeat gets the first answer, and each refusal is named."""
    await exchange.ask(append("jobs/a", b"before"))
    await exchange.ask(appends(["jobs/b"], sequences=[1]))
    names = ["jobs/a", "nowhere/a", "jobs/b", "jobs/c", "jobs/a"]
    bodies = [body_of([b"x"])] * 3 + [body_of([b"conflict"]), body_of([b"y"])]

    stored = await exchange.ask(appends(names, bodies, [2, 3, 1, 1, 4]))

    assert list(stored.first_offsets) == [1, 0, 0, 0, 2]
    assert [bool(each) for each in stored.queue_ids] == [True, False, True, False, True]
    assert [(each.index, each.schedule_id) for each in stored.repeated_runs] == [(2, 0)]
    reasons = {each.index: type(from_status(each.error)) for each in stored.refused}
    assert reasons == {1: errors.TopicNotFound, 3: errors.SequenceConflict}
    got = await reserved(exchange, "jobs/b")
    assert (got.count, got.body) == (1, body_of([b"x"]))


@pytest.mark.parametrize(
    "malformed",
    [
        appends([]),
        appends(["jobs/a"] * (limits.APPENDS_PER_OPERATION_MAX + 1)),
        appends(["jobs/a", "jobs/b"], [body_of([b"x"])]),
        appends(["jobs/a"], [b"nonsense"]),
        appends(["jobs/a"], [body_of([b"x", b"y"])]),
    ],
    ids=["no run", "too many runs", "a column is shorter", "no batch", "another count"],
)
async def test_a_malformed_array_is_refused_as_a_whole(
    exchange: ExchangeClient, malformed: Operation
) -> None:
    """S3."""
    with pytest.raises(errors.InvalidArgument):
        await exchange.ask(malformed)


async def test_an_array_of_the_largest_size_is_stored_in_one_commit(
    exchange: ExchangeClient,
) -> None:
    """S2."""
    names = [f"jobs/{number}" for number in range(limits.APPENDS_PER_OPERATION_MAX)]

    stored = await exchange.ask(appends(names))

    assert len(set(stored.queue_ids)) == len(names)
    assert not stored.refused
