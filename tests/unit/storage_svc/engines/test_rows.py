"""Whatever is written to a table is read back as it was, and keys sort as they should."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage_svc.engines import group_rows, queue_rows, reservation_rows, run_rows
from storage_svc.engines.keys import read_text, read_u64, read_u64x2, read_u64x3
from storage_svc.queue.group import Group
from storage_svc.queue.lane import Lane
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.reservation import Ending, Reservation
from storage_svc.queue.retry import Turn
from storage_svc.queue.returned import Returned, ReturnPlace
from storage_svc.queue.run import Run, Slice

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
OFFSETS = st.integers(0, 2**62)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,8}", fullmatch=True)
LITES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
LMQ_NAMES = st.one_of(NAMES, st.builds("{}/{}".format, NAMES, LITES))
SPANS = st.tuples(OFFSETS, OFFSETS)

BOOLEANS = [st.booleans()] * 7
RECORDS = st.builds(QueueRecord, U64, LMQ_NAMES, *[U64] * 9, *BOOLEANS)
RUNS = st.builds(Run, OFFSETS, st.integers(1, 2**32 - 1), U64, U64, U64, TEXTS, TEXTS)
SLICES = st.builds(Slice, OFFSETS, OFFSETS, RUNS, U32, U32, OFFSETS)
RETURNED = st.builds(
    Returned, SLICES, U64, st.sampled_from(ReturnPlace), st.builds(Turn, OFFSETS, U64)
)


@st.composite
def groups(draw: st.DrawFn) -> Group:
    made = Group(draw(TEXTS), draw(U64), {})
    made.settled = draw(U64)
    made.owner_epoch = draw(U64)
    made.owner_client_id = draw(TEXTS)
    return made


@st.composite
def reservations(draw: st.DrawFn) -> Reservation:
    return Reservation(
        draw(U64),
        draw(TEXTS),
        draw(SLICES),
        draw(U64),
        owner_epoch=draw(U64),
        broker_incarnation=draw(U64),
        given_messages=draw(st.integers(0, 2**32 - 1)),
        open_spans=draw(st.lists(SPANS, max_size=4)),
        done=draw(st.lists(st.tuples(OFFSETS, OFFSETS, st.sampled_from(Ending)), max_size=4)),
    )


def fields(reservation: Reservation) -> dict[str, object]:
    return {name: getattr(reservation, name) for name in Reservation.__slots__}


@given(RECORDS)
def test_a_queue_survives_its_row(record: QueueRecord) -> None:
    """S2."""
    key, value = queue_rows.catalog_key(record.lmq_name), queue_rows.queue_value(record)

    assert queue_rows.lmq_name_of(key) == record.lmq_name
    assert queue_rows.read_queue(record.lmq_name, value) == record


SETTLED = st.builds(
    lambda number, group, start, messages, ending: Reservation(
        number,
        group,
        Slice(start, start + messages, Run(0, 1, 0, 0, 0, "", "")),
        0,
        open_spans=(),
        done=[(start, start + messages, ending)],
    ),
    *(U64, TEXTS, OFFSETS, st.integers(1, 2**32 - 1), st.sampled_from(Ending)),
)


@given(
    RECORDS,
    st.lists(groups(), max_size=3, unique_by=lambda each: each.name),
    st.lists(reservations(), max_size=3, unique_by=lambda each: each.reservation_id),
    st.lists(SETTLED, max_size=3),
)
def test_groups_and_reservations_survive_the_row_of_their_queue(
    record: QueueRecord,
    groups: list[Group],
    held: list[Reservation],
    settled: list[Reservation],
) -> None:
    """S2."""
    queue_id = record.queue_id
    record.groups = {each.name: each for each in groups}
    record.held = {each.reservation_id: each for each in held}
    record.settled = b"".join(map(reservation_rows.settled_entry, settled))

    inline = queue_rows.read_inline(queue_rows.queue_value(record))

    assert inline.groups == [
        (group_rows.group_key(queue_id, each.name), group_rows.group_value(each))
        for each in groups
        if not record.groups_apart
    ]
    assert inline.held == [
        (
            reservation_rows.reservation_key(queue_id, each.reservation_id),
            reservation_rows.reservation_value(each),
        )
        for each in held
    ]
    read = reservation_rows.read_settled(inline.settled, Run(0, 1, 0, 0, 0, "", ""))
    assert list(map(fields, read)) == list(map(fields, settled))


@given(LMQ_NAMES, NAMES, st.text(st.characters(categories=["L", "N"]), max_size=3))
@example("t/ab", "t", "a")
@example("t", "t", "")
@example("ta/b", "t", "")
def test_the_range_of_a_topic_holds_its_queues_and_no_others(
    lmq_name: str, topic: str, prefix: str
) -> None:
    start, end = queue_rows.topic_range(topic, prefix)

    name, _, lite = lmq_name.partition("/")
    inside = name == topic and lite.startswith(prefix)
    assert (start <= queue_rows.catalog_key(lmq_name) < end) == inside


@given(st.integers(0, 2**64 - 2), RUNS)
def test_a_run_survives_its_row(queue_id: int, run: Run) -> None:
    """S2."""
    key = run_rows.run_key(queue_id, run)

    value = run_rows.run_value(run, b"body")

    assert run_rows.read_run(key, value) == run
    assert run_rows.read_lane_runs([(key, value)]) == [run]
    assert key.startswith(run_rows.lane_prefix(queue_id, run.fairness_key))
    start, end = queue_rows.queue_range(queue_id)
    assert start <= key < end


@given(RUNS, st.binary(min_size=1, max_size=run_rows.BODY_INLINE_BYTES_MAX + 1))
@example(Run(0, 1, 0, 0, 0, "", ""), bytes(run_rows.BODY_INLINE_BYTES_MAX))
@example(Run(0, 1, 0, 0, 0, "", ""), bytes(run_rows.BODY_INLINE_BYTES_MAX + 1))
def test_a_small_body_shares_the_row_of_its_header(run: Run, body: bytes) -> None:
    run = run._replace(body_bytes=len(body))
    is_small = len(body) <= run_rows.BODY_INLINE_BYTES_MAX

    value = run_rows.run_value(run, body)

    assert run_rows.has_inline_body(run) == is_small
    assert run_rows.inline_body(value) == (body if is_small else b"")


@given(U64, RUNS)
def test_the_keys_of_a_run_name_it(queue_id: int, run: Run) -> None:
    assert read_u64x2(run_rows.body_key(queue_id, run.first_offset)) == (queue_id, run.first_offset)
    expected = (run.dead_deadline_ms, queue_id, run.first_offset)
    assert read_u64x3(run_rows.ttl_key(queue_id, run)) == expected


@given(U64, RUNS, RUNS)
def test_runs_of_a_lane_sort_by_offset(queue_id: int, one: Run, other: Run) -> None:
    """S2: order holds per fairness key."""
    other = other._replace(fairness_key=one.fairness_key)

    in_order = run_rows.run_key(queue_id, one) < run_rows.run_key(queue_id, other)

    assert in_order == (one.first_offset < other.first_offset)


@given(U64, groups())
def test_a_group_survives_its_row(queue_id: int, group: Group) -> None:
    """E8: with its owner, and the base as the mark where there is no lane."""
    read, mark = group_rows.read_group(
        group_rows.group_key(queue_id, group.name), group_rows.group_value(group)
    )

    for name in ("name", "base", "settled", "owner_epoch", "owner_client_id"):
        assert getattr(read, name) == getattr(group, name)
    assert mark == (group.base, group.base)


@given(U64, groups(), st.integers(1, 100), st.integers(1, 100))
def test_the_mark_of_the_lane_without_a_key_travels_with_its_group(
    queue_id: int, group: Group, first: int, messages: int
) -> None:
    """S2: a run half handed out is found again."""
    group.base = 0
    group.offer(Run(first, messages + 1, 10, 0, 0, "", ""))
    group.lanes[""].take(messages)

    _, mark = group_rows.read_group(
        group_rows.group_key(queue_id, group.name), group_rows.group_value(group)
    )

    assert mark == (first, first + messages)


@given(U64, TEXTS, TEXTS, OFFSETS)
def test_a_lane_survives_its_row(queue_id: int, group: str, key: str, position: int) -> None:
    lane = Lane(key, position)

    row = group_rows.lane_key(queue_id, group, key), group_rows.lane_value(lane)

    assert group_rows.read_lane(*row) == (group, key, lane.mark)


@given(U64, TEXTS, RETURNED)
@example(7, "g", Returned(Slice(1, 2, Run(1, 1, 1, 0, 0, "a\0b", ""), 3, 4), 5, ReturnPlace.BURIED))
def test_messages_that_came_back_survive_their_row(
    queue_id: int, group: str, returned: Returned
) -> None:
    """V3, V8."""
    slice_ = returned.slice
    key = group_rows.returned_key(queue_id, group, slice_.start)
    value = group_rows.returned_value(returned)

    assert group_rows.returned_run_key(key, value) == run_rows.run_key(queue_id, slice_.run)
    assert group_rows.read_returned(key, value, slice_.run) == (group, returned)


@given(U64, TEXTS, OFFSETS, U64)
def test_a_delay_names_what_it_delays(
    queue_id: int, group: str, start: int, not_before_ms: int
) -> None:
    key = group_rows.delay_key(queue_id, group, start, not_before_ms)

    name, at = read_text(key, 16)
    assert read_u64x2(key) == (not_before_ms, queue_id)
    assert (name.decode(), read_u64(key, at)) == (group, start)
    assert key[8:] == group_rows.returned_key(queue_id, group, start)


@given(U64, reservations())
def test_a_reservation_survives_its_row(queue_id: int, reservation: Reservation) -> None:
    """V4: with what is open and how the rest ended, live or remembered."""
    run = reservation.slice.run
    key = reservation_rows.reservation_key(queue_id, reservation.reservation_id)
    value = reservation_rows.reservation_value(reservation)

    assert reservation_rows.reservation_run_key(key, value) == run_rows.run_key(queue_id, run)
    assert fields(reservation_rows.read_reservation(key, value, run)) == fields(reservation)
    assert reservation_rows.is_live(value) == reservation.live


def test_a_reservation_cut_into_as_many_pieces_as_it_has_messages_fits_its_row() -> None:
    """S3: ten thousand messages, every other one acknowledged."""
    run = Run(0, 10_000, 10_000, 0, 0, "key", "")
    reservation = Reservation(1, "default", Slice(0, 10_000, run, 0, 1), 5_000)
    reservation.finish([(at, at + 1) for at in range(0, 10_000, 2)], Ending.ACK)

    value = reservation_rows.reservation_value(reservation)

    read = reservation_rows.read_reservation(reservation_rows.reservation_key(1, 1), value, run)
    assert fields(read) == fields(reservation)


@given(U64, reservations())
def test_a_deadline_names_its_reservation_and_sorts_by_time(
    queue_id: int, reservation: Reservation
) -> None:
    """V5."""
    expected = (reservation.deadline_ms, queue_id, reservation.reservation_id)

    key = reservation_rows.deadline_key(*expected)

    assert read_u64x3(key) == expected


@given(st.lists(st.tuples(RECORDS, TEXTS, *[OFFSETS] * 4), max_size=4))
def test_a_consumption_row_names_queue_group_and_range_of_each_settlement(
    settled: list[tuple[QueueRecord, str, int, int, int, int]],
) -> None:
    """R13: with the name, so that it outlives its queue."""
    value = run_rows.consumed_value([run_rows.consumed_entry(*each) for each in settled])

    assert run_rows.consumed_ranges(value) == len(settled)
    assert list(run_rows.read_consumed(value)) == [
        run_rows.Consumed(record.queue_id, start, end, published, first, group, record.lmq_name)
        for record, group, start, end, published, first in settled
    ]


@pytest.mark.parametrize("body", [b"small", bytes(run_rows.BODY_INLINE_BYTES_MAX + 1)])
def test_a_run_for_one_group_is_read_as_it_was_written(body: bytes) -> None:
    run = Run(7, 3, len(body), 1_000, 2_000, "key", "00-trace", "grün")
    row = (run_rows.run_key(1, run), run_rows.run_value(run, body))

    assert run_rows.read_run(*row) == run
    assert run_rows.read_lane_runs([row]) == [run]
    assert run_rows.inline_body(row[1]) == (body if run_rows.has_inline_body(run) else b"")
