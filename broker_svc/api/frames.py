"""Frames to clients: a response that is too large for gRPC is split into several.

The parts keep the order in which a client processes those of one frame.
"""

from collections.abc import Iterator
from operator import itemgetter
from typing import Final

from google.protobuf.message import Message

from tidemark.api.broker.v1 import broker_pb2
from tidemark.limits import FRAME_BYTES_MAX

_PART_BYTES: Final = 16
"""The overhead of a part: its field tag and its length."""

_SENT_FIRST: Final = frozenset({"welcome", "deliveries", "delivery_arrays"})


def split_to_fit(
    frame: broker_pb2.SessionResponse, frame_bytes: int
) -> Iterator[broker_pb2.SessionResponse]:
    """The frame unchanged, or in pieces that gRPC accepts, with at least one part each."""
    if frame_bytes <= FRAME_BYTES_MAX:
        yield frame
        return
    piece, piece_bytes = broker_pb2.SessionResponse(), 0
    if frame.HasField("welcome"):
        piece.welcome.CopyFrom(frame.welcome)
    for field, part in _parts(frame):
        part_bytes = part.ByteSize() + _PART_BYTES
        if piece_bytes and piece_bytes + part_bytes > FRAME_BYTES_MAX:
            yield piece
            piece, piece_bytes = broker_pb2.SessionResponse(), 0
        getattr(piece, field).append(part)
        piece_bytes += part_bytes
    yield piece


def _parts(frame: broker_pb2.SessionResponse) -> Iterator[tuple[str, Message]]:
    """All parts but the welcome, with their fields. Deliveries are in the order of their tags,
    before parts that may name them."""
    delivered: list[tuple[int, str, Message]] = [
        *((each.delivery_tag, "deliveries", each) for each in frame.deliveries),
        *((each.delivery_tags[0], "delivery_arrays", each) for each in frame.delivery_arrays),
    ]
    for _, name, part in sorted(delivered, key=itemgetter(0)):
        yield name, part
    for field, value in frame.ListFields():
        if field.name not in _SENT_FIRST:
            for part in value:
                yield field.name, part
