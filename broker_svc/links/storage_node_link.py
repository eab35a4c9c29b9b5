"""The link to one storage node: the one exchange that carries all partitions that it holds.

Everything that the links of the partitions have for the next frame leaves together, each partition
its share. A partition that cannot continue ends its part; a stream that breaks breaks the links of
all its partitions, and the next bind opens another one. What a link asks, when it may, and what an
answer means is in `partition_link`.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

import grpc

from broker_svc.links.frame_columns import (
    HandOutRow,
    OperationColumns,
    PartitionResults,
    as_operation,
    read_results,
)
from broker_svc.links.unanswered_operations import UnansweredOperations
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2_grpc
from tidemark.errors import TidemarkError, Unavailable
from tidemark.limits import FRAME_BYTES_MAX
from tidemark.rpc.statuses import from_status
from tidemark.turns import NEXT_TURN

Stream = grpc.aio.StreamStreamCall[exchange_pb2.ExchangeRequest, exchange_pb2.ExchangeResponse]

_OPERATIONS_BYTES_MAX: Final = FRAME_BYTES_MAX - 1024 * 1024
"""Operations in one frame: binds and the heads of parts fit beside them."""

_log = logging.getLogger(__name__)


class LinkPart(Protocol):
    """The link of one partition, as its node uses it."""

    @property
    def partition(self) -> int: ...

    @property
    def unanswered(self) -> UnansweredOperations:
        """What it has asked. Operations are moved into frames, and results in columns are taken,
        without the link between: there is little else for each partition of a frame."""

    def before_frame_sent(self, leaving: Collection[int]) -> None:
        """Operations that must be in the next frame are added now, of all partitions that leave
        with it. They may let other partitions leave as well."""

    def take(self, response: exchange_pb2.PartitionResponse) -> None:
        """Results and events have arrived. Raises why the part must end."""

    def handed_out_many(self, hand_outs: Sequence[HandOutRow]) -> None:
        """Hand-outs of this and of other partitions have arrived in columns."""

    def frame_taken(self) -> None:
        """All parts of a frame were taken."""

    def part_ended(self, reason: TidemarkError) -> None:
        """The stream does not carry the partition any more."""


_Bound = tuple[LinkPart, int]
"""A link that a stream carries, and its epoch."""


class StorageNodeLink:
    """One storage node as this broker sees it. `run` serves its stream until cancelled."""

    def __init__(
        self,
        storage: storage_pb2_grpc.StorageServiceStub,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_broken` is called when a stream has ended that this broker did not end."""
        self._storage = storage
        self._on_broken = on_broken
        self._bound: dict[int, _Bound] = {}
        """The links that the stream carries."""
        self._binds: dict[int, int] = {}
        self._unbinds: dict[int, int] = {}
        """Partitions and epochs for the next frame."""
        self._leaving: dict[int, _Bound] = {}
        """Those with operations that may leave."""
        self._wakeup = asyncio.Event()
        """Set while the next frame has something to carry."""
        self.frames_sent = 0
        self.frames_received = 0

    @property
    def is_used(self) -> bool:
        """Whether the link of any partition is bound."""
        return bool(self._bound)

    # --- the links -----------------------------------------------------------------------------

    def bind(self, link: LinkPart, broker_epoch: int) -> None:
        """Carry a partition until its part ends, or `unbind`."""
        self._bound[link.partition] = (link, broker_epoch)
        link.unanswered.carrier = self
        self._binds[link.partition] = broker_epoch
        self._wakeup.set()

    def unbind(self, link: LinkPart) -> None:
        """No effect if the part has ended."""
        bound = self._bound.pop(link.partition, None)
        link.unanswered.carrier = None
        self._leaving.pop(link.partition, None)
        if bound is not None and self._binds.pop(link.partition, None) is None:
            self._unbinds[link.partition] = bound[1]
            self._wakeup.set()

    def may_leave(self, partition: int) -> None:
        """A partition that it carries has operations that need not wait."""
        if not self._leaving:  # else it is set already
            self._wakeup.set()
        self._leaving[partition] = self._bound[partition]

    # --- the stream ----------------------------------------------------------------------------

    async def run(self) -> None:
        """A stream while links are bound, and another one after each that breaks."""
        while True:
            await self._wakeup.wait()
            if self._bound:
                await self._exchange()
            else:
                self._forget_pending()

    async def _exchange(self) -> None:
        reason: TidemarkError = Unavailable("the exchange with storage was cancelled")
        stream: Stream = self._storage.Exchange()
        writing = asyncio.create_task(self._write(stream))
        try:
            async for frame in stream:
                self.frames_received += 1
                self._take_frame(frame)
                await NEXT_TURN  # frames to clients are on their way before another is asked for
            reason = Unavailable("storage ended the exchange")
            self._on_broken()
        except TidemarkError as error:
            reason = error
            self._on_broken()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            reason = Unavailable("a frame could not be sent")  # the writer cancelled the stream
        finally:
            writing.cancel()
            stream.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self._broken(reason)

    def _take_frame(self, frame: exchange_pb2.ExchangeResponse) -> None:
        last: LinkPart | None = None
        bound = self._bound
        has_columns = frame.HasField("columns")
        in_columns: Sequence[PartitionResults] = ()
        if has_columns:
            try:
                in_columns = read_results(frame.columns)
            except ValueError as error:  # nothing of the stream is to be relied on
                detail = f"storage has sent columns that cannot be read: {error}"
                raise Unavailable(detail) from None
        # First the columns: of one partition, they come before what has the long form.
        if in_columns:
            last = self._take_columns(in_columns)
        if len(frame.ListFields()) > has_columns:  # else it has nothing but columns, as most
            for response in frame.parts:
                link, broker_epoch = bound.get(response.partition, (None, 0))
                if link is not None and broker_epoch == response.broker_epoch:
                    self._take(link, response)
                    last = link
                # else of an earlier bind, whose link has dropped its callers
        if last is None:  # nothing was handed out
            return
        try:
            last.frame_taken()  # once: what all of them bring is delivered together
        except Exception:
            _log.exception("a frame was not taken")

    def _take_columns(self, in_columns: Sequence[PartitionResults]) -> LinkPart | None:
        """Returns one of the links if anything was handed out. The hand-outs of all of them are
        passed on together, after all results."""
        last: LinkPart | None = None
        handed_out: list[HandOutRow] = []
        for partition, epoch, commit, results, hand_outs in in_columns:
            link, broker_epoch = self._bound.get(partition, (None, 0))
            if link is None or broker_epoch != epoch:
                continue  # of an earlier bind, whose link has dropped its callers
            try:
                link.unanswered.take_plain(commit, results)
            except TidemarkError as error:
                self._end(link, error)
                continue
            handed_out += hand_outs
            last = link
        if last is None or not handed_out:
            return None
        try:
            last.handed_out_many(handed_out)
        except Exception:  # as `pass_on` does
            _log.exception("hand-outs were not taken")
        return last

    def _take(self, link: LinkPart, response: exchange_pb2.PartitionResponse) -> None:
        try:
            link.take(response)
            if not response.HasField("end"):
                return
            del self._bound[response.partition]  # storage has dropped it already
            reason = from_status(response.end)
        except TidemarkError as error:
            reason = error
        except Exception:  # a fault of one partition stays there (L1)
            _log.exception("a response was not taken", extra={"partition": response.partition})
            reason = Unavailable(f"the link to partition {response.partition} failed")
        self._end(link, reason)

    def _end(self, link: LinkPart, reason: TidemarkError) -> None:
        self.unbind(link)
        link.part_ended(reason)

    def _broken(self, reason: TidemarkError) -> None:
        bound, self._bound = self._bound, {}
        self._leaving.clear()
        self._forget_pending()
        for link, _ in bound.values():
            link.unanswered.carrier = None
            link.part_ended(reason)

    def _forget_pending(self) -> None:
        self._binds.clear()
        self._unbinds.clear()
        self._wakeup.clear()

    async def _write(self, stream: Stream) -> None:
        try:
            while True:
                await self._wakeup.wait()
                if frame := self._next_frame():
                    self.frames_sent += 1
                    await stream.write(frame)
        except TidemarkError:
            pass  # the stream has ended: its status is what reading it raises
        except Exception:
            # Nothing would be sent any more: the links claim again over a new stream.
            _log.exception("a frame could not be sent")
            stream.cancel()

    def _next_frame(self) -> exchange_pb2.ExchangeRequest | None:
        """The waiting operations of all partitions, as far as they fit a frame."""
        if self._leaving:
            link, _ = next(iter(self._leaving.values()))
            link.before_frame_sent(self._leaving)
        frame = exchange_pb2.ExchangeRequest()
        has_binds = bool(self._unbinds or self._binds)
        if has_binds:
            for partition, broker_epoch in self._unbinds.items():
                frame.unbinds.add(partition=partition, broker_epoch=broker_epoch)
            for partition, broker_epoch in self._binds.items():
                frame.binds.add(partition=partition, broker_epoch=broker_epoch)
            self._forget_pending()
        self._wakeup.clear()
        leaving, self._leaving = self._leaving, {}  # links that have more come back first
        share_bytes = _OPERATIONS_BYTES_MAX // max(1, len(leaving))
        frame_bytes = 0
        columns = OperationColumns()
        for partition, (link, epoch) in leaving.items():
            # A frame without operations takes any one of them, whatever its size.
            room_bytes = _OPERATIONS_BYTES_MAX - frame_bytes if frame_bytes else sys.maxsize
            moved, moved_bytes = link.unanswered.move(share_bytes, room_bytes)
            if not moved:
                continue
            frame_bytes += moved_bytes
            if not columns.add(partition, epoch, moved):
                part = frame.parts.add(partition=partition, broker_epoch=epoch)
                part.operations.extend(map(as_operation, moved))
        return frame if columns.write_to(frame) or has_binds or frame.parts else None
