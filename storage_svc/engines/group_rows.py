"""Rows of groups: progress, lanes and returned messages."""

from struct import Struct
from typing import NamedTuple

from storage_svc.engines.keys import read_text, read_u64, read_u64x2, text, u64, u64x2
from storage_svc.queue.group import Group
from storage_svc.queue.lane import Lane
from storage_svc.queue.retry import Turn
from storage_svc.queue.returned import Returned, ReturnPlace
from storage_svc.queue.run import Run, Slice

_GROUP = Struct(">QQQQQQ")
_SETTLED = Struct(">Q")
_SETTLED_AT = 8

_RETURNED = Struct(">QQIIQQBQQ")


def group_key(queue_id: int, group: str) -> bytes:
    return u64(queue_id) + text(group.encode())


def group_value(group: Group) -> bytes:
    """Includes the mark of the lane without a key, the only lane that most queues have."""
    lane = group.lanes.get("")
    mark = lane.mark if lane is not None else (group.base, group.base)
    return (
        _GROUP.pack(group.base, group.settled, group.owner_epoch, *mark, group.last_used_ms)
        + group.owner_client_id.encode()
    )


def read_group(key: bytes, value: bytes) -> tuple[Group, tuple[int, int]]:
    """The group, without lanes and weights, and the mark of its lane without a key."""
    name, _ = read_text(key, 8)
    base, settled, owner_epoch, run_start, position, last_used_ms = _GROUP.unpack_from(value)
    group = Group(name.decode(), base, {})
    group.settled = settled
    group.owner_epoch = owner_epoch
    group.last_used_ms = last_used_ms
    group.owner_client_id = value[_GROUP.size :].decode()
    return group, (run_start, position)


class GroupProgress(NamedTuple):
    """How far a group is, as its row has it."""

    base: int
    settled: int
    position: int


def read_progress(value: bytes) -> GroupProgress:
    base, settled, _, _, position, _ = _GROUP.unpack_from(value)
    return GroupProgress(base, settled, position)


def with_settled(row: bytearray, at: int, settled: int) -> None:
    """Change the number of settled messages in the value of a group, which begins at `at`."""
    _SETTLED.pack_into(row, at + _SETTLED_AT, settled)


def lane_key(queue_id: int, group: str, fairness_key: str) -> bytes:
    return group_key(queue_id, group) + text(fairness_key.encode())


def lane_value(lane: Lane) -> bytes:
    return u64x2(*lane.mark)


def read_lane(key: bytes, value: bytes) -> tuple[str, str, tuple[int, int]]:
    """Group, fairness key and mark."""
    group, at = read_text(key, 8)
    fairness_key, _ = read_text(key, at)
    run_start, position = read_u64x2(value)
    return group.decode(), fairness_key.decode(), (run_start, position)


def returned_key(queue_id: int, group: str, start: int) -> bytes:
    return group_key(queue_id, group) + u64(start)


def returned_value(returned: Returned) -> bytes:
    slice_ = returned.slice
    return (
        _RETURNED.pack(
            slice_.end,
            slice_.run.first_offset,
            slice_.attempts,
            slice_.deliveries,
            slice_.first_delivery_ms,
            returned.not_before_ms,
            returned.place,
            *returned.turn,
        )
        + slice_.run.fairness_key.encode()
    )


def returned_run_key(key: bytes, value: bytes) -> bytes:
    """The key of the run header of a returned slice."""
    return key[:8] + text(value[_RETURNED.size :]) + value[8:16]


def read_returned(key: bytes, value: bytes, run: Run) -> tuple[str, Returned]:
    """Group, and the returned slice."""
    group, at = read_text(key, 8)
    end, _, *history, not_before_ms, place, after, reservation_id = _RETURNED.unpack_from(value)
    slice_ = Slice(read_u64(key, at), end, run, *history)
    turn = Turn(after, reservation_id)
    return group.decode(), Returned(slice_, not_before_ms, ReturnPlace(place), turn)


def returned_facts(value: bytes) -> tuple[int, str]:
    """Attempts and fairness key, without the run."""
    return int(_RETURNED.unpack_from(value)[2]), value[_RETURNED.size :].decode()


def returned_times(value: bytes) -> tuple[int, int]:
    """The first offset of its run, and the end of its delay, 0 without one."""
    _, run_offset, _, _, _, not_before_ms, *_ = _RETURNED.unpack_from(value)
    return run_offset, not_before_ms


def delay_key(queue_id: int, group: str, start: int, not_before_ms: int) -> bytes:
    return u64(not_before_ms) + returned_key(queue_id, group, start)
