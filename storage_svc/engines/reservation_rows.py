"""Rows of reservations, live and settled, and their deadlines."""

from collections.abc import Iterator
from struct import Struct

from storage_svc.engines.keys import name, read_text, read_u64, text, u64x2, u64x3
from storage_svc.queue.reservation import Ending, Reservation
from storage_svc.queue.run import Run, Slice

_RESERVATION = Struct(">QQQQIIQQQHHI")

_OPEN = 9
"""Where it has the number of open ranges, before that of those that ended."""

_SPAN = Struct(">QQ")

_DONE = Struct(">QQB")

_SETTLED = Struct(">QQIB")


def reservation_key(queue_id: int, reservation_id: int) -> bytes:
    return u64x2(queue_id, reservation_id)


deadline_key = u64x3
"""Of a deadline, a queue id and a reservation id."""


def reservation_value(reservation: Reservation) -> bytes:
    slice_ = reservation.slice
    head = _RESERVATION.pack(
        slice_.run.first_offset,
        slice_.start,
        slice_.end,
        reservation.deadline_ms,
        slice_.attempts,
        slice_.deliveries,
        slice_.first_delivery_ms,
        reservation.owner_epoch,
        reservation.broker_incarnation,
        len(reservation.open),
        len(reservation.done),
        reservation.given_messages,
    )
    spans = done = b""
    for start, end in reservation.open:
        spans += _SPAN.pack(start, end)
    for start, end, ending in reservation.done:
        done += _DONE.pack(start, end, ending)
    return head + spans + done + name(reservation.group) + slice_.run.fairness_key.encode()


def reservation_run_key(key: bytes, value: bytes) -> bytes:
    """The key of the run header of a reservation."""
    _, at = read_text(value, _names_at(value))
    return key[:8] + text(value[at:]) + value[:8]


def read_reservation(key: bytes, value: bytes, run: Run) -> Reservation:
    (
        _,
        start,
        end,
        deadline_ms,
        attempts,
        deliveries,
        first_delivery_ms,
        owner_epoch,
        broker_incarnation,
        open_spans,
        done,
        given_messages,
    ) = _RESERVATION.unpack_from(value)
    at = _RESERVATION.size
    spans = [_SPAN.unpack_from(value, at + n * _SPAN.size) for n in range(open_spans)]
    at += open_spans * _SPAN.size
    endings = [_DONE.unpack_from(value, at + n * _DONE.size) for n in range(done)]
    group, _ = read_text(value, _names_at(value))
    return Reservation(
        read_u64(key, 8),
        group.decode(),
        Slice(start, end, run, attempts, deliveries, first_delivery_ms),
        deadline_ms,
        owner_epoch=owner_epoch,
        broker_incarnation=broker_incarnation,
        given_messages=given_messages,
        open_spans=spans,
        done=[(begin, stop, Ending(how)) for begin, stop, how in endings],
    )


def settled_entry(reservation: Reservation) -> bytes:
    """A reservation with messages that all ended in the same way, to compare with a repeat."""
    slice_ = reservation.slice
    ending = reservation.done[0][2]
    messages = slice_.end - slice_.start
    head = _SETTLED.pack(reservation.reservation_id, slice_.start, messages, ending)
    return head + name(reservation.group)


def read_settled(value: bytes, run: Run) -> Iterator[Reservation]:
    """Settled reservations of one row; their runs may be gone, so that any stands for them."""
    at = 0
    while at < len(value):
        reservation_id, start, messages, how = _SETTLED.unpack_from(value, at)
        group, at = read_text(value, at + _SETTLED.size)
        end = start + messages
        yield Reservation(
            reservation_id,
            group.decode(),
            Slice(start, end, run),
            deadline_ms=0,
            open_spans=(),
            done=((start, end, Ending(how)),),
        )


def is_live(reservation_value: bytes) -> bool:
    """Whether any message of a stored reservation is open, without decoding the rest."""
    return int(_RESERVATION.unpack_from(reservation_value)[_OPEN]) > 0


def reservation_deadline_ms(value: bytes) -> int:
    """The deadline of a stored reservation, without decoding the rest."""
    return int(_RESERVATION.unpack_from(value)[3])


def _names_at(value: bytes) -> int:
    head = _RESERVATION.unpack_from(value)
    return _RESERVATION.size + int(head[_OPEN]) * _SPAN.size + int(head[_OPEN + 1]) * _DONE.size
