"""Frames to the broker: what gathers while one is being written, and how much of it fits the next.

Pure: it sends nothing and waits for nothing.
"""

from collections import deque
from typing import Final

from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.message_pb2 import PublishRun

FRAME_RUNS: Final = 500
FRAME_BYTES: Final = 1024 * 1024
"""What a frame carries of a burst, far below what the broker would take: while the client writes
one frame, the broker works on another and storage on a third."""


class Outgoing:
    """What is to be sent: runs in the order in which they were submitted, and everything else."""

    __slots__ = ("parts", "runs")

    def __init__(self) -> None:
        self.parts = broker_pb2.SessionRequest()
        """Everything but runs."""
        self.runs: deque[PublishRun] = deque()

    def next_frame(self) -> broker_pb2.SessionRequest:
        """Everything that gathered, as far as it fits a frame; the rest stays."""
        frame, self.parts = self.parts, broker_pb2.SessionRequest()
        if len(frame.settlements) > limits.SETTLEMENTS_PER_FRAME_MAX:
            rest = frame.settlements[limits.SETTLEMENTS_PER_FRAME_MAX :]
            self.parts.settlements.extend(rest)
            del frame.settlements[limits.SETTLEMENTS_PER_FRAME_MAX :]
        if len(frame.credits) > limits.FRAME_PARTS_MAX:
            self.parts.credits.extend(frame.credits[limits.FRAME_PARTS_MAX :])
            del frame.credits[limits.FRAME_PARTS_MAX :]
        room_bytes = min(FRAME_BYTES, limits.FRAME_BYTES_MAX - frame.ByteSize())
        runs = self.runs
        while runs and len(frame.runs) < FRAME_RUNS:
            room_bytes -= runs[0].batch.ByteSize()
            if frame.runs and room_bytes < 0:
                break
            frame.runs.append(runs.popleft())
        return frame

    @property
    def has_rest(self) -> bool:
        """Whether the last frame left something over."""
        return bool(self.runs or self.parts.settlements or self.parts.credits)
