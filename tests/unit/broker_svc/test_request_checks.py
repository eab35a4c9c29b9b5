"""Checks of session frames: how many parts one may carry, however small they are."""

from collections.abc import Callable, Mapping
from typing import Final

import pytest

from broker_svc.api.request_checks import check_counts
from tidemark import limits
from tidemark.api.broker.v1.broker_pb2 import SessionRequest
from tidemark.errors import InvalidArgument

Fill = Callable[[SessionRequest, int], None]
"""Puts so many of a kind into a frame, each as small as it can be."""


def entries(request: SessionRequest, count: int) -> None:
    sync = request.syncs.add()
    for _ in range(count):
        sync.entries.add()


def reported(request: SessionRequest, count: int) -> None:
    held = request.heartbeat.held.add()
    for _ in range(count):
        held.entries.add()


def runs_in_columns(request: SessionRequest, count: int) -> None:
    array = request.run_arrays.add()
    array.runs.extend([0] * 4 * count)
    array.lmq_names.extend([""] * count)
    array.bodies.extend([b""] * count)


def parts(field: str) -> Fill:
    def fill(request: SessionRequest, count: int) -> None:
        for _ in range(count):
            getattr(request, field).add()

    return fill


KINDS: Final[Mapping[str, tuple[Fill, int]]] = {
    **{
        field: (parts(field), limits.FRAME_PARTS_MAX)
        for field in ("open_consumers", "open_publishers", "syncs", "credits", "hand_outs")
    },
    "destroy_publishers": (
        lambda request, count: request.destroy_publishers.extend([0] * count),
        limits.FRAME_PARTS_MAX,
    ),
    "runs": (parts("runs"), limits.FRAME_RUNS_MAX),
    "runs in columns": (runs_in_columns, limits.FRAME_RUNS_MAX),
    "settlements": (parts("settlements"), limits.SETTLEMENTS_PER_FRAME_MAX),
    "acks": (
        lambda request, count: request.acks.add().delivery_tags.extend([0] * count),
        limits.SETTLEMENTS_PER_FRAME_MAX,
    ),
    "renewals": (
        lambda request, count: request.renewals.add().delivery_tags.extend([0] * count),
        limits.RENEWALS_PER_FRAME_MAX,
    ),
    "entries": (entries, limits.FRAME_ENTRIES_MAX),
    "held": (reported, limits.SUBSCRIPTIONS_PER_SESSION_MAX),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_carries_so_many_of_a_kind_and_not_one_more(kind: str) -> None:
    """S3: small frames are not counted, so even the smallest parts must exceed what is small."""
    fill, most = KINDS[kind]
    full, too_full = SessionRequest(), SessionRequest()
    fill(full, most)
    fill(too_full, most + 1)

    check_counts(full)

    with pytest.raises(InvalidArgument):
        check_counts(too_full)
