"""The outbox by destination: turns, pauses, and where the entries of each begin (L6, L7)."""

from storage_svc.partition.outbox_index import PAUSE_MS_MAX, PAUSE_MS_MIN, OutboxIndex


def test_nothing_waits_in_an_empty_outbox() -> None:
    index = OutboxIndex()

    assert index.partitions(0) == []
    assert index.take_turns(0, 10, 0) == []
    assert index.next_retry_ms() is None
    assert index.postpone("dead", 0) is None


def test_destinations_of_one_partition_take_turns() -> None:
    """L6: a long line for one destination does not starve the others."""
    index = OutboxIndex()
    for sequence, name in enumerate(("a", "b", "c"), 1):
        index.added(name, 1, sequence)
    index.added("elsewhere", 2, 4)

    turns = [index.take_turns(1, 2, 0) for _ in range(3)]

    assert turns == [[("a", 1), ("b", 2)], [("c", 3), ("a", 1)], [("b", 2), ("c", 3)]]
    assert index.partitions(0) == [1, 2]


def test_a_destination_that_refuses_is_left_alone_for_longer_each_time() -> None:
    """L6: and tried again at the end of each pause."""
    index = OutboxIndex()
    index.added("full", 1, 1)
    now_ms, pauses_ms = 0, []

    for _ in range(20):
        assert index.take_turns(1, 1, now_ms) == [("full", 1)]
        retry_ms = index.postpone("full", now_ms)
        assert retry_ms is not None
        assert index.next_retry_ms() == retry_ms
        assert index.partitions(retry_ms - 1) == []
        pauses_ms.append(retry_ms - now_ms)
        now_ms = retry_ms

    assert pauses_ms == sorted(pauses_ms)
    assert (pauses_ms[0], pauses_ms[-1]) == (PAUSE_MS_MIN, PAUSE_MS_MAX)


def test_an_entry_that_arrives_ends_the_pause_and_the_count_of_refusals() -> None:
    """L6."""
    index = OutboxIndex()
    index.added("full", 1, 1)
    index.added("full", 1, 2)
    index.postpone("full", 0)
    index.postpone("full", 0)

    index.arrived("full")
    index.removed("full", 1)

    assert index.partitions(0) == [1]
    assert index.postpone("full", 0) == PAUSE_MS_MIN


def test_a_destination_without_entries_is_forgotten() -> None:
    """L7: memory follows what waits."""
    index = OutboxIndex()
    index.added("dead", 1, 1)
    index.postpone("dead", 0)

    index.removed("dead", 1)

    assert len(index) == 0
    assert index.partitions(PAUSE_MS_MAX) == []


def test_scans_begin_where_the_last_one_found_the_first_entry() -> None:
    """L7: cleared entries are not passed over again."""
    index = OutboxIndex()
    index.found("dead", 1, 1)

    index.begins("dead", 7)
    index.begins("dead", 3)

    assert index.take_turns(1, 1, 0) == [("dead", 7)]


def test_a_destination_stays_while_an_entry_waits_for_it_that_was_not_dropped() -> None:
    """L9: entries may be dropped in any order."""
    index = OutboxIndex()
    for sequence in (1, 4, 9):
        index.added("dead", 1, sequence)

    index.removed("dead", 4)
    index.removed("dead", 9)

    assert index.take_turns(1, 1, 0) == [("dead", 1)]
    assert not index.knows_last("dead")
    index.forget("dead")
    assert len(index) == 0
    assert index.partitions(0) == []
