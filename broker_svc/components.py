"""The components that all connections of a broker share, passed around as one value."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from broker_svc.consume.deliveries import DeliveryDirectory
from broker_svc.consume.dispatcher import Dispatcher
from broker_svc.consume.given_notes import GivenNotes
from broker_svc.consume.renewals import Renewals
from broker_svc.consume.settlements import Settlements
from broker_svc.exclusive.subscriptions import Subscriptions
from broker_svc.idle.activity_leases import ActivityLeases
from broker_svc.idle.cleanup import Cleanup
from broker_svc.idle.tracking import Tracking
from broker_svc.links.assignments import Assignments
from broker_svc.links.holders import Holders
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.storage_nodes import StorageNodes
from broker_svc.links.topic_cache import TopicCache
from broker_svc.publish.publish_path import PublishPath
from broker_svc.publish.publishers import PublisherRegistry
from broker_svc.publish.run_arrays import RunArrays
from tidemark.clock import Clock
from tidemark.settings import BrokerSettings


@dataclass(frozen=True, slots=True)
class BrokerComponents:
    """The parts of one broker."""

    settings: BrokerSettings
    clock: Clock
    storage_nodes: StorageNodes
    links: Mapping[int, PartitionLink]
    holders: Holders
    assignments: Assignments
    links_changed: asyncio.Event
    """Set whenever the state of a link has changed."""
    topics: TopicCache
    tracking: Tracking
    leases: ActivityLeases
    cleanup: Cleanup
    publishers: PublisherRegistry
    publish_path: PublishPath
    run_arrays: RunArrays
    directory: DeliveryDirectory
    settlements: Settlements
    renewals: Renewals
    given_notes: GivenNotes
    dispatcher: Dispatcher
    subscriptions: Subscriptions
