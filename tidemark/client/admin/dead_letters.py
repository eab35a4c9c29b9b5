"""The administrative calls on dead letters and outboxes (L6, L9).

One filter serves listing, counting, redriving and deleting. Listings and deletions of any length
are made of bounded calls.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable

from tidemark import limits
from tidemark.api.broker.v1 import topic_pb2
from tidemark.client.admin.calls import Calls
from tidemark.client.admin.pages import pages
from tidemark.client.admin.values import DeadLetterCount, DeadLetters, OutboxEntry, Redriven
from tidemark.client.arguments import (
    TIMESTAMP_MS_MAX,
    check_bool,
    check_callback,
    check_int,
    check_lmq_name,
    check_str,
)
from tidemark.limits import PAGE_SIZE_MAX

Progress = Callable[[int], None]
"""Called with the messages of each bounded call."""


class DeadLetterCalls(Calls):
    """Dead letters of a dead-letter topic, and entries that wait in outboxes.

    `reason`, `source_lmq_name`, `after_time_ms` and `before_time_ms` choose dead letters: every
    condition that is given must hold.
    """

    async def redrive(
        self,
        lmq_name: str,
        *,
        reason: str = "",
        source_lmq_name: str = "",
        after_time_ms: int | None = None,
        before_time_ms: int | None = None,
        limit: int = 0,
        dry_run: bool = False,
    ) -> Redriven:
        """Move dead letters back to the queues they came from."""
        request = topic_pb2.RedriveDeadLettersRequest(
            lmq_name=check_lmq_name(lmq_name),
            filter=_filter(reason, source_lmq_name, after_time_ms, before_time_ms),
            limit=check_int("limit", limit, 0),
            dry_run=check_bool("dry_run", dry_run),
        )
        answer = await self._once(lambda topics: topics.RedriveDeadLetters, request)
        return Redriven(answer.messages, answer.orphans)

    def list_dead_letters(
        self,
        lmq_name: str,
        *,
        reason: str = "",
        source_lmq_name: str = "",
        after_time_ms: int | None = None,
        before_time_ms: int | None = None,
        page_size: int = PAGE_SIZE_MAX,
    ) -> AsyncIterator[DeadLetters]:
        """Dead letters that can be redriven or deleted, page by page; no queue is loaded."""
        request = topic_pb2.ListDeadLettersRequest(
            lmq_name=check_lmq_name(lmq_name),
            filter=_filter(reason, source_lmq_name, after_time_ms, before_time_ms),
            page_size=check_int("page_size", page_size, 1, PAGE_SIZE_MAX),
        )
        return self._dead_letters(request)

    async def _dead_letters(
        self, request: topic_pb2.ListDeadLettersRequest
    ) -> AsyncIterator[DeadLetters]:
        async for page in pages(self._repeated(lambda topics: topics.ListDeadLetters), request):
            for each in page.dead_letters:
                yield _dead(each)

    async def count_dead_letters(
        self,
        lmq_name: str,
        *,
        reason: str = "",
        source_lmq_name: str = "",
        after_time_ms: int | None = None,
        before_time_ms: int | None = None,
    ) -> list[DeadLetterCount]:
        """Dead letters by reason and source, the most first. Reads all of them, page by page."""
        messages: Counter[tuple[str, str]] = Counter()
        oldest: dict[tuple[str, str], int] = {}
        async for each in self.list_dead_letters(
            lmq_name,
            reason=reason,
            source_lmq_name=source_lmq_name,
            after_time_ms=after_time_ms,
            before_time_ms=before_time_ms,
        ):
            key = (each.reason, each.source_lmq_name)
            messages[key] += each.messages
            if each.dead_time_ms is not None:
                oldest[key] = min(oldest.get(key, each.dead_time_ms), each.dead_time_ms)
        return [
            DeadLetterCount(*key, messages=count, oldest_dead_time_ms=oldest.get(key))
            for key, count in messages.most_common()
        ]

    async def delete_dead_letters(
        self,
        lmq_name: str,
        *,
        reason: str = "",
        source_lmq_name: str = "",
        after_time_ms: int | None = None,
        before_time_ms: int | None = None,
        limit: int = 0,
        dry_run: bool = False,
        on_progress: Progress | None = None,
    ) -> int:
        """Delete dead letters for good; returns how many. Works in bounded calls."""
        check_callback("on_progress", on_progress)
        request = topic_pb2.DeleteDeadLettersRequest(
            lmq_name=check_lmq_name(lmq_name),
            filter=_filter(reason, source_lmq_name, after_time_ms, before_time_ms),
            limit=check_int("limit", limit, 0),
            dry_run=check_bool("dry_run", dry_run),
        )
        deleted = 0

        async def delete(
            request: topic_pb2.DeleteDeadLettersRequest,
        ) -> topic_pb2.DeleteDeadLettersResponse:
            return await self._once(lambda topics: topics.DeleteDeadLetters, request)

        async for part in pages(delete, request):
            deleted += part.messages
            request.limit = limit - deleted if limit else 0
            if on_progress is not None:
                on_progress(part.messages)
        return deleted

    def list_outbox(
        self, destination_lmq_name: str = "", *, page_size: int = PAGE_SIZE_MAX
    ) -> AsyncIterator[OutboxEntry]:
        """The entries that wait in the outboxes of all partitions, page by page."""
        request = topic_pb2.ListOutboxRequest(
            destination_lmq_name=_name_or_none("destination_lmq_name", destination_lmq_name),
            page_size=check_int("page_size", page_size, 1, PAGE_SIZE_MAX),
        )
        return self._outbox(request)

    async def _outbox(self, request: topic_pb2.ListOutboxRequest) -> AsyncIterator[OutboxEntry]:
        async for page in pages(self._repeated(lambda topics: topics.ListOutbox), request):
            for each in page.entries:
                yield _entry(each)

    async def drop_outbox(
        self,
        destination_lmq_name: str,
        *,
        partition: int | None = None,
        sequence: int = 0,
        on_progress: Progress | None = None,
    ) -> int:
        """Drop entries for a destination, or one of a partition; returns how many messages.

        An entry that is on its way at that moment may still arrive.
        """
        check_callback("on_progress", on_progress)
        request = topic_pb2.DropOutboxRequest(
            destination_lmq_name=check_lmq_name(destination_lmq_name, "destination_lmq_name"),
            sequence=check_int("sequence", sequence, 0),
        )
        if partition is not None:
            request.partition = check_int("partition", partition, 0, limits.PARTITIONS_MAX - 1)
        dropped = 0

        async def drop(request: topic_pb2.DropOutboxRequest) -> topic_pb2.DropOutboxResponse:
            return await self._once(lambda topics: topics.DropOutbox, request)

        async for part in pages(drop, request):
            dropped += part.messages
            if on_progress is not None:
                on_progress(part.messages)
        return dropped


def _filter(
    reason: str, source_lmq_name: str, after_time_ms: int | None, before_time_ms: int | None
) -> topic_pb2.DeadLetterFilter:
    chosen = topic_pb2.DeadLetterFilter(
        reason=check_str("reason", reason),
        source_lmq_name=_name_or_none("source_lmq_name", source_lmq_name),
    )
    if after_time_ms is not None:
        after_time_ms = check_int("after_time_ms", after_time_ms, 0, TIMESTAMP_MS_MAX)
        chosen.after_time.FromMilliseconds(after_time_ms)
    if before_time_ms is not None:
        before_time_ms = check_int("before_time_ms", before_time_ms, 0, TIMESTAMP_MS_MAX)
        chosen.before_time.FromMilliseconds(before_time_ms)
    return chosen


def _name_or_none(field: str, lmq_name: str) -> str:
    return check_lmq_name(lmq_name, field) if lmq_name != "" else ""


def _dead(proto: topic_pb2.DeadLetters) -> DeadLetters:
    dead = proto.HasField("dead_time")
    return DeadLetters(
        partition=proto.partition,
        first_offset=proto.first_offset,
        messages=proto.messages,
        reason=proto.reason,
        source_lmq_name=proto.source_lmq_name,
        source_offset=proto.source_offset,
        group=proto.group,
        attempt_count=proto.attempt_count,
        dead_time_ms=proto.dead_time.ToMilliseconds() if dead else None,
        detail=proto.detail,
    )


def _entry(proto: topic_pb2.WaitingEntry) -> OutboxEntry:
    refused = proto.HasField("retry_time")
    return OutboxEntry(
        partition=proto.partition,
        destination_lmq_name=proto.destination_lmq_name,
        sequence=proto.sequence,
        messages=proto.messages,
        reason=proto.reason,
        create_time_ms=proto.create_time.ToMilliseconds(),
        retry_time_ms=proto.retry_time.ToMilliseconds() if refused else None,
    )
