"""Metrics of the broker, read from the figures that its components keep.

Names them and reads them; counts nothing itself. A reading never iterates over queues or clients.
"""

from collections.abc import Callable, Iterator

from broker_svc.api.broker_service import BrokerService
from broker_svc.components import BrokerComponents
from tidemark.telemetry import observe
from tidemark.telemetry.metrics import Reading


def offer(components: BrokerComponents, service: BrokerService) -> None:
    """Register the metrics of a broker, for the life of the process."""
    observe(
        "counter",
        "tidemark.broker.published_messages",
        "Messages that were stored for publishers",
        components.publish_path.published.read,
    )
    observe(
        "counter",
        "tidemark.broker.delivered_messages",
        "Messages that were handed to consumers",
        components.dispatcher.delivered.read,
    )
    observe(
        "counter",
        "tidemark.broker.settled_messages",
        "Messages that consumers settled, by action",
        components.settlements.settled.read,
    )
    _gauge("tidemark.broker.sessions", "Open sessions", lambda: service.sessions)
    _gauge("tidemark.broker.publishers", "Publishers", lambda: len(components.publishers))
    _gauge("tidemark.broker.subscriptions", "Subscriptions", lambda: len(components.subscriptions))
    _gauge(
        "tidemark.broker.deliveries", "Reservations held here", lambda: len(components.directory)
    )
    _gauge(
        "tidemark.broker.standing_reserves",
        "Consumers that wait for a queue in storage",
        lambda: len(components.dispatcher.standing),
    )
    _gauge(
        "tidemark.broker.activity_leases",
        "Publisher and subscriber leases",
        lambda: components.leases.active,
    )
    _gauge(
        "tidemark.broker.tracked_queues", "Queues in use lately", lambda: len(components.tracking)
    )
    _gauge(
        "tidemark.broker.idle_queues",
        "Tracked queues without a lease, waiting to be unloaded",
        lambda: max(0, len(components.tracking) - components.leases.busy_queues),
    )
    _gauge(
        "tidemark.broker.eviction_markers",
        "Eviction markers of exclusive queues",
        lambda: components.subscriptions.eviction_markers,
    )
    links = components.links.values()

    def frames() -> Iterator[Reading]:
        exchanges = [node.link for node in components.storage_nodes.nodes]
        yield sum(each.frames_sent for each in exchanges), {"direction": "sent"}
        yield sum(each.frames_received for each in exchanges), {"direction": "received"}

    observe(
        "counter",
        "tidemark.broker.storage_frames",
        "Frames of the exchanges with storage, by direction",
        frames,
    )
    _gauge(
        "tidemark.broker.partitions_connected",
        "Partitions that this broker holds and reaches",
        lambda: sum(link.connected.is_set() for link in links),
    )
    holders, assignments = components.holders, components.assignments
    _gauge(
        "tidemark.broker.members",
        "Brokers of the cluster, in the view of this one",
        lambda: len(holders.view.members),
    )
    _gauge(
        "tidemark.broker.assignment_version",
        "Version of the assignment that this broker follows",
        lambda: holders.view.assignment.version,
    )
    _gauge(
        "tidemark.broker.registry_unavailable",
        "1 while the registry does not answer this broker",
        lambda: int(assignments.membership is not None and bool(assignments.membership.problem)),
    )
    _gauge(
        "tidemark.broker.operations_waiting",
        "Operations that storage has not answered",
        lambda: sum(link.waiting for link in links),
    )


def _gauge(name: str, description: str, read: Callable[[], int]) -> None:
    def readings() -> Iterator[Reading]:
        yield read(), {}

    observe("gauge", name, description, readings)
