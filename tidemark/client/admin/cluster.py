"""The administrative calls on partitions and on the members of the cluster."""

from tidemark import limits
from tidemark.api.broker.v1 import topic_pb2
from tidemark.client.admin.calls import Calls
from tidemark.client.admin.values import Assigned, Cluster, Fault, Loss, Member, Partition
from tidemark.client.arguments import check_bool, check_int, check_str
from tidemark.rpc.enums import word_of


class ClusterCalls(Calls):
    """Partitions, members, and which member holds which partition."""

    async def list_partitions(self) -> list[Partition]:
        """Health, holder and figures of every partition. The cost does not depend on the queues."""
        request = topic_pb2.ListPartitionsRequest()
        answer = await self._repeat(lambda topics: topics.ListPartitions, request)
        return [_partition(each) for each in answer.partitions]

    async def list_members(self) -> list[Member]:
        """The brokers and storage nodes of the cluster, and the partitions that each holds."""
        return list((await self.describe_cluster()).members)

    async def describe_cluster(self) -> Cluster:
        """The members of the cluster, and the assignment that the called broker follows."""
        request = topic_pb2.DescribeClusterRequest()
        return _cluster(await self._repeat(lambda topics: topics.DescribeCluster, request))

    async def move_partition(
        self, partition: int, broker_id: str = "", *, storage_id: str = ""
    ) -> int:
        """Assign a partition to another broker, or to another storage node of a store that nodes
        share; returns the version of the assignment.

        That member takes it over within a moment, and keeps it while it is alive.
        """
        request = topic_pb2.MovePartitionRequest(
            partition=check_int("partition", partition, 0, limits.PARTITIONS_MAX - 1),
            broker_id=check_str("broker_id", broker_id),
            storage_id=check_str("storage_id", storage_id),
        )
        answer = await self._repeat(lambda topics: topics.MovePartition, request)
        return answer.assignment_version

    async def drain_member(self, member_id: str) -> int:
        """Assign all partitions of a broker, or of a storage node of a store that nodes share, to
        the others; returns the version of the assignment.

        It takes no partitions until it starts again.
        """
        request = topic_pb2.DrainMemberRequest(member_id=check_str("member_id", member_id))
        answer = await self._repeat(lambda topics: topics.DrainMember, request)
        return answer.assignment_version

    async def confirm_partition_time(self, partition: int, *, to_wall_clock: bool = False) -> int:
        """End the suspension of deletions after a jump of the clock; returns partition time.

        With `to_wall_clock`, partition time first returns to the wall clock, which was wrong and
        is corrected. Stored times stay as they are.
        """
        request = topic_pb2.ConfirmPartitionTimeRequest(
            partition=check_int("partition", partition, 0, limits.PARTITIONS_MAX - 1),
            to_wall_clock=check_bool("to_wall_clock", to_wall_clock),
        )
        answer = await self._repeat(lambda topics: topics.ConfirmPartitionTime, request)
        return answer.partition_time.ToMilliseconds()

    async def confirm_loss(self, partition: int) -> Loss:
        """Let a partition that has lost commits (DATA_LOST) serve the rest of its data."""
        request = topic_pb2.ConfirmLossRequest(
            partition=check_int("partition", partition, 0, limits.PARTITIONS_MAX - 1)
        )
        answer = await self._repeat(lambda topics: topics.ConfirmLoss, request)
        return Loss(answer.witnessed_commit, answer.found_commit)


def _cluster(proto: topic_pb2.DescribeClusterResponse) -> Cluster:
    assignment = proto.assignment
    return Cluster(
        cluster_id=proto.cluster_id,
        members=tuple(
            Member(
                kind=word_of(topic_pb2.MemberKind, each.kind, "MEMBER_KIND_"),
                id=each.id,
                address=each.address,
                partitions=tuple(each.partitions),
                error=each.error,
                draining=each.draining,
            )
            for each in proto.members
        ),
        assignment_version=assignment.version,
        assigned={
            each.partition: Assigned(each.broker_id, each.pinned) for each in assignment.partitions
        },
        static_members=assignment.static_members,
        registry_error=assignment.registry_error,
    )


def _partition(proto: topic_pb2.PartitionInfo) -> Partition:
    return Partition(
        partition=proto.partition,
        state=word_of(topic_pb2.PartitionState, proto.state, "PARTITION_STATE_"),
        faults=tuple(
            Fault(each.reason, each.detail, each.since_time.ToMilliseconds())
            for each in proto.faults
        ),
        broker_id=proto.broker_id,
        broker_address=proto.broker_address,
        broker_epoch=proto.broker_epoch,
        storage_address=proto.storage_address,
        storage_epoch=proto.storage_epoch,
        queues=proto.queues,
        materialized_queues=proto.materialized_queues,
        messages=proto.messages,
        bytes=proto.bytes,
        reservations=proto.reservations,
        commits=proto.commits,
        published=proto.published,
        delivered=proto.delivered,
        acked=proto.acked,
        link_state=word_of(topic_pb2.LinkState, proto.link_state, "LINK_STATE_"),
        link_detail=proto.link_detail,
        paused_queues=proto.paused_queues,
        paused_topics=proto.paused_topics,
    )
