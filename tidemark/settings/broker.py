"""Settings of the broker: its addresses, and its limits for clients."""

from dataclasses import dataclass

from tidemark.settings.declaration import setting
from tidemark.settings.service import (
    ServiceSettings,
    addresses_of_storage,
    is_wildcard,
    url_of_registry,
)
from tidemark.settings.variables import (
    LISTEN,
    Address,
    Choice,
    Identifier,
    Integer,
    Members,
    SettingsError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings(ServiceSettings):
    """The broker, `python -m broker_svc`."""

    broker_id: str = setting(
        "TIDEMARK_BROKER_ID",
        Identifier(),
        default="broker-0",
        doc="Id of this broker, unique in the cluster.",
    )
    listen: str = setting(
        "TIDEMARK_BROKER_LISTEN",
        LISTEN,
        default="127.0.0.1:7400",
        doc="Address that the broker listens on; port 0 picks a free port.",
    )
    advertise: str = setting(
        "TIDEMARK_BROKER_ADVERTISE",
        Address(),
        default="",
        doc="Address at which services and brokers reach this broker; empty: the listen address.",
    )
    brokers: tuple[tuple[str, str], ...] = setting(
        "TIDEMARK_BROKERS",
        Members(),
        default=(),
        doc="All brokers of the cluster with the addresses at which clients and brokers reach "
        "them, the same for all brokers: `broker-0=host:port,broker-1=host:port`. Each holds a "
        "share of the partitions. Empty: this broker alone.",
    )
    registry_url: str = url_of_registry()
    storage_addresses: tuple[str, ...] = addresses_of_storage()
    client_timeout_ms: int = setting(
        "TIDEMARK_CLIENT_TIMEOUT_MS",
        Integer(1_000, 3_600_000, unit="ms"),
        default=30_000,
        doc="A client silent for this long counts as gone, and its reservations are released.",
    )
    subscriptions_per_group_max: int = setting(
        "TIDEMARK_SUBSCRIPTIONS_PER_GROUP_MAX",
        Integer(1, 100_000_000),
        default=1_000_000,
        doc="Maximum subscriptions of one group, over all clients of this broker.",
    )
    subscriptions_per_broker_max: int = setting(
        "TIDEMARK_SUBSCRIPTIONS_PER_BROKER_MAX",
        Integer(1, 100_000_000),
        default=1_000_000,
        doc="Maximum subscriptions of all clients of this broker.",
    )
    publishers_per_connection_max: int = setting(
        "TIDEMARK_PUBLISHERS_PER_CONNECTION_MAX",
        Integer(1, 10_000_000),
        default=10_000,
        doc="Maximum publishers of one connection; the least recently used is dropped first.",
    )
    publisher_cache_idle_timeout_ms: int = setting(
        "TIDEMARK_PUBLISHER_CACHE_IDLE_TIMEOUT_MS",
        Integer(0, 86_400_000, unit="ms"),
        default=0,
        doc="Idle time after which a publisher of a connection is dropped; 0: never.",
    )
    missing_dead_letter_topic: str = setting(
        "TIDEMARK_MISSING_DEAD_LETTER_TOPIC",
        Choice(("create", "refuse")),
        default="create",
        doc="What happens if a topic is given a dead-letter topic that does not exist.",
    )
    unary_publisher_idle_timeout_ms: int = setting(
        "TIDEMARK_UNARY_PUBLISHER_IDLE_TIMEOUT_MS",
        Integer(100, 86_400_000, unit="ms"),
        default=300_000,
        doc="Idle time after which a publisher of unary calls is dropped.",
    )

    def __post_init__(self) -> None:
        if self.registry_url and self.brokers:
            raise SettingsError(
                "TIDEMARK_REGISTRY_URL: cannot be combined with TIDEMARK_BROKERS; brokers find "
                "each other in the registry"
            )
        if self.registry_url and not self.advertise and is_wildcard(self.listen):
            raise SettingsError(
                "TIDEMARK_BROKER_ADVERTISE: must be set beside TIDEMARK_REGISTRY_URL if "
                f"TIDEMARK_BROKER_LISTEN is {self.listen}: other brokers and clients cannot reach "
                "that address"
            )
        if self.brokers and self.broker_id not in dict(self.brokers):
            ids = ", ".join(dict(self.brokers))
            raise SettingsError(
                f"TIDEMARK_BROKERS: must contain this broker, {self.broker_id} "
                f"(TIDEMARK_BROKER_ID), and has {ids}"
            )
