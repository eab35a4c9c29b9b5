"""Wires the broker together: the only place that constructs its parts."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial

import grpc

from broker_svc import metrics
from broker_svc.api.broker_service import BrokerService
from broker_svc.api.delegation_service import DelegationService
from broker_svc.api.forwarding import ForwardingService
from broker_svc.api.holder_service import HolderService
from broker_svc.api.link_report import BROKER_SERVICE, report_links
from broker_svc.api.topic_service import TopicService
from broker_svc.api.unary_clients import UnaryClients
from broker_svc.components import BrokerComponents
from broker_svc.consume.deliveries import DeliveryDirectory
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.consume.given_notes import GivenNotes
from broker_svc.consume.renewals import Renewals
from broker_svc.consume.settlements import Settlements
from broker_svc.exclusive.evictions import Evictions
from broker_svc.exclusive.markers import EvictionMarkers
from broker_svc.exclusive.owner_checks import OwnerChecks
from broker_svc.exclusive.ownership import Ownerships
from broker_svc.exclusive.registry import Subscribers
from broker_svc.exclusive.subscriptions import Subscriptions
from broker_svc.idle.activity_leases import ActivityLeases
from broker_svc.idle.cleanup import Cleanup
from broker_svc.idle.tracking import Tracking
from broker_svc.links.assignments import Assignments
from broker_svc.links.expiry_timer import ExpiryTimer
from broker_svc.links.holders import Holders
from broker_svc.links.link_events import LinkEvents
from broker_svc.links.partition_count import ask_partitions
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.storage_members import KIND as STORAGE_MEMBERS
from broker_svc.links.storage_members import StorageMembers
from broker_svc.links.storage_nodes import StorageNode, StorageNodes
from broker_svc.links.topic_cache import TopicCache
from broker_svc.publish.publish_path import PublishPath
from broker_svc.publish.publishers import PublisherRegistry
from broker_svc.publish.run_arrays import RunArrays
from tidemark.api.broker.v1.broker_pb2_grpc import (
    BrokerServiceServicer,
    add_BrokerServiceServicer_to_server,
)
from tidemark.api.broker.v1.topic_pb2_grpc import add_TopicServiceServicer_to_server
from tidemark.api.storage.v1.action_pb2_grpc import add_DelegationServiceServicer_to_server
from tidemark.api.storage.v1.holder_pb2_grpc import add_HolderServiceServicer_to_server
from tidemark.api.storage.v1.retention_pb2_grpc import RetentionServiceStub
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.registry.membership import Membership
from tidemark.registry.observation import Observation
from tidemark.registry.protocol import Member, Registry, Timers
from tidemark.registry.static import StaticRegistry
from tidemark.rpc.channel import open_channel
from tidemark.rpc.channel_pool import ChannelPool
from tidemark.rpc.server import RpcServer
from tidemark.service.background import BackgroundTasks
from tidemark.settings import BrokerSettings
from tidemark.system_metrics.sampler import Sampler, recorder

EXPIRE_EVERY_MS = 1_000
LINK_DRAIN_TIMEOUT_MS = 5_000
"""How long a stopping broker waits for storage to receive messages that its sessions gave back."""

_log = logging.getLogger(__name__)
DEFAULT_TIMERS = Timers()
_MEMBERS = "brokers"
"""The kind of members in the registry."""
_SERVICES = (
    BROKER_SERVICE,
    "tidemark.api.broker.v1.TopicService",
    "tidemark.api.storage.v1.DelegationService",
    "tidemark.api.storage.v1.HolderService",
)


@asynccontextmanager
async def broker(
    settings: BrokerSettings, clock: Clock, timers: Timers = DEFAULT_TIMERS
) -> AsyncIterator[RpcServer]:
    """A broker that listens, and serves once it has claimed its partitions.

    `timers` are those of its membership in a registry.
    """
    server = RpcServer(settings.listen, clock=clock)
    if settings.partitions:
        async with _running(server, settings, clock, timers):
            yield server
        return
    server.set_serving(BROKER_SERVICE, False)
    leaving = asyncio.Event()
    await server.start(later=_SERVICES)
    running = asyncio.create_task(_run_once_counted(server, settings, clock, timers, leaving))
    try:
        yield server
    finally:
        leaving.set()
        await running


async def _run_once_counted(
    server: RpcServer,
    settings: BrokerSettings,
    clock: Clock,
    timers: Timers,
    leaving: asyncio.Event,
) -> None:
    """Ask storage for the number of partitions, then run the broker; until `leaving` is set."""
    asking = asyncio.create_task(
        ask_partitions(settings.storage_addresses, settings.cluster_id, clock)
    )
    left = asyncio.create_task(leaving.wait())
    try:
        await asyncio.wait([asking, left], return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            counted = replace(settings, partitions=asking.result())
            async with _running(server, counted, clock, timers):
                await left
    finally:
        for task in (asking, left):
            task.cancel()
        await asyncio.gather(asking, left, return_exceptions=True)
        await server.stop(0)


@asynccontextmanager
async def _running(
    server: RpcServer, settings: BrokerSettings, clock: Clock, membership_timers: Timers
) -> AsyncIterator[None]:
    """The parts of a broker, with links to a number of partitions that is known."""
    async with AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(open_channel(address))
            for address in settings.storage_addresses
        ]
        observation: Observation | None = None
        if settings.registry_url:
            storages = await stack.enter_async_context(
                _redis(settings, STORAGE_MEMBERS, membership_timers)
            )
            observation = Observation(storages, clock, timers=membership_timers)
            await observation.run_once()
        nodes = [
            StorageNode(
                address,
                StorageServiceStub(channel),
                (lambda: None) if observation is None else partial(observation.suspect, address),
            )
            for address, channel in zip(settings.storage_addresses, channels, strict=True)
        ]
        components, timers = build_components(settings, nodes, clock)
        components.storage_nodes.members = observation
        stack.push_async_callback(components.holders.close)
        clients = UnaryClients(
            components.directory, components.settlements, components.subscriptions
        )
        # Ids issued before a restart of this broker must not be valid after it.
        service = BrokerService(components, clients, first_session_id=random.getrandbits(48) << 12)
        api: BrokerServiceServicer = service
        if settings.brokers or settings.registry_url:
            api = ForwardingService(service, components, components.holders)
        server.add(add_BrokerServiceServicer_to_server, api)
        server.add(add_HolderServiceServicer_to_server, HolderService(components))
        server.add(add_TopicServiceServicer_to_server, TopicService(components))
        server.add(add_DelegationServiceServicer_to_server, DelegationService(components.links))
        server.set_serving(BROKER_SERVICE, False)
        metrics.offer(components, service)
        links = list(components.links.values())
        tasks, link_tasks = BackgroundTasks(server), BackgroundTasks(server)
        draining: asyncio.Task[None] | None = None
        try:
            if not server.is_listening:
                await server.start()
            listed = dict(settings.brokers).get(settings.broker_id)
            address = listed or settings.advertise or server.address
            for link in links:
                link.address = address
            registry: Registry = static_registry(settings, address)
            if settings.registry_url:
                registry = await stack.enter_async_context(
                    _redis(settings, _MEMBERS, membership_timers)
                )
            membership = Membership(
                registry,
                Member(settings.broker_id, address, components.assignments.incarnation),
                settings.partitions,
                clock,
                timers=membership_timers,
            )
            _log.info("broker listens", extra={"address": server.address})
            running = [
                *(timer.run() for timer in timers),
                components.cleanup.run(),
                components.given_notes.run(),
                _expire(service, clock),
                _take_part(
                    server,
                    components.assignments,
                    membership,
                    static=not settings.registry_url,
                ),
                report_links(server, service, components),
                _sampler(settings, components, service, channels[0]).run(clock),
            ]
            if observation is not None:
                members = StorageMembers(
                    observation,
                    components.storage_nodes,
                    partial(_look_again, links),
                )
                await members.follow()
                link_tasks.start(members.run())
            for work in running:
                tasks.start(work)
            draining = asyncio.create_task(_drain(server, service, components.assignments))
            for node in nodes:
                link_tasks.start(node.link.run())
            for link in links:
                link_tasks.start(link.run())
            yield
        finally:
            # Before calls are cancelled: the broker leaves, no client has failed.
            if draining is not None:
                server.stopping.set()
                await draining
            await server.stop(0)
            await tasks.cancel()
            # The links end last: messages that the sessions gave back must reach storage (V6, S5).
            await asyncio.gather(*(link.finish(LINK_DRAIN_TIMEOUT_MS) for link in links))
            await link_tasks.cancel()
        if components.assignments.replaced is not None:
            raise components.assignments.replaced
        link_tasks.raise_failure()
        tasks.raise_failure()


def static_registry(settings: BrokerSettings, address: str) -> StaticRegistry:
    """The brokers of the settings, or this one alone."""
    listed = settings.brokers or ((settings.broker_id, address),)
    return StaticRegistry([Member(*each, incarnation=0) for each in listed], settings.partitions)


@asynccontextmanager
async def _redis(settings: BrokerSettings, kind: str, timers: Timers) -> AsyncIterator[Registry]:
    from tidemark.registry.redis_registry import RedisRegistry

    registry = RedisRegistry(settings.registry_url, settings.cluster_id, kind, timers)
    try:
        yield registry
    finally:
        await registry.close()


def _look_again(links: Sequence[PartitionLink]) -> None:
    for link in links:
        link.look_again()


async def _take_part(
    server: RpcServer, assignments: Assignments, membership: Membership, *, static: bool
) -> None:
    """Follow the registry; stops the broker if another process has taken its id."""
    await assignments.run(membership, static=static)
    if assignments.replaced is not None:
        await server.stop(0)


def build_components(
    settings: BrokerSettings, nodes: Sequence[StorageNode], clock: Clock
) -> tuple[BrokerComponents, Sequence[ExpiryTimer]]:
    """The parts of a broker, connected to each other and to nothing else yet."""
    incarnation = random.getrandbits(63)
    links_changed = asyncio.Event()
    storage_nodes = StorageNodes(
        nodes, settings, clock, lambda partition: links[partition].witnessed_commit
    )
    links = {
        number: PartitionLink(
            number,
            settings,
            incarnation,
            storage_nodes,
            clock,
            links_changed.set,
            lambda link, version: assignments.outdated(link, version),
            lambda address: holders.probe(address),
        )
        for number in range(settings.partitions)
    }
    holders = Holders(
        links,
        ChannelPool(),
        settings.broker_id,
        clock,
        lambda member_id: assignments.suspect(member_id),
    )
    assignments = Assignments(links, holders, storage_nodes, clock, incarnation)
    tracking = Tracking()
    topics = TopicCache(storage_nodes, links, holders, clock)
    leases = ActivityLeases(links, topics, tracking, clock)
    directory = DeliveryDirectory()
    # A refused reserve may mean that an owner has lost its queue.
    dispatcher = Dispatcher(links, lambda key, epoch: owner_checks.check_owner(key, epoch))
    markers, subscribers = EvictionMarkers(), Subscribers(settings, dispatcher)
    evictions = Evictions(markers, subscribers, dispatcher)
    ownerships = Ownerships(links, dispatcher, directory, evictions.evict)
    owner_checks = OwnerChecks(ownerships, evictions)
    subscriptions = Subscriptions(
        settings, links, topics, leases, dispatcher, ownerships, subscribers, markers, evictions
    )
    publish_path = PublishPath(links, topics, leases, dispatcher, clock)
    components = BrokerComponents(
        settings=settings,
        clock=clock,
        storage_nodes=storage_nodes,
        links=links,
        holders=holders,
        assignments=assignments,
        links_changed=links_changed,
        topics=topics,
        tracking=tracking,
        leases=leases,
        cleanup=Cleanup(links, tracking, clock),
        publishers=PublisherRegistry(first_id=random.getrandbits(48) << 12),
        publish_path=publish_path,
        run_arrays=RunArrays(publish_path, links, topics, dispatcher),
        directory=directory,
        settlements=Settlements(links, directory, dispatcher, clock),
        renewals=Renewals(links, directory, clock),
        given_notes=GivenNotes(links, clock),
        dispatcher=dispatcher,
        subscriptions=subscriptions,
    )
    timers = {number: ExpiryTimer(link, clock) for number, link in links.items()}
    listener = LinkEvents(
        leases,
        dispatcher,
        owner_checks,
        tracking,
        directory,
        components.settlements,
        topics,
        timers,
        links,
        subscriptions,
        components.publishers,
    )
    for link in links.values():
        link.listen(listener)
    return components, list(timers.values())


async def _expire(service: BrokerService, clock: Clock) -> None:
    """Expire silent clients and unused publishers."""
    while True:
        await clock.sleep_ms(EXPIRE_EVERY_MS)
        service.expire(clock.monotonic_ms())


def _sampler(
    settings: BrokerSettings,
    components: BrokerComponents,
    service: BrokerService,
    channel: grpc.aio.Channel,
) -> Sampler:
    """The key figures of the broker, for `system_metrics` (R12)."""

    def figures() -> dict[str, float]:
        return {
            "sessions": service.sessions,
            "subscriptions": len(components.subscriptions),
            "publishers": len(components.publishers),
            "deliveries": len(components.directory),
            "queues.tracked": len(components.tracking),
        }

    return Sampler(figures, recorder(RetentionServiceStub(channel), settings.broker_id))


async def _drain(server: RpcServer, service: BrokerService, assignments: Assignments) -> None:
    """Clients are notified once other brokers hold the partitions, so that they can go there."""
    await server.stopping.wait()
    await assignments.hand_over()
    service.drain()
