"""The workshop: what all connections of a broker share, in one place to hand around."""

from collections.abc import Mapping
from dataclasses import dataclass

from broker_svc.cleanup import Cleanup
from broker_svc.deliveries import DeliveryDirectory
from broker_svc.feeds import Feeds
from broker_svc.leases import Leases
from broker_svc.partition_link import PartitionLink
from broker_svc.publishers import PublisherRegistry
from broker_svc.publishing import Publishing
from broker_svc.settling import Settling
from broker_svc.subscriptions import Subscriptions
from broker_svc.topic_cache import TopicCache
from broker_svc.tracking import Tracking
from tidemark.clock import Clock
from tidemark.settings import BrokerSettings


@dataclass(frozen=True, slots=True)
class Workshop:
    """The parts of one broker."""

    settings: BrokerSettings
    clock: Clock
    links: Mapping[int, PartitionLink]
    topics: TopicCache
    tracking: Tracking
    leases: Leases
    cleanup: Cleanup
    publishers: PublisherRegistry
    publishing: Publishing
    directory: DeliveryDirectory
    settling: Settling
    feeds: Feeds
    subscriptions: Subscriptions
