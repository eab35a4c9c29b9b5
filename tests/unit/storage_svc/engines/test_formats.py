"""The format of stored data, which storage writes and the retention jobs must know."""

from hashlib import sha256

from spark_batch.storage_client import FORMAT_VERSION as KNOWN_TO_JOBS
from storage_svc.engines import group_rows, outbox_rows, queue_rows, reservation_rows, run_rows
from storage_svc.engines.engine import FORMAT_VERSION
from storage_svc.operations import outbox
from storage_svc.operations.outbox import DeadReason, OutboxEntry
from storage_svc.queue.group import Group
from storage_svc.queue.lane import Lane
from storage_svc.queue.record import QueueRecord
from storage_svc.queue.reservation import Ending, Reservation
from storage_svc.queue.retry import Turn
from storage_svc.queue.returned import Returned, ReturnPlace
from storage_svc.queue.run import Run, Slice

LAYOUT = (9, "4bface28d45ef1e0")
"""A format version, and the digest of the rows below as that version writes them."""

RUN = Run(7, 2, 40, 1_000, 9_000, "tenant", "00-trace")
SLICE = Slice(7, 9, RUN, 1, 2, 1_500)


def test_the_jobs_know_the_format_that_storage_writes() -> None:
    """R11: a pass checks the format first, and would refuse its own storage."""
    assert KNOWN_TO_JOBS == FORMAT_VERSION


def test_rows_of_another_layout_have_another_format_version() -> None:
    """S2: data that an older version wrote is refused at the start, never misread.

    If this fails, raise FORMAT_VERSION and note the new digest here.
    """
    kept = QueueRecord(1, "t/a", 10, 20, 9, 2, 40, 1, keyed=True, kept=True)
    group = Group("g", 3, {})
    group.owner_epoch, group.owner_client_id = 5, "ada"
    reservation = Reservation(4, "g", SLICE, 5_000, owner_epoch=5, done=[(7, 8, Ending.ACK)])
    settled = Reservation(3, "g", SLICE, 0, open_spans=(), done=[(7, 9, Ending.ACK)])
    whole = QueueRecord(
        1,
        "t/a",
        10,
        20,
        groups={"g": group},
        held={4: reservation},
        settled=reservation_rows.settled_entry(settled),
    )
    written = (
        queue_rows.catalog_key("t/a"),
        queue_rows.queue_value(QueueRecord(1, "t/a", 10, 20)),
        queue_rows.queue_value(kept),
        queue_rows.queue_value(whole),
        run_rows.run_key(1, RUN),
        run_rows.run_value(RUN, b"body"),
        run_rows.run_value(RUN._replace(body_bytes=10_000), b"body"),
        run_rows.body_key(1, RUN.first_offset),
        run_rows.ttl_key(1, RUN),
        group_rows.group_key(1, "g"),
        group_rows.group_value(group),
        group_rows.lane_key(1, "g", "tenant"),
        group_rows.lane_value(Lane("tenant", 3)),
        group_rows.returned_key(1, "g", 7),
        group_rows.returned_value(Returned(SLICE, 3_000)),
        group_rows.returned_value(Returned(SLICE, 0, ReturnPlace.BEHIND, Turn(9, 4))),
        group_rows.delay_key(1, "g", 7, 3_000),
        reservation_rows.reservation_key(1, 4),
        reservation_rows.reservation_value(reservation),
        reservation_rows.deadline_key(reservation.deadline_ms, 1, reservation.reservation_id),
        run_rows.consumed_value([run_rows.consumed_entry(kept, "g", 7, 9, 1_000, 2_000)]),
        outbox_rows.outbox_key("dead", 8),
        outbox.encode(OutboxEntry(9, "dead", 2, 3, b"", "k", DeadReason.REJECTED, "", 9, 7)),
    )

    digest = sha256(b"".join(len(row).to_bytes(4) + row for row in written)).hexdigest()[:16]

    assert (FORMAT_VERSION, digest) == LAYOUT
