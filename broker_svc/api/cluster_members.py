"""The members of the cluster in the view of this broker: which answer, and their partitions.

Storage decides who holds a partition, so that its claims are shown beside the assignment. An
operator moves partitions through the registry, which every broker can change.
"""

import asyncio
from typing import Final

from broker_svc.components import BrokerComponents
from broker_svc.links.link_state import LinkState
from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import (
    InvalidArgument,
    MembershipStatic,
    RegistryUnavailable,
    TidemarkError,
)
from tidemark.registry.membership import Membership
from tidemark.registry.observation import Observation

_ANSWER_MS_MAX: Final = 2_000
_UNREACHABLE: Final = topic_pb2.PARTITION_STATE_UNSPECIFIED
_LINK_STATES: Final = {
    LinkState.HELD: topic_pb2.LINK_STATE_UP,
    LinkState.LEAVING: topic_pb2.LINK_STATE_UP,
    LinkState.CLAIMING: topic_pb2.LINK_STATE_DOWN,
    LinkState.FAULTY: topic_pb2.LINK_STATE_FAULTY,
    LinkState.AWAY: topic_pb2.LINK_STATE_MOVED,
}


async def describe(components: BrokerComponents) -> topic_pb2.DescribeClusterResponse:
    """Ask every member once."""
    settings, holders = components.settings, components.holders
    members = {each.member_id: each.address for each in holders.view.members.values()}
    members.setdefault(settings.broker_id, components.links[0].address)
    storages: list[topic_pb2.ClusterMember] = []
    observed = components.storage_nodes.members
    draining = frozenset() if observed is None else observed.view.draining
    brokers = {
        broker_id: topic_pb2.ClusterMember(
            kind=topic_pb2.MEMBER_KIND_BROKER,
            id=broker_id,
            address=address,
            draining=broker_id in holders.view.draining,
        )
        for broker_id, address in members.items()
    }
    for node, described in (await components.storage_nodes.describe()).items():
        storage = topic_pb2.ClusterMember(kind=topic_pb2.MEMBER_KIND_STORAGE, address=node.address)
        storages.append(storage)
        if isinstance(described, TidemarkError):
            storage.error = str(described)
            continue
        storage.id = described.node_id
        storage.draining = described.node_id in draining
        for info in described.held:
            storage.partitions.append(info.partition)
            if info.broker_id in brokers:
                brokers[info.broker_id].partitions.append(info.partition)
    others = [each for each in brokers.values() if each.id != settings.broker_id]
    errors = await asyncio.gather(
        *(holders.why_not(each.address, _ANSWER_MS_MAX) for each in others)
    )
    for member, error in zip(others, errors, strict=True):
        member.error = error
    for member in (*brokers.values(), *storages):
        member.partitions.sort()
    return topic_pb2.DescribeClusterResponse(
        cluster_id=settings.cluster_id,
        partitions=settings.partitions,
        members=[*sorted(brokers.values(), key=lambda each: each.id), *storages],
        assignment=_assignment(components),
    )


async def list_partitions(components: BrokerComponents) -> list[topic_pb2.PartitionInfo]:
    """Every partition in order: as its storage node describes it, with the link of this broker."""
    infos: dict[int, topic_pb2.PartitionInfo] = {}
    for node, described in (await components.storage_nodes.describe()).items():
        if not isinstance(described, TidemarkError):
            for info in described.held:
                info.storage_address = node.address
                known = infos.get(info.partition)
                # On a shared store, one that is moving may be described twice.
                if known is None or info.storage_epoch > known.storage_epoch:
                    infos[info.partition] = info
    for number, link in components.links.items():
        info = infos.setdefault(
            number, topic_pb2.PartitionInfo(partition=number, state=_UNREACHABLE)
        )
        if not info.storage_address and link.node is not None:
            info.storage_address = link.node.address
        info.link_state = _LINK_STATES[link.state]
        info.link_detail = link.detail
    return [infos[number] for number in sorted(infos)]


async def move(components: BrokerComponents, request: topic_pb2.MovePartitionRequest) -> int:
    """Assign a partition to another member; returns the version of the assignment."""
    partition = request.partition
    if request.storage_id and request.broker_id:
        raise InvalidArgument("name a broker or a storage node", field="storage_id")
    if not request.storage_id:
        return (await _membership(components).move(partition, request.broker_id)).version
    if partition >= components.settings.partitions:
        raise InvalidArgument(f"there is no partition {partition}", field="partition")
    return (await _storages(components).move(partition, request.storage_id)).version


async def drain(components: BrokerComponents, member_id: str) -> int:
    """Assign all partitions of a member to others; returns the version of the assignment."""
    observed = components.storage_nodes.members
    if observed is not None and member_id in observed.view.members:
        await observed.drain(member_id)
        return observed.view.assignment.version
    membership = _membership(components)
    await membership.drain(member_id)
    return membership.view.assignment.version


def _storages(components: BrokerComponents) -> Observation:
    """The storage nodes that share a store; raises MembershipStatic if there are none."""
    observed = components.storage_nodes.members
    if observed is None or not observed.view.members:
        raise MembershipStatic("no registry assigns partitions to storage nodes")
    return observed


def _membership(components: BrokerComponents) -> Membership:
    membership = components.assignments.membership
    if membership is None:
        raise RegistryUnavailable("this broker is still starting")
    return membership


def _assignment(components: BrokerComponents) -> topic_pb2.ClusterAssignment:
    membership = components.assignments.membership
    assignment = components.holders.view.assignment
    return topic_pb2.ClusterAssignment(
        version=assignment.version,
        partitions=[
            topic_pb2.AssignedPartition(
                partition=number, broker_id=holder, pinned=number in assignment.pinned
            )
            for number, holder in sorted(assignment.holders.items())
        ],
        static_members=components.assignments.is_static,
        registry_error="" if membership is None else membership.problem,
    )
