"""Peek: pages of stored messages of a queue, from one partition after the other.

Reserves nothing and loads no queue. A page token names the partition and the offset at which the
next page begins, so that the broker keeps no state between two pages.
"""

from collections.abc import Awaitable, Callable, Sequence

from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import storage_pb2
from tidemark.errors import GroupNotFound, InvalidArgument, QueueNotFound
from tidemark.limits import PEEK_MESSAGES_MAX

_DEFAULT_MESSAGES = 10

Look = Callable[[storage_pb2.PeekQueueRequest], Awaitable[storage_pb2.PeekQueueResponse]]


class Peek:
    """One page."""

    def __init__(
        self,
        request: topic_pb2.PeekQueueRequest,
        partitions: Sequence[int],
        look: Look,
        has_group: Callable[[], Awaitable[bool]],
    ) -> None:
        """`look` reads from storage; `has_group` returns whether any partition has the group."""
        self._request = request
        self._partitions = sorted(partitions)
        self._look = look
        self._has_group = has_group
        self._limit = request.max_messages or _DEFAULT_MESSAGES
        if self._limit > PEEK_MESSAGES_MAX:
            raise InvalidArgument(f"at most {PEEK_MESSAGES_MAX} messages", field="max_messages")

    async def page(self) -> topic_pb2.PeekQueueResponse:
        """Raises QueueNotFound if no partition has the queue."""
        response = topic_pb2.PeekQueueResponse()
        at, offset = self._position()
        found = bool(self._request.page_token)
        missing: QueueNotFound | None = None
        while at < len(self._partitions):
            if len(response.messages) == self._limit:
                response.next_page_token = f"{self._partitions[at]}:{offset}"
                return response
            try:
                part = await self._peek(at, offset, self._limit - len(response.messages))
            except QueueNotFound as error:
                missing, part = error, storage_pb2.PeekQueueResponse()
            else:
                found = True
            response.messages.extend(part.messages)
            if part.HasField("next_offset"):  # the limit of one answer is reached
                response.next_page_token = f"{self._partitions[at]}:{part.next_offset}"
                return response
            at, offset = at + 1, self._request.offset
        if missing is not None and not found:
            raise missing
        return response

    def _position(self) -> tuple[int, int]:
        """Where the page begins: the index of its partition, and the offset there."""
        if not self._request.page_token:
            return 0, self._request.offset
        partition, _, offset = self._request.page_token.partition(":")
        try:
            return self._partitions.index(int(partition)), int(offset)
        except ValueError:
            raise InvalidArgument("not a page token of this call", field="page_token") from None

    async def _peek(self, at: int, offset: int, max_messages: int) -> storage_pb2.PeekQueueResponse:
        """Read from one partition. A group that exists only in another partition has settled
        nothing here; a group that exists in none is an error."""
        page = storage_pb2.PeekQueueRequest(
            partition=self._partitions[at],
            lmq_name=self._request.lmq_name,
            offset=offset,
            max_messages=max_messages,
            group=self._request.group,
        )
        try:
            return await self._look(page)
        except GroupNotFound:
            if not await self._has_group():
                raise
        page.group = ""
        return await self._look(page)
