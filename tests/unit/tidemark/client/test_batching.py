"""How calls become runs."""

from typing import Any, cast

import pytest

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.client.publish.batching import Call, Lane, Run, RunOptions, Sequences
from tidemark.client.publish.messages import batch_of
from tidemark.errors import QueueFull, TidemarkError

ROOM = limits.RUN_BYTES_MAX


class Waiter:
    """A caller that waits for its call, or has gone."""

    def __init__(self, gone: bool = False) -> None:
        self.gone = gone

    def done(self) -> bool:
        return self.gone


def no_refusal(call: Call[Waiter], error: Exception) -> None:
    raise AssertionError("every call can be encoded") from error


def no_failure(calls: list[Call[Waiter]], error: TidemarkError) -> None:
    raise AssertionError("no call fails because of another one") from error


def lane_of(*calls: Call[Waiter]) -> Lane[Waiter]:
    lane: Lane[Waiter] = Lane("orders/a", 1, "key")
    lane.waiting.extend(calls)
    return lane


def call(payload: bytes, gone: bool = False, delay_ms: int = 0) -> Call[Waiter]:
    return Call(Waiter(gone), RunOptions(delay_ms), 0, payload)


def payloads(runs: list[Run[Waiter]]) -> list[list[bytes]]:
    batches = [MessageBatch.FromString(run.body) for run in runs]
    return [[message.payload for message in batch.messages] for batch in batches]


def test_neighbours_that_agree_become_one_run_and_others_end_it() -> None:
    many = Call(Waiter(), RunOptions(), 0, batch=batch_of([b"c", b"d"]))
    lane = lane_of(call(b"a"), call(b"b"), many, call(b"e", delay_ms=5), call(b"f"))

    runs = lane.build_runs(ROOM, 10, no_refusal)

    assert payloads(runs) == [[b"a", b"b", b"c", b"d"], [b"e"], [b"f"]]
    assert [run.count for run in runs] == [4, 1, 1]
    protos = [lane.long_form(run) for run in runs]
    assert {(proto.lmq_name, proto.partition) for proto in protos} == {("orders/a", 1)}
    assert {proto.fairness_key for proto in protos} == {"key"}
    assert [proto.delay_ms for proto in protos] == [0, 5, 0]
    assert [proto.batch.SerializeToString() for proto in protos] == [run.body for run in runs]


def refused_lane() -> tuple[Lane[Waiter], list[Run[Waiter]]]:
    """Three runs, of which the first and the second are refused as a whole."""
    delays = (0, 0, 1, 1, 2, 2)
    lane = lane_of(*(call(b"%d" % at, delay_ms=delay) for at, delay in enumerate(delays)))
    runs = list(lane.build_runs(ROOM, 10, no_refusal))
    for sequence, run in enumerate(runs, 1):
        run.sequence = sequence
    lane.refused += [(run, QueueFull("")) for run in runs[:2]]
    return lane, runs


def test_refused_runs_are_split_in_their_order_if_nothing_behind_them_is_stored() -> None:
    """S2: the third one has failed for good."""
    lane, (_, _, last) = refused_lane()
    lane.runs.remove(last)

    lane.split_refused(no_failure)

    assert [each.payload for each in lane.waiting] == [b"0", b"1", b"2", b"3"]
    assert not lane.runs
    assert not lane.refused


@pytest.mark.parametrize("stored", [True, False], ids=["is stored", "may be stored"])
def test_refused_runs_fail_if_something_behind_them_is_stored_or_may_be(stored: bool) -> None:
    """S2: they would come behind it."""
    lane, (_, _, last) = refused_lane()
    if stored:
        lane.runs.remove(last)
        lane.last_stored = last.sequence
    failed: list[bytes] = []

    lane.split_refused(lambda calls, _: failed.extend(each.payload for each in calls))

    assert sorted(failed) == [b"0", b"1", b"2", b"3"]
    assert not lane.waiting
    assert lane.runs == ([] if stored else [last])


def test_a_run_that_was_given_up_is_not_split() -> None:
    lane, _ = refused_lane()
    lane.runs.clear()

    lane.split_refused(no_failure)

    assert not lane.waiting


def test_a_run_ends_at_its_limits_and_a_frame_at_its_room() -> None:
    lane = lane_of(*(call(b"") for _ in range(limits.RUN_MESSAGES_MAX + 1)))
    large = lane_of(*(call(bytes(1_000_000)) for _ in range(5)))

    counts = [run.count for run in lane.build_runs(ROOM, 10, no_refusal)]
    sizes = [run.count for run in large.build_runs(ROOM, 10, no_refusal)]

    assert counts == [limits.RUN_MESSAGES_MAX, 1]
    assert sizes == [4], "the fifth goes with the next frame"
    assert len(large.waiting) == 1


def test_no_more_runs_are_made_than_allowed() -> None:
    lane = lane_of(*(call(b"x", delay_ms=number) for number in range(5)))

    assert len(lane.build_runs(ROOM, 2, no_refusal)) == 2
    assert len(lane.waiting) == 3


def test_a_caller_that_has_gone_is_left_out() -> None:
    lane = lane_of(call(b"a", gone=True), call(b"b"))

    assert payloads(lane.build_runs(ROOM, 10, no_refusal)) == [[b"b"]]


def test_a_refused_run_is_tried_again_call_by_call_before_what_came_later() -> None:
    lane = lane_of(call(b"a"), call(b"b"))
    (run,) = lane.build_runs(ROOM, 10, no_refusal)
    lane.waiting.append(call(b"later"))

    lane.refused.append((run, QueueFull("")))
    lane.split_refused(no_failure)

    assert payloads(lane.build_runs(ROOM, 10, no_refusal)) == [[b"a"], [b"b"], [b"later"]]


def test_a_call_that_cannot_be_encoded_is_refused_alone() -> None:
    """K3: its neighbours are stored in their order, and the lane goes on."""
    wrong: Any = "not bytes"
    bad, late = call(wrong), Call(Waiter(), RunOptions(delay_ms=cast("int", 1.5)), 0, b"late")
    lane = lane_of(call(b"a"), bad, call(b"b"), late, call(b"c"))
    refused: list[Call[Waiter]] = []

    runs = lane.build_runs(ROOM, 10, lambda each, _: refused.append(each))

    assert payloads(runs) == [[b"a"], [b"b"], [b"c"]]
    assert refused == [bad, late]
    assert not lane.waiting


def test_a_number_of_the_users_own_makes_a_run_of_its_own() -> None:
    numbered = Call(Waiter(), RunOptions(sequence=7, alone=True), 0, b"n")
    lane = lane_of(numbered, Call(Waiter(), RunOptions(sequence=7, alone=True), 0, b"n"))

    assert [run.sequence for run in lane.build_runs(ROOM, 10, no_refusal)] == [7, 7]


def test_a_lane_is_plain_while_none_of_its_runs_needs_more_than_columns() -> None:
    """S2: the runs of a lane travel in one form, so that they stay in order."""
    plain, mixed, keyed = (Lane[Waiter]("orders/a", 1, key) for key in ("", "", "key"))
    plain.waiting.extend([call(b"a"), Call(Waiter(), RunOptions(alone=True), 0, b"b")])
    mixed.waiting.extend([call(b"a"), call(b"b", delay_ms=5)])
    keyed.waiting.append(call(b"a"))

    for lane in (plain, mixed, keyed):
        lane.build_runs(ROOM, 10, no_refusal)

    assert [len(lane.runs) for lane in (plain, mixed, keyed)] == [2, 2, 1]
    assert [lane.is_plain for lane in (plain, mixed, keyed)] == [True, False, False]


def test_sequences_stay_within_the_window_that_storage_remembers() -> None:
    """S11."""
    sequences = Sequences()
    taken = [sequences.take() for _ in range(limits.PRODUCER_SEQUENCES_MAX)]
    assert sequences.room == 0

    for sequence in taken[1:]:
        sequences.answered(sequence)
    assert sequences.room == 0, "the oldest may still have to be repeated"

    sequences.answered(taken[0])
    assert sequences.room == limits.PRODUCER_SEQUENCES_MAX
    assert sequences.take() == limits.PRODUCER_SEQUENCES_MAX + 1
