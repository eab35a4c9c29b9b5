"""Fitting: a frame to a client that has gathered more than one may carry leaves as several.

Parts stay in the order in which clients take those of one frame.
"""

from collections.abc import Iterator
from typing import Final

from tidemark.api.broker.v1 import broker_pb2
from tidemark.limits import FRAME_BYTES_MAX

_PART_BYTES: Final = 16
"""What a part takes besides itself: its field and its length."""


def split_to_fit(
    frame: broker_pb2.SessionResponse, frame_bytes: int
) -> Iterator[broker_pb2.SessionResponse]:
    """The frame as it is, or in pieces that gRPC takes; at least one part in each."""
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
