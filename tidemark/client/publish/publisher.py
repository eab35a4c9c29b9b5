"""A publisher: the handle through which messages go to one queue.

Checks arguments, chooses the partition of a plain queue that spans several, and leaves batching,
sending and repeating to the publish buffer. It cannot be copied (I7).
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NoReturn, Self

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.client.arguments import (
    Duration,
    check_delay_ms,
    check_fairness_key,
    check_int,
    check_iterable,
    check_message,
    check_ms,
)
from tidemark.client.publish.batching import RunOptions
from tidemark.client.publish.messages import Message, PublishReceipt, batch_of
from tidemark.client.publish.publish_buffer import PublishBuffer
from tidemark.client.spans import publish_span
from tidemark.client.transport.notifier import Notifier
from tidemark.errors import BatchTooLarge, ClientClosed, InvalidArgument
from tidemark.telemetry.traces import published_traceparent

_PLAIN: Final = RunOptions()
_NONE: Final = 0
"""No delay, and no sequence."""


class BrokerPublishers:
    """The broker-side publishers of one queue, shared by all handles of a client for it."""

    __slots__ = ("handles", "ids")

    def __init__(self) -> None:
        self.handles = 0
        self.ids: dict[int, int] = {}
        """Ids of the broker's publishers, by the partition that was last published to."""


class Publisher:
    """Publishes to one queue. Made by `await client.publisher(lmq_name)`.

    >>> publisher = await client.publisher("sessions/alice")
    >>> receipt = await publisher.publish(b"hello", headers={"kind": "greeting"})
    >>> await publisher.publish_many([b"one", b"two", tidemark.Message(b"three")])

    Any number of calls may run concurrently: they are batched, and stored in the order of the calls
    for each fairness key. A call returns once its messages are on disk.

    While it is open, the broker keeps the queue loaded. Close it, or use it in `async with`, in
    programs that publish to ever more queues; all are closed with their client.
    """

    __slots__ = (
        "_closed",
        "_destroy",
        "_numbered",
        "_partitions",
        "_publish_buffer",
        "_quiet",
        "_shared",
        "_turn",
        "_under_way",
        "lmq_name",
    )

    def __init__(
        self,
        lmq_name: str,
        partitions: Sequence[int],
        publish_buffer: PublishBuffer,
        shared: BrokerPublishers,
        destroy: Callable[[str], Awaitable[None]],
        *,
        numbered: bool,
    ) -> None:
        """`partitions` are those that runs may go to; runs with a sequence go to the first.

        `destroy` is called with the name of the queue when its last handle is closed.
        """
        self.lmq_name = lmq_name
        self._partitions = partitions
        self._publish_buffer = publish_buffer
        self._shared = shared
        self._destroy = destroy
        self._numbered = numbered
        self._turn = 0
        self._under_way = 0
        self._closed = False
        self._quiet = Notifier()
        shared.handles += 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Refuse new calls, wait for pending ones, and let the broker unload the queue (I8).

        The broker's publisher is destroyed with the last handle of this client for the queue.
        """
        self._publish_buffer.home_loop.check()
        if self._closed:
            return
        self._closed = True
        try:
            await self._quiet.wait_for(lambda: not self._under_way)
        finally:
            self._shared.handles -= 1
        if not self._shared.handles:
            await self._destroy(self.lmq_name)

    async def publish(
        self,
        payload: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        fairness_key: str = "",
        delay_ms: Duration = _NONE,
        ttl_ms: Duration | None = None,
        sequence: int = _NONE,
    ) -> PublishReceipt:
        """Store one message; returns once it is on disk.

        The message is delivered after `delay_ms` at the earliest, and not after `ttl_ms`.
        `sequence` is for clients that set a `producer_id`. Raises DeadlineExceeded after
        `publish_timeout_ms`; its text states whether the message was not sent or the outcome is
        unknown.
        """
        check_message(payload, headers)
        if headers is not None:
            headers = dict(headers)  # the caller may change them before they are sent
        options = self._options(fairness_key, delay_ms, ttl_ms, sequence)
        if not self._publish_buffer.traced:
            return await self._store(fairness_key, options, payload, headers)
        with publish_span(self.lmq_name, 1):
            options = options._replace(traceparent=published_traceparent())
            return await self._store(fairness_key, options, payload, headers)

    async def publish_many(
        self,
        messages: Iterable[bytes | Message],
        *,
        fairness_key: str = "",
        delay_ms: Duration = _NONE,
        ttl_ms: Duration | None = None,
        sequence: int = _NONE,
    ) -> list[PublishReceipt]:
        """Store messages in their order, a run at a time; a receipt for each run.

        More than fits one run is stored in several: after an error, those before it may have been
        stored. With a `sequence` it must fit one run.
        """
        options = self._options(fairness_key, delay_ms, ttl_ms, sequence)
        receipts: list[PublishReceipt] = []
        self._under_way += 1  # one for all runs together
        try:
            for batch in _batches(messages):
                if sequence and receipts:
                    raise BatchTooLarge("messages with a sequence must fit one run")
                with publish_span(self.lmq_name, len(batch.messages)):
                    options = options._replace(traceparent=published_traceparent())
                    receipts.append(await self._store(fairness_key, options, batch=batch))
        finally:
            self._ended_one()
        return receipts

    async def _store(
        self,
        fairness_key: str,
        options: RunOptions,
        payload: bytes = b"",
        headers: Mapping[str, str] | None = None,
        batch: MessageBatch | None = None,
    ) -> PublishReceipt:
        partition = self._partition(options.sequence)
        buffer = self._publish_buffer
        buffer.home_loop.check()
        self._under_way += 1
        try:
            if buffer.is_full:
                await buffer.until_room()
            call = buffer.begin(
                self.lmq_name, partition, fairness_key, options, payload, headers, batch
            )
            try:
                receipt = await call.answer
            finally:
                buffer.end(call)
        finally:
            self._ended_one()
        self._shared.ids[partition] = receipt.publisher_id
        return receipt

    def _ended_one(self) -> None:
        self._under_way -= 1
        if self._closed:
            self._quiet.notify_all()

    def _options(
        self, fairness_key: str, delay_ms: Duration, ttl_ms: Duration | None, sequence: int
    ) -> RunOptions:
        if self._closed:
            raise ClientClosed("the publisher is closed")
        if fairness_key != "":
            check_fairness_key(fairness_key)
        if sequence is _NONE and delay_ms is _NONE and ttl_ms is None and not self._numbered:
            return _PLAIN  # the defaults need no checks
        sequence = check_int("sequence", sequence, 0)
        if bool(sequence) != self._numbered:
            raise InvalidArgument(
                "a client with a producer_id gives every publish a sequence; others give none",
                field="sequence",
            )
        delay_ms = check_delay_ms(delay_ms, limits.DELAY_MS_MAX)
        if not delay_ms and ttl_ms is None and not sequence:
            return _PLAIN
        ttl_ms = 0 if ttl_ms is None else check_ms("ttl_ms", ttl_ms, 1, limits.TTL_MS_MAX)
        return RunOptions(delay_ms, ttl_ms, sequence=sequence, alone=bool(sequence))

    def _partition(self, sequence: int) -> int:
        """The next serving partition, round robin; runs with a sequence always go to the same."""
        partitions = self._partitions
        if len(partitions) == 1 or sequence:
            return partitions[0]
        for _ in partitions:
            self._turn = (self._turn + 1) % len(partitions)
            if self._publish_buffer.serves(partitions[self._turn]):
                break
        return partitions[self._turn]

    def __copy__(self) -> NoReturn:
        raise TypeError("a publisher cannot be copied: ask the client for a second one")

    def __deepcopy__(self, memo: object) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        self.__copy__()


def _batches(messages: Iterable[bytes | Message]) -> Iterable[MessageBatch]:
    """Messages split into batches, each within the limits of one run."""
    rest = check_iterable("messages", messages)
    while chunk := list(islice(rest, limits.RUN_MESSAGES_MAX)):
        batch = batch_of(chunk)
        if batch.ByteSize() <= limits.RUN_BYTES_MAX:
            yield batch
        else:
            yield from _smaller(batch)


def _smaller(batch: MessageBatch) -> Iterable[MessageBatch]:
    part = MessageBatch()
    part_bytes = 0
    for message in batch.messages:
        size = message.ByteSize() + 8
        if part_bytes + size > limits.RUN_BYTES_MAX:
            yield part
            part, part_bytes = MessageBatch(), 0
        part.messages.append(message)
        part_bytes += size
    yield part
