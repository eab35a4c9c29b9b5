"""Frames to clients: a response that is too large for gRPC is split into several.

The parts keep the order in which a client processes those of one frame.
"""

from collections.abc import Iterator
from typing import Final

from tidemark.api.broker.v1 import broker_pb2
from tidemark.limits import FRAME_BYTES_MAX

_PART_BYTES: Final = 16
"""The overhead of a part: its field tag and its length."""


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
    for field, value in frame.ListFields():
        if field.name == "welcome":
            continue
        for part in value:
            part_bytes = part.ByteSize() + _PART_BYTES
            if piece_bytes and piece_bytes + part_bytes > FRAME_BYTES_MAX:
                yield piece
                piece, piece_bytes = broker_pb2.SessionResponse(), 0
            getattr(piece, field.name).append(part)
            piece_bytes += part_bytes
    yield piece
