"""A delivery that came in columns: one row of a `DeliveryArray`."""

from typing import NamedTuple

from tidemark.api.broker.v1 import message_pb2


class _Columns(NamedTuple):
    """The fields in which deliveries in columns differ."""

    group: str
    delivery_tag: int
    receipt: bytes
    lmq_name: str
    first_offset: int
    messages: int
    body: bytes
    visibility_ms: int
    publish_time_ms: int
    partition: int
    epoch: int


class PlainDelivery(_Columns):
    """A delivery that came in columns. The other fields of a `Delivery` are the same for all."""

    __slots__ = ()

    attempt_count = 0
    fairness_key = ""
    traceparent = ""
    last_attempt = False

    @property
    def batch(self) -> message_pb2.MessageBatch:
        return message_pb2.MessageBatch.FromString(self.body)
