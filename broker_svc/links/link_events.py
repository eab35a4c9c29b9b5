"""Passes the events of links to the components that they concern."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from broker_svc.consume.deliveries import DeliveryDirectory
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.consume.settlements import Settlements
from broker_svc.exclusive.owner_checks import OwnerChecks
from broker_svc.exclusive.subscriptions import Subscriptions
from broker_svc.idle.activity_leases import ActivityLeases
from broker_svc.idle.tracking import Tracking
from broker_svc.links.expiry_timer import ExpiryTimer
from broker_svc.links.frame_columns import HandOutRow
from broker_svc.links.link_state import LinkState
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.topic_cache import TopicCache
from broker_svc.publish.publishers import PublisherRegistry
from tidemark.api.storage.v1 import exchange_pb2


@dataclass(frozen=True, slots=True)
class LinkEvents:
    """Implements `LinkListener`."""

    leases: ActivityLeases
    dispatcher: Dispatcher
    owner_checks: OwnerChecks
    tracking: Tracking
    directory: DeliveryDirectory
    settlements: Settlements
    topics: TopicCache
    timers: Mapping[int, ExpiryTimer]
    links: Mapping[int, PartitionLink]
    subscriptions: Subscriptions
    publishers: PublisherRegistry

    def before_frame_sent(self, leaving: Collection[int]) -> None:
        self.dispatcher.before_frame_sent(leaving)

    def queue_ready(self, partition: int, lmq_name: str, group: str) -> None:
        self.dispatcher.queue_ready((partition, lmq_name, group))

    def handed_out(self, partition: int, reserved: exchange_pb2.ReserveResult) -> None:
        self.dispatcher.handed_out(partition, reserved)

    def handed_out_many(self, hand_outs: Iterable[HandOutRow]) -> None:
        self.dispatcher.handed_out_many(hand_outs)

    def frame_taken(self) -> None:
        self.dispatcher.deliver_handed_out()

    def next_deadline(self, partition: int, in_ms: int | None) -> None:
        self.timers[partition].next_deadline(in_ms)

    def expired(self, partition: int, reservation_ids: Iterable[int]) -> None:
        for reservation_id in reservation_ids:
            self.directory.ended((partition, reservation_id))

    def link_up(self, partition: int) -> None:
        self.topics.link_up(partition)
        self.leases.reload(partition)
        self.owner_checks.link_up(partition)
        self.settlements.link_up(partition)
        self.dispatcher.link_up(partition)

    def link_down(self, partition: int) -> None:
        self.tracking.link_lost(partition)
        self.dispatcher.link_down(partition)

    def partition_left(self, partition: int) -> None:
        """Another broker holds the partition: drop all that this one held of it.

        Reservations and their receipts stay good. Clients settle at the new holder.
        """
        self.timers[partition].next_deadline(None)
        self.directory.partition_left(partition, self.links[partition].refusal)
        self.settlements.partition_left(partition)
        self.subscriptions.partition_left(partition)
        self.dispatcher.partition_left(partition)
        self.publishers.partition_left(self._is_away)
        self.tracking.partition_left(partition)

    def commits_lost(self, partition: int) -> None:
        """Storage has gone back, and an operator has confirmed that: ownership may be undone."""
        self.owner_checks.commits_lost(partition)

    def _is_away(self, partition: int) -> bool:
        return self.links[partition].state is LinkState.AWAY

    def held_receipts(self, partition: int) -> Iterable[bytes]:
        return [*self.directory.receipts(partition), *self.settlements.returning(partition)]
