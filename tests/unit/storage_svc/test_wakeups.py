"""Wake-ups: lifecycle is notified exactly of work that its next sweep would find late (L7)."""

from storage_svc.engines.engine import Table
from storage_svc.lifecycle.wakeups import WakeUps


def scanned(wakeups: WakeUps, table: Table, next_due_ms: int | None) -> None:
    wakeups.scan_begins(table)
    wakeups.scan_ended(table, next_due_ms)


def test_what_is_due_later_than_the_next_look_need_not_be_told() -> None:
    wakeups = WakeUps()
    scanned(wakeups, Table.SCHEDULE, 500)

    assert not wakeups.added(Table.SCHEDULE, 500)
    assert wakeups.take() is None


def test_what_is_due_earlier_is_told_once() -> None:
    wakeups = WakeUps()
    scanned(wakeups, Table.SCHEDULE, 500)

    told = [wakeups.added(Table.SCHEDULE, due_ms) for due_ms in (400, 450, 300)]

    assert told == [True, False, True]
    assert (wakeups.take(), wakeups.take()) == (300, None)


def test_without_anything_known_everything_is_told() -> None:
    wakeups = WakeUps()
    scanned(wakeups, Table.OUTBOX, None)

    assert wakeups.added(Table.OUTBOX, 7)
    assert wakeups.take() == 7


def test_indexes_are_apart() -> None:
    wakeups = WakeUps()
    scanned(wakeups, Table.SCHEDULE, 500)
    scanned(wakeups, Table.TTL, 100)

    assert wakeups.added(Table.SCHEDULE, 300)


def test_what_is_added_during_a_scan_is_told_though_the_scan_ends_later() -> None:
    wakeups = WakeUps()
    scanned(wakeups, Table.SCHEDULE, 100)

    wakeups.scan_begins(Table.SCHEDULE)
    told = wakeups.added(Table.SCHEDULE, 150)
    wakeups.scan_ended(Table.SCHEDULE, 300)

    assert told
    assert not wakeups.added(Table.SCHEDULE, 200), "the wake-up comes earlier"


def test_what_could_not_be_told_is_kept_with_what_came_since() -> None:
    wakeups = WakeUps()
    wakeups.added(Table.SCHEDULE, 300)
    untold = wakeups.take()
    assert untold is not None

    wakeups.added(Table.TTL, 400)
    wakeups.put_back(untold)

    assert wakeups.take() == 300
