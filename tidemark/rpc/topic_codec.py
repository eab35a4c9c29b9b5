"""The codec of topics: `tidemark.topics` to and from protos.

A zero or unspecified proto field means the default of its setting. Encoded topics have all defaults
filled in.
"""

from __future__ import annotations

from tidemark.api.broker.v1 import topic_pb2
from tidemark.errors import InvalidArgument
from tidemark.field_checks import unix_ms
from tidemark.topics import (
    ConsumptionRecords,
    MaxWaitAction,
    RetryPlace,
    Subscription,
    Topic,
    TopicSettings,
)

_SUBSCRIPTIONS = {
    Subscription.SHARED: topic_pb2.SUBSCRIPTION_KIND_SHARED,
    Subscription.EXCLUSIVE: topic_pb2.SUBSCRIPTION_KIND_EXCLUSIVE,
}
_MAX_WAIT_ACTIONS = {
    MaxWaitAction.DELETE: topic_pb2.MAX_WAIT_ACTION_DELETE,
    MaxWaitAction.DEAD_LETTER: topic_pb2.MAX_WAIT_ACTION_DEAD_LETTER,
}
_RETRY_PLACES = {
    RetryPlace.DEFAULT: topic_pb2.RETRY_PLACE_UNSPECIFIED,
    RetryPlace.FIRST: topic_pb2.RETRY_PLACE_FIRST,
    RetryPlace.BEHIND: topic_pb2.RETRY_PLACE_BEHIND,
}
_CONSUMPTION_RECORDS = {
    ConsumptionRecords.DEFAULT: topic_pb2.CONSUMPTION_RECORDS_UNSPECIFIED,
    ConsumptionRecords.ON: topic_pb2.CONSUMPTION_RECORDS_ON,
    ConsumptionRecords.OFF: topic_pb2.CONSUMPTION_RECORDS_OFF,
}
_DEFAULTS = TopicSettings()
_SUBSCRIPTION_OF = {0: _DEFAULTS.subscription} | {
    int(value): key for key, value in _SUBSCRIPTIONS.items()
}
_MAX_WAIT_ACTION_OF = {0: _DEFAULTS.max_wait_action} | {
    int(value): key for key, value in _MAX_WAIT_ACTIONS.items()
}
_RETRY_PLACE_OF = {int(value): key for key, value in _RETRY_PLACES.items()}
_CONSUMPTION_RECORDS_OF = {int(value): key for key, value in _CONSUMPTION_RECORDS.items()}


def topic_to_proto(topic: Topic) -> topic_pb2.Topic:
    proto = topic_pb2.Topic(
        name=topic.name,
        settings=settings_to_proto(topic.settings),
        version=topic.version,
        paused=topic.paused,
    )
    proto.create_time.FromMilliseconds(topic.create_time_ms)
    proto.update_time.FromMilliseconds(topic.update_time_ms)
    return proto


def topic_from_proto(proto: topic_pb2.Topic) -> Topic:
    return Topic(
        proto.name,
        settings_from_proto(proto.settings),
        proto.version,
        unix_ms("create_time", proto.create_time),
        unix_ms("update_time", proto.update_time),
        proto.paused,
    )


def settings_to_proto(settings: TopicSettings) -> topic_pb2.TopicSettings:
    return topic_pb2.TopicSettings(
        subscription=_SUBSCRIPTIONS[settings.subscription],
        partitions=settings.partitions,
        visibility_timeout_ms=settings.visibility_timeout_ms,
        max_attempts=settings.max_attempts,
        dead_letter_topic=settings.dead_letter_topic,
        retention_enabled=settings.retention_enabled,
        retention_seconds=settings.retention_seconds,
        completed_retention_seconds=settings.completed_retention_seconds,
        max_wait_time_seconds=settings.max_wait_time_seconds,
        max_wait_action=_MAX_WAIT_ACTIONS[settings.max_wait_action],
        idle_after_ms=settings.idle_after_ms,
        queue_messages_max=settings.queue_messages_max,
        queue_bytes_max=settings.queue_bytes_max,
        fairness_weights=dict(settings.fairness_weights),
        default_ttl_ms=settings.default_ttl_ms,
        consumption_records=_CONSUMPTION_RECORDS[settings.consumption_records],
        retry_delay_ms=settings.retry_delay_ms,
        retry_delay_ms_max=settings.retry_delay_ms_max,
        retry_multiplier=settings.retry_multiplier,
        retry_jitter=settings.retry_jitter,
        retry_place=_RETRY_PLACES[settings.retry_place],
        group_expiry_seconds=settings.group_expiry_seconds,
    )


def settings_from_proto(proto: topic_pb2.TopicSettings) -> TopicSettings:
    """Raises InvalidArgument for an enum value that this version does not know."""
    if proto.subscription not in _SUBSCRIPTION_OF:
        raise InvalidArgument("unknown kind of subscription", field="subscription")
    if proto.max_wait_action not in _MAX_WAIT_ACTION_OF:
        raise InvalidArgument("unknown action", field="max_wait_action")
    if proto.retry_place not in _RETRY_PLACE_OF:
        raise InvalidArgument("unknown place", field="retry_place")
    if proto.consumption_records not in _CONSUMPTION_RECORDS_OF:
        raise InvalidArgument("unknown choice", field="consumption_records")
    return TopicSettings(
        subscription=_SUBSCRIPTION_OF[proto.subscription],
        partitions=proto.partitions or _DEFAULTS.partitions,
        visibility_timeout_ms=proto.visibility_timeout_ms or _DEFAULTS.visibility_timeout_ms,
        max_attempts=proto.max_attempts,
        dead_letter_topic=proto.dead_letter_topic,
        retention_enabled=proto.retention_enabled,
        retention_seconds=proto.retention_seconds,
        completed_retention_seconds=proto.completed_retention_seconds,
        max_wait_time_seconds=proto.max_wait_time_seconds,
        max_wait_action=_MAX_WAIT_ACTION_OF[proto.max_wait_action],
        idle_after_ms=proto.idle_after_ms or _DEFAULTS.idle_after_ms,
        queue_messages_max=proto.queue_messages_max,
        queue_bytes_max=proto.queue_bytes_max,
        fairness_weights=dict(proto.fairness_weights),
        default_ttl_ms=proto.default_ttl_ms,
        consumption_records=_CONSUMPTION_RECORDS_OF[proto.consumption_records],
        retry_delay_ms=proto.retry_delay_ms,
        retry_delay_ms_max=proto.retry_delay_ms_max,
        retry_multiplier=proto.retry_multiplier or _DEFAULTS.retry_multiplier,
        retry_jitter=proto.retry_jitter,
        retry_place=_RETRY_PLACE_OF[proto.retry_place],
        group_expiry_seconds=proto.group_expiry_seconds,
    )
