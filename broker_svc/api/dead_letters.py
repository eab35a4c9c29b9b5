"""Dead letters of a queue, and entries of outboxes: list, redrive, delete, drop.

Storage applies filters and decides about messages. Each call to it covers a bounded part, so that
other operations run in between. A page token names the partition and the place there, so that the
broker keeps no state between two calls.
"""

from collections.abc import Sequence

from broker_svc.api import queue_totals
from broker_svc.api.queue_partitions import QueuePartitions
from broker_svc.links.storage_nodes import StorageNodes
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2
from tidemark.errors import InvalidArgument, QueueNotFound
from tidemark.names import LmqName


class DeadLetters:
    """The calls of the topic API on dead letters and outboxes."""

    def __init__(
        self,
        partitions: QueuePartitions,
        nodes: StorageNodes,
        cluster_partitions: int,
    ) -> None:
        self._partitions = partitions
        self._nodes = nodes
        self._all = range(cluster_partitions)

    # --- dead letters --------------------------------------------------------------------------

    async def redrive(
        self, request: topic_pb2.RedriveDeadLettersRequest
    ) -> topic_pb2.RedriveDeadLettersResponse:
        """Redrive in each partition until the limit, if there is one, is reached."""
        total = topic_pb2.RedriveDeadLettersResponse()
        redrive = exchange_pb2.Redrive(
            lmq_name=request.lmq_name, filter=request.filter, dry_run=request.dry_run
        )
        for partition in await self._partitions.of(request.lmq_name):
            redrive.page_token = b""
            while not request.limit or total.messages < request.limit:
                redrive.limit = request.limit - total.messages if request.limit else 0
                removed = await self._take(partition, exchange_pb2.Operation(redrive=redrive))
                total.messages += removed.messages
                total.orphans += removed.skipped
                redrive.page_token = removed.next_page_token
                if not removed.next_page_token:
                    break
        return total

    async def delete(
        self, request: topic_pb2.DeleteDeadLettersRequest
    ) -> topic_pb2.DeleteDeadLettersResponse:
        """Delete in a bounded part of one partition."""
        partitions = sorted(await self._partitions.of(request.lmq_name))
        partition, token = _place(request.page_token, partitions)
        remove = exchange_pb2.RemoveDeadLetters(
            lmq_name=request.lmq_name,
            filter=request.filter,
            limit=request.limit,
            dry_run=request.dry_run,
            page_token=_from_hex(token),
        )
        operation = exchange_pb2.Operation(remove_dead_letters=remove)
        removed = await self._take(partition, operation)
        response = topic_pb2.DeleteDeadLettersResponse(messages=removed.messages)
        if not request.limit or removed.messages < request.limit:
            token = removed.next_page_token.hex()
            response.next_page_token = _next_place(partition, token, partitions)
        return response

    async def list_page(
        self, request: topic_pb2.ListDeadLettersRequest
    ) -> topic_pb2.ListDeadLettersResponse:
        """A page of one partition; empty if it lacks the queue, which has no dead letters yet."""
        partitions = sorted(await self._partitions.of(request.lmq_name))
        partition, token = _place(request.page_token, partitions)
        try:
            storage = await self._nodes.storage(partition)
            page = await storage.ListDeadLetters(
                storage_pb2.ListDeadLettersRequest(
                    partition=partition,
                    lmq_name=request.lmq_name,
                    filter=request.filter,
                    page_size=queue_totals.page_size(request.page_size),
                    page_token=token,
                )
            )
        except QueueNotFound:
            page = storage_pb2.ListDeadLettersResponse()
        return topic_pb2.ListDeadLettersResponse(
            dead_letters=page.dead_letters,
            next_page_token=_next_place(partition, page.next_page_token, partitions),
        )

    async def _take(
        self, partition: int, operation: exchange_pb2.Operation
    ) -> exchange_pb2.RemovedResult:
        try:
            return (await self._partitions.call(partition, operation)).removed
        except QueueNotFound:  # this partition has no dead letters yet
            return exchange_pb2.RemovedResult()

    # --- outboxes ------------------------------------------------------------------------------

    async def list_outbox(
        self, request: topic_pb2.ListOutboxRequest
    ) -> topic_pb2.ListOutboxResponse:
        """A page over the outboxes of all partitions: most of them are empty."""
        partition, token = queue_totals.read_token(request.page_token, len(self._all))
        limit = queue_totals.page_size(request.page_size)
        response = topic_pb2.ListOutboxResponse()
        while True:
            storage = await self._nodes.storage(partition)
            page = await storage.ListOutbox(
                storage_pb2.ListOutboxRequest(
                    partition=partition,
                    destination_lmq_name=request.destination_lmq_name,
                    page_size=limit - len(response.entries),
                    page_token=token,
                )
            )
            response.entries.extend(page.entries)
            response.next_page_token = _next_place(partition, page.next_page_token, self._all)
            if not response.next_page_token or len(response.entries) >= limit:
                return response
            partition, token = queue_totals.read_token(response.next_page_token, len(self._all))

    async def drop_outbox(
        self, request: topic_pb2.DropOutboxRequest
    ) -> topic_pb2.DropOutboxResponse:
        """Drop a bounded part of one partition's outbox."""
        LmqName.parse(request.destination_lmq_name)
        partitions: Sequence[int] = self._all
        if request.HasField("partition"):
            if request.partition not in self._all:
                raise InvalidArgument("there is no such partition", field="partition")
            partitions = [request.partition]
        elif request.sequence:
            raise InvalidArgument("a sequence requires its partition", field="partition")
        partition, _ = _place(request.page_token, partitions)
        drop = exchange_pb2.DropOutbox(
            destination_lmq_name=request.destination_lmq_name, sequence=request.sequence
        )
        operation = exchange_pb2.Operation(drop_outbox=drop)
        removed = (await self._partitions.call(partition, operation)).removed
        # Dropped entries are gone: the next call begins at the first one that is left.
        token = "more" if removed.next_page_token else ""
        return topic_pb2.DropOutboxResponse(
            messages=removed.messages, next_page_token=_next_place(partition, token, partitions)
        )


def _place(page_token: str, partitions: Sequence[int]) -> tuple[int, str]:
    """The partition at which a call continues, and storage's token for it."""
    if not page_token:
        return partitions[0], ""
    partition, token = queue_totals.read_token(page_token, partitions[-1] + 1)
    if partition not in partitions:
        raise InvalidArgument("not a page token of this call", field="page_token")
    return partition, token


def _next_place(partition: int, token: str, partitions: Sequence[int]) -> str:
    """The page token after a call in one partition; "" after the last one."""
    if token:
        return queue_totals.page_token(partition, token)
    later = [each for each in partitions if each > partition]
    return queue_totals.page_token(later[0], "") if later else ""


def _from_hex(token: str) -> bytes:
    try:
        return bytes.fromhex(token)
    except ValueError:
        raise InvalidArgument("not a page token of this call", field="page_token") from None
