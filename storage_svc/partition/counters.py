"""The durable counters of a partition and its claim, one small record each.

Counters only grow, also over deletions and restarts: a queue_id, a reservation id or an epoch is
never given twice. The record is written with every commit, so it costs no read and no block of ids.
"""

import random
from dataclasses import dataclass, fields
from struct import Struct

from storage_svc.engines.engine import Batch, Engine, Table
from storage_svc.engines.keys import read_text, read_u64x2, text, u64x2

_NAMING = (
    "owner_epoch",
    "queue_id",
    "reservation_id",
    "schedule_id",
    "outbox_sequence",
    "record",
)
_COUNTERS_KEY = b"counters"
_CLAIM_KEY = b"claim"


@dataclass(slots=True)
class Counters:
    """The last number given of each kind, and the time of the last commit."""

    commit: int = 0
    time_ms: int = 0
    broker_epoch: int = 0
    owner_epoch: int = 0
    queue_id: int = 0
    reservation_id: int = 0
    schedule_id: int = 0
    outbox_sequence: int = 0
    record: int = 0
    topic_version: int = 0
    # Not the last of anything, but kept here because they change with every commit:
    queues: int = 0  # that exist
    messages: int = 0  # that are stored, without scheduled ones
    body_bytes: int = 0  # of those
    published: int = 0  # messages appended to queues, in total
    delivered: int = 0  # messages handed out, in total
    acked: int = 0  # messages acknowledged, in total
    paused_queues: int = 0  # that exist and are paused themselves
    suspended_ms: int = 0  # since when deletions are suspended, 0 if they are not
    deadlines: int = 0  # of reservations and nack delays, that are running

    def packed(self) -> bytes:
        """In the order of the fields. Each is named: every commit pays for this, and with
        `attrgetter` it takes 1.6 times as long."""
        return _COUNTERS.pack(
            self.commit,
            self.time_ms,
            self.broker_epoch,
            self.owner_epoch,
            self.queue_id,
            self.reservation_id,
            self.schedule_id,
            self.outbox_sequence,
            self.record,
            self.topic_version,
            self.queues,
            self.messages,
            self.body_bytes,
            self.published,
            self.delivered,
            self.acked,
            self.paused_queues,
            self.suspended_ms,
            self.deadlines,
        )

    def skip_to(self, floor: int) -> None:
        """Leave out the numbers that commits may have given which the store has lost since: old
        receipts and epochs must not name anything new."""
        for name in _NAMING:
            setattr(self, name, max(floor, getattr(self, name)))

    def skip_by(self, numbers: int) -> None:
        """The same, where there is no storage epoch to begin from."""
        for name in _NAMING:
            setattr(self, name, getattr(self, name) + numbers)


_COUNTERS = Struct(f">{len(fields(Counters))}Q")


@dataclass(frozen=True, slots=True)
class Claim:
    """The broker that holds the partition."""

    broker_id: str
    address: str
    incarnation: int
    assignment_version: int


NO_CLAIM = Claim("", "", 0, 0)


def first_number(storage_epoch: int) -> int:
    """The first number of counters under a storage epoch, at random within the range of the epoch:
    a store that has lost commits may have lost the epoch as well."""
    return (storage_epoch << 32) + random.getrandbits(31) if storage_epoch else 0


async def load_counters(engine: Engine) -> tuple[Counters, Claim]:
    """The counters and the claim of the last commit; zeros and no claim for a new partition."""
    counters, claim = await engine.load(Table.META, [_COUNTERS_KEY, _CLAIM_KEY])
    return (
        Counters() if counters is None else Counters(*_COUNTERS.unpack(counters)),
        NO_CLAIM if claim is None else _read_claim(claim),
    )


def put_counters(batch: Batch, counters: Counters) -> None:
    batch.put(Table.META, _COUNTERS_KEY, counters.packed())


def put_claim(batch: Batch, claim: Claim) -> None:
    value = u64x2(claim.incarnation, claim.assignment_version) + text(claim.broker_id.encode())
    batch.put(Table.META, _CLAIM_KEY, value + claim.address.encode())


def _read_claim(value: bytes) -> Claim:
    incarnation, assignment_version = read_u64x2(value)
    broker_id, at = read_text(value, 16)
    return Claim(broker_id.decode(), value[at:].decode(), incarnation, assignment_version)
