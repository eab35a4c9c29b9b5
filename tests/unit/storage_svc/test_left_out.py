"""Due work that cannot be done is left out, for longer each time (V3, L11)."""

from storage_svc.engines.engine import Table
from storage_svc.partition.left_out import ENTRIES_MAX, PAUSE_MS_MAX, PAUSE_MS_MIN, LeftOut


def test_an_entry_is_left_out_for_longer_each_time() -> None:
    """V3: retries back off."""
    left_out = LeftOut()
    pauses_ms = []
    now_ms = 0
    for _ in range(30):
        left_out.add(Table.TTL, b"k", now_ms)
        end_ms = now_ms + 1
        while left_out.includes(Table.TTL, b"k", end_ms):
            end_ms += PAUSE_MS_MIN
        pauses_ms.append(end_ms - now_ms)
        now_ms = end_ms

    assert pauses_ms == sorted(pauses_ms)
    assert (pauses_ms[0], pauses_ms[-1]) == (PAUSE_MS_MIN + 1, PAUSE_MS_MAX + 1)
    assert not left_out.includes(Table.BURIED, b"k", 1)


def test_an_entry_that_was_acted_on_or_is_never_found_again_is_forgotten() -> None:
    left_out = LeftOut()
    left_out.add(Table.TTL, b"done", 0)
    left_out.add(Table.TTL, b"gone", 0)

    left_out.discard(Table.TTL, b"done")
    detail = left_out.detail
    left_out.forget_old(PAUSE_MS_MIN + PAUSE_MS_MAX + 1)

    assert detail == f"1 left out, first {b'gone'.hex()} of ttl"
    assert left_out.detail == ""


def test_the_number_of_entries_is_bounded() -> None:
    """S3: the first that was left out makes room."""
    left_out = LeftOut()

    for number in range(ENTRIES_MAX + 1):
        left_out.add(Table.TTL, b"%d" % number, 0)

    assert not left_out.includes(Table.TTL, b"0", 0)
    assert left_out.includes(Table.TTL, b"%d" % ENTRIES_MAX, 0)
