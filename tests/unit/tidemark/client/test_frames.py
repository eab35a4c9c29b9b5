"""Frames of a session: how what has gathered is cut."""

import pytest

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import (
    Message,
    MessageBatch,
    PublishRun,
    RunArray,
    Settlement,
)
from tidemark.client.transport.frames import FRAME_BYTES, FRAME_RUNS, Outgoing
from tidemark.number_rows import rows_of

pytestmark = pytest.mark.slow


def run(number: int, payload_bytes: int = 1, lmq_name: str = "") -> PublishRun:
    batch = MessageBatch(messages=[Message(payload=bytes(payload_bytes))])
    lmq_name = lmq_name or f"orders/{number}"
    return PublishRun(request_id=number, lmq_name=lmq_name, batch=batch, count=1)


def frames(outgoing: Outgoing) -> list[list[int]]:
    """The runs of each frame, until nothing is left."""
    cut = []
    while outgoing.has_rest:
        cut.append([each.request_id for each in outgoing.next_frame().runs])
    return cut


def test_a_burst_is_cut_so_that_all_services_on_its_way_work_at_once() -> None:
    outgoing = Outgoing()
    burst = 2 * FRAME_RUNS + 200
    outgoing.runs.extend(map(run, range(burst)))

    cut = frames(outgoing)

    assert [len(frame) for frame in cut] == [FRAME_RUNS, FRAME_RUNS, 200]
    assert [each for frame in cut for each in frame] == list(range(burst))


def test_large_runs_are_cut_by_their_bytes_and_one_goes_whatever_its_size() -> None:
    outgoing = Outgoing()
    sizes = [FRAME_BYTES // 2 - 100, FRAME_BYTES // 2 - 100, 10, 2 * FRAME_BYTES, 10]
    outgoing.runs.extend(run(number, size) for number, size in enumerate(sizes))

    assert frames(outgoing) == [[0, 1, 2], [3], [4]]


LANES = [
    ([(FRAME_BYTES // 2, "a"), (FRAME_BYTES // 2, "b"), (FRAME_BYTES, "b"), (1, "c")], [1, 2, 1]),
    ([(FRAME_BYTES, "a"), (FRAME_BYTES, "a"), (FRAME_BYTES, "a"), (1, "b")], [3, 1]),
    ([(1, "a")] * (FRAME_RUNS - 1) + [(1, "b")] * 2, [FRAME_RUNS - 1, 2]),
]
"""The size and the lane of runs, and how many are in each frame."""


@pytest.mark.parametrize(("runs", "cut"), LANES)
def test_runs_of_one_lane_are_in_one_frame(runs: list[tuple[int, str]], cut: list[int]) -> None:
    """S2: the broker may refuse those of one frame and take those of the next."""
    outgoing, plain = Outgoing(), Outgoing()
    for number, (size, lmq_name) in enumerate(runs):
        outgoing.runs.append(run(number, size, lmq_name))
    plain.plain_runs.add(0, [(lmq_name, bytes(size), 1, 9, 2) for size, lmq_name in runs])

    in_columns = []
    while plain.has_rest:
        in_columns += [len(each.bodies) for each in plain.next_frame().run_arrays]

    assert [len(each) for each in frames(outgoing)] == cut
    assert in_columns == cut


def test_a_lane_that_does_not_fit_beside_other_runs_waits_for_the_next_frame() -> None:
    outgoing = Outgoing()
    outgoing.runs.append(run(1))
    half = bytes(FRAME_BYTES // 2)
    outgoing.plain_runs.add(2, [("orders/a", half, 1, 9, 2)] * 3)

    first, second = outgoing.next_frame(), outgoing.next_frame()

    assert (len(first.runs), len(first.run_arrays)) == (1, 0)
    assert [len(each.bodies) for each in second.run_arrays] == [3]


@pytest.mark.parametrize(
    ("sizes", "cut"),
    [
        ([1] * (FRAME_RUNS + 1), [FRAME_RUNS, 1]),
        ([FRAME_BYTES // 2, FRAME_BYTES // 2, 1, 2 * FRAME_BYTES, 1], [2, 1, 1, 1]),
    ],
    ids=["by their number", "by their bytes"],
)
def test_runs_in_columns_are_cut_with_all_their_columns(sizes: list[int], cut: list[int]) -> None:
    outgoing = Outgoing()
    outgoing.plain_runs.add(
        7, [(f"orders/{at}", bytes(size), 1, 9, 2) for at, size in enumerate(sizes)]
    )

    arrays: list[RunArray] = []
    while outgoing.has_rest:
        arrays += outgoing.next_frame().run_arrays

    assert [len(array.bodies) for array in arrays] == cut
    runs = [run for array in arrays for run in rows_of(array.runs, 4)]
    assert runs == [(7 + index, 1, 9, 2) for index in range(len(sizes))]
    assert [len(body) for array in arrays for body in array.bodies] == sizes
    names = [name for array in arrays for name in array.lmq_names]
    assert names == [f"orders/{at}" for at in range(len(sizes))]


def test_settlements_beyond_what_a_frame_may_hold_stay_for_the_next() -> None:
    outgoing = Outgoing()
    settlements = limits.SETTLEMENTS_PER_FRAME_MAX + 5
    for tag in range(settlements):
        outgoing.parts.settlements.append(Settlement(delivery_tag=tag))

    first, second = outgoing.next_frame(), outgoing.next_frame()

    tags = [each.delivery_tag for frame in (first, second) for each in frame.settlements]
    assert len(first.settlements) == limits.SETTLEMENTS_PER_FRAME_MAX
    assert tags == list(range(settlements))
    assert not outgoing.has_rest


def test_settlements_of_many_ranges_are_cut_by_their_bytes_and_keep_their_order() -> None:
    outgoing = Outgoing()
    many = Settlement()
    for start in range(limits.SETTLEMENT_RANGES_MAX):
        many.ranges.add(start=8_000 + start, end=9_000 + start)
    for tag in range(4_000):
        many.delivery_tag = tag
        outgoing.parts.settlements.append(many)  # a copy

    cut = []
    while outgoing.has_rest:
        cut.append(outgoing.next_frame())

    assert max(frame.ByteSize() for frame in cut) <= limits.FRAME_BYTES_MAX
    assert [each.delivery_tag for frame in cut for each in frame.settlements] == [*range(4_000)]
