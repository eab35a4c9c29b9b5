"""Topics: a name plus settings.

Pure. Owns the defaults and ranges of the settings (S7); storing and encoding topics is done
elsewhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

from tidemark import limits
from tidemark.errors import InvalidArgument
from tidemark.names import is_lite, partition_of, validate_fairness_key, validate_topic


class Subscription(StrEnum):
    """Who may consume a queue of the topic."""

    SHARED = "shared"
    EXCLUSIVE = "exclusive"


class MaxWaitAction(StrEnum):
    """The action on messages that exceed the max wait of the topic."""

    DELETE = "delete"
    DEAD_LETTER = "dead_letter"


class RetryPlace(StrEnum):
    """Where a message goes after a failed delivery."""

    DEFAULT = "default"
    """First in exclusive topics, behind in shared ones."""
    FIRST = "first"
    """Before ready messages, which wait for it: keeps the order."""
    BEHIND = "behind"
    """Behind ready messages."""


class ConsumptionRecords(StrEnum):
    """Whether each settled range leaves a consumption record."""

    DEFAULT = "default"
    """On, unless the engine of storage keeps its rows in the memory of a server."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """The settings of a topic. A limit of 0 is off."""

    subscription: Subscription = Subscription.SHARED
    partitions: int = 1
    visibility_timeout_ms: int = 30_000
    max_attempts: int = 0
    dead_letter_topic: str = ""
    retention_enabled: bool = False
    retention_seconds: int = 0
    completed_retention_seconds: int = 0
    max_wait_time_seconds: int = 0
    max_wait_action: MaxWaitAction = MaxWaitAction.DELETE
    idle_after_ms: int = 600_000
    queue_messages_max: int = 0
    queue_bytes_max: int = 0
    fairness_weights: Mapping[str, int] = field(default_factory=dict)
    default_ttl_ms: int = 0
    consumption_records: ConsumptionRecords = ConsumptionRecords.DEFAULT
    retry_delay_ms: int = 0
    retry_delay_ms_max: int = 0
    retry_multiplier: float = 1.0
    retry_jitter: float = 0.0
    retry_place: RetryPlace = RetryPlace.DEFAULT
    group_expiry_seconds: int = 0

    @property
    def exclusive(self) -> bool:
        return self.subscription is Subscription.EXCLUSIVE

    @property
    def retries_first(self) -> bool:
        """Whether a message goes before ready messages after a failed delivery (V9)."""
        if self.retry_place is RetryPlace.DEFAULT:
            return self.exclusive
        return self.retry_place is RetryPlace.FIRST

    def filled_in(self) -> "TopicSettings":
        """With the defaults that depend on other settings."""
        place = RetryPlace.FIRST if self.retries_first else RetryPlace.BEHIND
        return replace(self, retry_place=place)


@dataclass(frozen=True, slots=True)
class Topic:
    """A stored topic. The version grows with every change."""

    name: str
    settings: TopicSettings = field(default_factory=TopicSettings)
    version: int = 0
    create_time_ms: int = 0
    update_time_ms: int = 0
    paused: bool = False
    """Whether consumers get no messages of its queues (L10). Not a setting: creating the topic
    again with equal settings succeeds, and leaves it paused."""


SETTING_RANGES: Mapping[str, tuple[int, int]] = {
    "partitions": (1, limits.PARTITIONS_MAX),
    "visibility_timeout_ms": (limits.VISIBILITY_TIMEOUT_MS_MIN, limits.VISIBILITY_TIMEOUT_MS_MAX),
    "max_attempts": (0, limits.MAX_ATTEMPTS_MAX),
    "retention_seconds": (0, limits.RETENTION_SECONDS_MAX),
    "completed_retention_seconds": (0, limits.RETENTION_SECONDS_MAX),
    "max_wait_time_seconds": (0, limits.RETENTION_SECONDS_MAX),
    "idle_after_ms": (limits.IDLE_AFTER_MS_MIN, limits.IDLE_AFTER_MS_MAX),
    "queue_messages_max": (0, 2**64 - 1),
    "queue_bytes_max": (0, 2**64 - 1),
    "default_ttl_ms": (0, limits.TTL_MS_MAX),
    "retry_delay_ms": (0, limits.NACK_DELAY_MS_MAX),
    "retry_delay_ms_max": (0, limits.NACK_DELAY_MS_MAX),
    "group_expiry_seconds": (0, limits.RETENTION_SECONDS_MAX),
}
"""Every setting that is a whole number, with its range."""

FRACTION_RANGES: Mapping[str, tuple[float, float]] = {
    "retry_multiplier": (1.0, limits.RETRY_MULTIPLIER_MAX),
    "retry_jitter": (0.0, 1.0),
}
"""Every setting that may be a fraction, with its range."""


def validate(topic: Topic, cluster_partitions: int) -> None:
    """Raise InvalidName or InvalidArgument, with the field, for invalid settings."""
    validate_topic(topic.name)
    settings = topic.settings
    _check("partitions", settings.partitions, 1, cluster_partitions)
    for name, (low, high) in SETTING_RANGES.items():
        _check(name, getattr(settings, name), low, high)
    for name, bounds in FRACTION_RANGES.items():
        _check(name, getattr(settings, name), *bounds)
    if 0 < settings.retry_delay_ms_max < settings.retry_delay_ms:
        _refuse("retry_delay_ms_max", "retry_delay_ms_max is 0 or at least retry_delay_ms")
    if 0 < settings.group_expiry_seconds < limits.GROUP_EXPIRY_SECONDS_MIN:
        least_s = limits.GROUP_EXPIRY_SECONDS_MIN
        _refuse("group_expiry_seconds", f"group_expiry_seconds is 0 or at least {least_s}")
    if settings.dead_letter_topic:
        validate_topic(settings.dead_letter_topic)
        if settings.dead_letter_topic == topic.name:
            _refuse("dead_letter_topic", "a topic cannot be its own dead-letter topic")
    if settings.max_wait_action is MaxWaitAction.DEAD_LETTER and not settings.dead_letter_topic:
        _refuse("max_wait_action", "there is no dead_letter_topic to move messages to")
    if settings.exclusive and settings.partitions != 1:
        _refuse("partitions", "an exclusive queue has one owner and lives in one partition")
    if len(settings.fairness_weights) > limits.FAIRNESS_WEIGHTS_MAX:
        _refuse("fairness_weights", f"at most {limits.FAIRNESS_WEIGHTS_MAX} weights")
    for key, weight in settings.fairness_weights.items():
        validate_fairness_key(key)
        _check("fairness_weights", weight, limits.FAIRNESS_WEIGHT_MIN, limits.FAIRNESS_WEIGHT_MAX)


def default_dead_letter_topic(topic: str) -> str:
    """The usual name of the dead-letter topic of a topic."""
    return f"{topic}.dead"


SETTING_NAMES = tuple(each.name for each in fields(TopicSettings))
"""All settings, in declaration order."""


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        _refuse(name, f"{name} must be {low} to {high}, not {value}")


def _refuse(name: str, why: str) -> None:
    raise InvalidArgument(why, field=name)


def partitions_of(lmq_name: str, topic: Topic, cluster_partitions: int) -> tuple[int, ...]:
    """The partitions that a queue lives in: a lite queue in one, a plain queue of a topic with
    several partitions in as many, beginning with its own."""
    first = partition_of(lmq_name, cluster_partitions)
    if is_lite(lmq_name):
        return (first,)
    spanned = min(topic.settings.partitions, cluster_partitions)
    return tuple((first + step) % cluster_partitions for step in range(spanned))
