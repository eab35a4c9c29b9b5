"""Settings of the broker: where it is found, and what it bounds for clients."""

from dataclasses import dataclass

from tidemark.settings.declaration import setting
from tidemark.settings.service import ServiceSettings, address_of_storage
from tidemark.settings.variables import LISTEN, Address, Identifier, Integer


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings(ServiceSettings):
    """The broker, `python -m broker_svc`."""

    broker_id: str = setting(
        "TIDEMARK_BROKER_ID",
        Identifier(),
        default="broker-0",
        doc="Name of this broker, different for every broker of a cluster.",
    )
    listen: str = setting(
        "TIDEMARK_BROKER_LISTEN",
        LISTEN,
        default="127.0.0.1:7400",
        doc="Where the broker listens; port 0 takes a free one.",
    )
    advertise: str = setting(
        "TIDEMARK_BROKER_ADVERTISE",
        Address(),
        default="",
        doc="Where other services and brokers reach this broker; empty is where it listens.",
    )
    storage_address: str = address_of_storage()
    client_timeout_ms: int = setting(
        "TIDEMARK_CLIENT_TIMEOUT_MS",
        Integer(1_000, 3_600_000, unit="ms"),
        default=30_000,
        doc="Silence after which a client counts as gone and what it holds goes back.",
    )
    subscriptions_per_group_max: int = setting(
        "TIDEMARK_SUBSCRIPTIONS_PER_GROUP_MAX",
        Integer(1, 100_000_000),
        default=1_000_000,
        doc="Subscriptions of one group, over all clients of this broker.",
    )
    subscriptions_per_broker_max: int = setting(
        "TIDEMARK_SUBSCRIPTIONS_PER_BROKER_MAX",
        Integer(1, 100_000_000),
        default=1_000_000,
        doc="Subscriptions of all clients of this broker.",
    )
    publishers_per_connection_max: int = setting(
        "TIDEMARK_PUBLISHERS_PER_CONNECTION_MAX",
        Integer(1, 10_000_000),
        default=10_000,
        doc="Publishers that a connection keeps; the least recently used leave first.",
    )
    publisher_cache_idle_timeout_ms: int = setting(
        "TIDEMARK_PUBLISHER_CACHE_IDLE_TIMEOUT_MS",
        Integer(0, 86_400_000, unit="ms"),
        default=0,
        doc="Idle time after which a publisher of a connection is dropped; 0 is off.",
    )
    unary_publisher_idle_timeout_ms: int = setting(
        "TIDEMARK_UNARY_PUBLISHER_IDLE_TIMEOUT_MS",
        Integer(100, 86_400_000, unit="ms"),
        default=300_000,
        doc="Idle time after which a publisher of unary calls is dropped.",
    )
