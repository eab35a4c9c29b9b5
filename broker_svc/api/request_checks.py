"""Checks of a session's frames: a frame is checked as a whole before any part is carried out."""

from collections.abc import Sequence

from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.errors import InvalidArgument


def check_counts(request: broker_pb2.SessionRequest) -> None:
    """Raise for a frame with more parts than one may carry. One of `SMALL_FRAME_BYTES` cannot have
    too many."""
    parts: tuple[tuple[str, Sequence[object], int], ...] = (
        ("open_consumers", request.open_consumers, limits.FRAME_PARTS_MAX),
        ("open_publishers", request.open_publishers, limits.FRAME_PARTS_MAX),
        ("destroy_publishers", request.destroy_publishers, limits.FRAME_PARTS_MAX),
        ("syncs", request.syncs, limits.FRAME_PARTS_MAX),
        ("credits", request.credits, limits.FRAME_PARTS_MAX),
        ("hand_outs", request.hand_outs, limits.FRAME_PARTS_MAX),
        ("renewals", request.renewals, limits.FRAME_PARTS_MAX),
        ("acks", request.acks, limits.FRAME_PARTS_MAX),
        ("settlements", request.settlements, limits.SETTLEMENTS_PER_FRAME_MAX),
        ("runs", request.runs, limits.FRAME_RUNS_MAX),
        ("run_arrays", request.run_arrays, limits.FRAME_PARTS_MAX),
    )
    for field, items, items_max in parts:
        if len(items) > items_max:
            raise InvalidArgument(f"at most {items_max} {field} a frame", field=field)
    if sum(len(each.entries) for each in request.syncs) > limits.FRAME_ENTRIES_MAX:
        raise InvalidArgument(
            f"at most {limits.FRAME_ENTRIES_MAX} subscriptions a frame", field="syncs"
        )
    renewed = sum(len(each.delivery_tags) + len(each.receipts) for each in request.renewals)
    if renewed > limits.RENEWALS_PER_FRAME_MAX:
        raise InvalidArgument(
            f"at most {limits.RENEWALS_PER_FRAME_MAX} reservations a frame", field="renewals"
        )
    acked = sum(len(each.delivery_tags) for each in request.acks)
    if acked > limits.SETTLEMENTS_PER_FRAME_MAX:
        raise InvalidArgument(
            f"at most {limits.SETTLEMENTS_PER_FRAME_MAX} deliveries a frame", field="acks"
        )
    if sum(len(each.lmq_names) for each in request.run_arrays) > limits.FRAME_RUNS_MAX:
        raise InvalidArgument(f"at most {limits.FRAME_RUNS_MAX} runs a frame", field="run_arrays")
    check_held(request.heartbeat.held)


def check_held(held: Sequence[broker_pb2.HeldSubscriptions]) -> None:
    """Raise for a heartbeat that reports more than any client can have subscribed to."""
    entries = sum(len(each.entries) for each in held)
    if max(len(held), entries) > limits.SUBSCRIPTIONS_PER_SESSION_MAX:
        raise InvalidArgument(
            f"a client has at most {limits.SUBSCRIPTIONS_PER_SESSION_MAX} subscriptions",
            field="held",
        )
