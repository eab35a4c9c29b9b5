"""The storage API: translates between protos and the partitions that this process holds.

Nothing is stored or decided here; an exchange has a separate module.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from storage_svc.api.codec import encode_health
from storage_svc.api.dead_letter_codec import encode_dead_letters, encode_waiting
from storage_svc.api.description_codec import encode_group, encode_partition, encode_queue
from storage_svc.api.exchange import Exchange, OnLost, no_report
from storage_svc.engines.engine import FORMAT_VERSION
from storage_svc.operations.claim import ClaimPartition, ReleaseUnreported
from storage_svc.operations.dead_letter_filter import DeadLetterFilter
from storage_svc.operations.topics import DropTopic, PutTopic
from storage_svc.partition.counters import Claim
from storage_svc.partition.partition import Partition
from storage_svc.partition.partitions import Partitions
from storage_svc.placement.assigned import AssignedPartitions
from storage_svc.placement.placement import Placement
from storage_svc.reads import dead_letters, due_work, queues
from storage_svc.reads.due_work import ScanKind
from tidemark import limits, topics
from tidemark.api.storage.v1 import storage_pb2, storage_pb2_grpc
from tidemark.clock import Clock
from tidemark.errors import ClusterMismatch, InvalidArgument
from tidemark.names import LmqName
from tidemark.receipts import Receipt
from tidemark.rpc.topic_codec import topic_from_proto, topic_to_proto
from tidemark.rpc.witnesses import check_commit, witnessed_commit
from tidemark.settings import StorageSettings

Context = grpc.aio.ServicerContext[Any, Any]

_HOME = 0
"""The partition in which topics have their home."""

_HELD_MAX = 10_000_000
_HELD_PER_PAGE_MAX = 10_000
_SCAN_PREFIX = "SCAN_KIND_"


class StorageService(storage_pb2_grpc.StorageServiceServicer):
    """Claims, exchanges, topics, and reads beside the writer."""

    def __init__(
        self,
        settings: StorageSettings,
        partitions: Partitions,
        stopping: asyncio.Event,
        clock: Clock,
    ) -> None:
        self.placement: Placement | None = None
        """Of a node among others that keep their data in their directories."""
        self.assigned: AssignedPartitions | None = None
        """Of a node that shares the partitions of a store with others."""
        self.on_broker_lost: OnLost = no_report
        """Called for a broker whose exchange breaks."""
        self._cluster_id = settings.cluster_id
        self._engine = settings.engine
        self._partitions = partitions
        self._stopping = stopping
        self._clock = clock

    # --- partitions ----------------------------------------------------------------------------

    async def DescribeStorage(
        self, request: storage_pb2.DescribeStorageRequest, context: Context
    ) -> storage_pb2.DescribeStorageResponse:
        held = self._partitions.held
        shared = self.assigned
        members = () if shared is None else shared.view.members.values()
        return storage_pb2.DescribeStorageResponse(
            cluster_id=self._cluster_id,
            partitions=self._partitions.count,
            held=map(encode_partition, held.values()),
            format_version=FORMAT_VERSION,
            engine=self._engine,
            node_id=self._node_id(),
            node_addresses=sorted(each.address for each in members),
        )

    def _node_id(self) -> str:
        placed = self.placement or self.assigned
        return "" if placed is None else placed.node_id

    async def PlacePartitions(
        self, request: storage_pb2.PlacePartitionsRequest, context: Context
    ) -> storage_pb2.PlacePartitionsResponse:
        if self.placement is None:
            raise ClusterMismatch(
                "this node is set up as the only one of its cluster: "
                "TIDEMARK_STORAGE_ADDRESSES names all nodes",
                cluster=self._cluster_id,
            )
        return await self.placement.answer(request)

    async def ClaimPartition(
        self, request: storage_pb2.ClaimPartitionRequest, context: Context
    ) -> storage_pb2.ClaimPartitionResponse:
        if request.cluster_id != self._cluster_id:
            raise ClusterMismatch(f"this is cluster {self._cluster_id}", cluster=self._cluster_id)
        if request.partitions not in (0, self._partitions.count):
            raise ClusterMismatch(
                f"this cluster has {self._partitions.count} partitions, not {request.partitions}",
                cluster=self._cluster_id,
                partitions=str(self._partitions.count),
            )
        if not request.broker_id:
            raise InvalidArgument("a claim needs a broker_id", field="broker_id")
        check_commit(request.witnessed_commit)
        partition = self._partitions.get(request.partition)
        claim = Claim(
            request.broker_id,
            request.broker_address,
            request.incarnation,
            request.assignment_version,
        )
        claimed = await partition.call(
            ClaimPartition(
                claim,
                request.held_epoch,
                request.client_timeout_ms,
                request.witnessed_commit,
            )
        )
        return storage_pb2.ClaimPartitionResponse(
            broker_epoch=claimed.broker_epoch,
            health=encode_health(partition.health),
            report_required=claimed.same_incarnation or claimed.lost_commits,
            lost_commits=claimed.lost_commits,
            commit=partition.last_commit,
        )

    async def ReportHeldReservations(
        self,
        request_iterator: AsyncIterator[storage_pb2.ReportHeldReservationsRequest],
        context: Context,
    ) -> storage_pb2.ReportHeldReservationsResponse:
        first = await anext(request_iterator, None)
        if first is None:
            raise InvalidArgument("a report needs a partition", field="partition")
        partition = self._partitions.get(first.partition)
        held = _held(first)
        async for page in request_iterator:
            held |= _held(page)
            if len(held) > _HELD_MAX:
                raise InvalidArgument(f"at most {_HELD_MAX} reservations", field="receipts")
        reported = await partition.call(ReleaseUnreported(held), first.broker_epoch)
        return storage_pb2.ReportHeldReservationsResponse(
            released=reported.released, gone_reservation_ids=reported.gone
        )

    async def Exchange(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        exchange = Exchange(self._partitions, self._stopping, self.on_broker_lost)
        async with aclosing(exchange.frames(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    # --- sweeps --------------------------------------------------------------------------------

    async def ScanPartition(
        self, request: storage_pb2.ScanPartitionRequest, context: Context
    ) -> storage_pb2.ScanPartitionResponse:
        partition = self._partitions.get(request.partition)
        kind = _scan_kind(request.kind)
        limit = _page_size(request.page_size, limits.PAGE_SIZE_MAX)
        asked = request.destination_partition if request.HasField("destination_partition") else None
        async with partition.verified():
            page = await due_work.scan(partition, kind, request.page_token, limit, asked)
        response = storage_pb2.ScanPartitionResponse(
            next_page_token=page.next_token,
            partition_time_ms=page.now_ms,
            broker_address=partition.state.claim.address if partition.has_connected_broker else "",
            outbox_partitions=page.outbox_partitions,
        )
        for due in page.due:
            due.action.write_to(response.facts.add(due_ms=due.due_ms).action)
        if page.next_due_ms is not None:
            response.next_due_in_ms = max(0, page.next_due_ms - page.now_ms)
        return response

    async def LeaseSweep(
        self, request: storage_pb2.LeaseSweepRequest, context: Context
    ) -> storage_pb2.LeaseSweepResponse:
        partition = self._partitions.get(request.partition)
        if not request.sweeper_id or not request.address:
            raise InvalidArgument("a sweeper needs an id and an address", field="sweeper_id")
        if request.lease_ms > limits.SWEEP_LEASE_MS_MAX:
            raise InvalidArgument(f"at most {limits.SWEEP_LEASE_MS_MAX} ms", field="lease_ms")
        now_ms = self._clock.monotonic_ms()
        lease = partition.lifecycle.lease
        granted = lease.ask(request.sweeper_id, request.address, request.lease_ms, now_ms)
        holder = lease.holder(now_ms)
        return storage_pb2.LeaseSweepResponse(
            granted=granted,
            holder_address="" if holder is None else holder.address,
            expires_in_ms=0 if holder is None else holder.expires_ms - now_ms,
            awaits_report=partition.awaits_report,
        )

    async def ReportSweep(
        self, request: storage_pb2.ReportSweepRequest, context: Context
    ) -> storage_pb2.ReportSweepResponse:
        partition = self._partitions.get(request.partition)
        if not request.sweeper_id:
            raise InvalidArgument("a report names its sweeper", field="sweeper_id")
        counted = partition.sweep_ended(request.sweeper_id, request.succeeded, request.detail)
        return storage_pb2.ReportSweepResponse(
            health=encode_health(partition.health), counted=counted
        )

    async def ConfirmPartitionTime(
        self, request: storage_pb2.ConfirmPartitionTimeRequest, context: Context
    ) -> storage_pb2.ConfirmPartitionTimeResponse:
        partition = self._partitions.get(request.partition)
        await partition.confirm_time(to_wall_clock=request.to_wall_clock)
        return storage_pb2.ConfirmPartitionTimeResponse(partition_time_ms=partition.now_ms())

    async def ConfirmLoss(
        self, request: storage_pb2.ConfirmLossRequest, context: Context
    ) -> storage_pb2.ConfirmLossResponse:
        loss = await self._partitions.get(request.partition).confirm_loss()
        return storage_pb2.ConfirmLossResponse(
            witnessed_commit=loss.witnessed, found_commit=loss.found or 0
        )

    # --- topics --------------------------------------------------------------------------------

    async def PutTopic(
        self, request: storage_pb2.PutTopicRequest, context: Context
    ) -> storage_pb2.PutTopicResponse:
        home = await self._witnessed(_HOME, context)
        topic = topic_from_proto(request.topic)
        topics.validate(topic, home.identity.partitions)
        operation = PutTopic(topic, request.create, request.expected_version)
        stored = await home.call(operation)
        assert stored.topic is not None, "a topic that was put exists"
        return storage_pb2.PutTopicResponse(topic=topic_to_proto(stored.topic))

    async def DeleteTopic(
        self, request: storage_pb2.DeleteTopicRequest, context: Context
    ) -> storage_pb2.DeleteTopicResponse:
        home = await self._witnessed(_HOME, context)
        stored = await home.call(DropTopic(request.name))
        return storage_pb2.DeleteTopicResponse(version=stored.version)

    async def GetTopic(
        self, request: storage_pb2.GetTopicRequest, context: Context
    ) -> storage_pb2.GetTopicResponse:
        partition = await self._witnessed(request.partition, context)
        async with partition.verified():
            topic = partition.state.topics.get(request.name)
        return storage_pb2.GetTopicResponse(topic=topic_to_proto(topic))

    async def ListTopics(
        self, request: storage_pb2.ListTopicsRequest, context: Context
    ) -> storage_pb2.ListTopicsResponse:
        partition = await self._witnessed(request.partition, context)
        limit = _page_size(request.page_size)
        known = partition.state.topics
        names = [name for name in known.names() if name > request.page_token]
        response = storage_pb2.ListTopicsResponse(
            topics=[topic_to_proto(known.get(name)) for name in names[:limit]]
        )
        await partition.verify()
        if len(names) > limit:
            response.next_page_token = names[limit - 1]
        return response

    # --- queues --------------------------------------------------------------------------------

    async def ListQueues(
        self, request: storage_pb2.ListQueuesRequest, context: Context
    ) -> storage_pb2.ListQueuesResponse:
        partition = await self._witnessed(request.partition, context)
        token = _token(request.page_token)
        limit = _page_size(request.page_size)
        if request.lite_prefix and not request.topic:
            raise InvalidArgument("a lite_prefix needs a topic", field="lite_prefix")
        async with partition.verified():
            views, next_token = await queues.list_queues(
                partition, request.topic, request.lite_prefix, token, limit
            )
        return storage_pb2.ListQueuesResponse(
            queues=[encode_queue(partition, view) for view in views],
            next_page_token=next_token.hex(),
        )

    async def GetQueue(
        self, request: storage_pb2.GetQueueRequest, context: Context
    ) -> storage_pb2.GetQueueResponse:
        LmqName.parse(request.lmq_name)
        partition = await self._witnessed(request.partition, context)
        async with partition.verified():
            view, groups = await queues.get_queue(partition, request.lmq_name)
        return storage_pb2.GetQueueResponse(
            queue=encode_queue(partition, view),
            groups=[encode_group(partition, each) for each in groups],
        )

    async def PeekQueue(
        self, request: storage_pb2.PeekQueueRequest, context: Context
    ) -> storage_pb2.PeekQueueResponse:
        LmqName.parse(request.lmq_name)
        partition = await self._witnessed(request.partition, context)
        limit = _page_size(request.max_messages)
        async with partition.verified():
            peeked, next_offset = await queues.peek(
                partition, request.lmq_name, request.offset, limit, request.group
            )
        response = storage_pb2.PeekQueueResponse(next_offset=next_offset)
        for each in peeked:
            added = response.messages.add(
                offset=each.offset,
                message=each.message,
                fairness_key=each.run.fairness_key,
                partition=partition.number,
            )
            added.publish_time.FromMilliseconds(each.run.publish_time_ms)
        return response

    # --- dead letters --------------------------------------------------------------------------

    async def ListDeadLetters(
        self, request: storage_pb2.ListDeadLettersRequest, context: Context
    ) -> storage_pb2.ListDeadLettersResponse:
        LmqName.parse(request.lmq_name)
        partition = await self._witnessed(request.partition, context)
        async with partition.verified():
            found, next_token = await dead_letters.list_dead_letters(
                partition,
                request.lmq_name,
                DeadLetterFilter.from_proto(request.filter),
                _token(request.page_token),
                _page_size(request.page_size),
            )
        return storage_pb2.ListDeadLettersResponse(
            dead_letters=[encode_dead_letters(partition.number, each) for each in found],
            next_page_token=next_token.hex(),
        )

    async def ListOutbox(
        self, request: storage_pb2.ListOutboxRequest, context: Context
    ) -> storage_pb2.ListOutboxResponse:
        if request.destination_lmq_name:
            LmqName.parse(request.destination_lmq_name)
        partition = await self._witnessed(request.partition, context)
        async with partition.verified():
            found, next_token = await dead_letters.list_outbox(
                partition,
                request.destination_lmq_name,
                _token(request.page_token),
                _page_size(request.page_size),
            )
        return storage_pb2.ListOutboxResponse(
            entries=[encode_waiting(partition.number, each) for each in found],
            next_page_token=next_token.hex(),
        )

    # --- inside --------------------------------------------------------------------------------

    async def _witnessed(self, number: int, context: Context) -> Partition:
        """A partition that has what the caller has seen of it; raises PartitionFaulty if it has
        lost that."""
        partition = self._partitions.get(number)
        await partition.check_witness(witnessed_commit(context))
        return partition


def _scan_kind(kind: int) -> ScanKind:
    try:
        name = storage_pb2.ScanKind.Name(kind)  # type: ignore[arg-type]
        return ScanKind(name.removeprefix(_SCAN_PREFIX))
    except ValueError:
        raise InvalidArgument("not a kind of scan", field="kind") from None


def _held(page: storage_pb2.ReportHeldReservationsRequest) -> dict[int, int]:
    """The reservations of a page, each with its queue."""
    if len(page.receipts) > _HELD_PER_PAGE_MAX:
        raise InvalidArgument(f"at most {_HELD_PER_PAGE_MAX} receipts a page", field="receipts")
    receipts = map(Receipt.decode, page.receipts)
    return {each.reservation_id: each.queue_id for each in receipts}


def _token(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument("not a page token of this call", field="page_token") from None


def _page_size(asked: int, default: int = limits.PAGE_SIZE_DEFAULT) -> int:
    if asked > limits.PAGE_SIZE_MAX:
        raise InvalidArgument(f"at most {limits.PAGE_SIZE_MAX} a page", field="page_size")
    return asked or default
