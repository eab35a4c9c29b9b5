"""Messages and receipts as users see them, and the checks that need no broker.

A message is checked before it is gathered with others into a run, so that nobody is refused for
what a neighbour sent.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.errors import HeadersTooLarge, InvalidArgument, MessageTooLarge


@dataclass(frozen=True, slots=True)
class Message:
    """A payload with headers, for `publish_many`.

    >>> Message(b"three", headers={"kind": "number"})
    Message(payload=b'three', headers={'kind': 'number'})
    """

    payload: bytes
    headers: Mapping[str, str] | None = None


class PublishReceipt(NamedTuple):
    """Proof that messages are on disk.

    `publish_many` returns one for each run of messages that were stored together.
    """

    lmq_name: str
    partition: int
    queue_id: int
    offset: int
    """Of the first message; the others follow without gaps. 0 while a delayed one waits."""
    messages: int = 1
    schedule_id: int = 0
    """Names a delayed run, for cancelling it. 0 for one that was not delayed."""
    duplicate: bool = False
    """Whether an earlier try had stored it already."""


def check_message(payload: bytes, headers: Mapping[str, str] | None) -> int:
    """The size of a message that can be stored; raises why it never can be."""
    if not isinstance(payload, bytes):
        raise InvalidArgument(f"a payload is bytes, not {type(payload).__name__}", field="payload")
    size = len(payload)
    if size > limits.MESSAGE_BYTES_MAX:
        raise MessageTooLarge(f"a payload has at most {limits.MESSAGE_BYTES_MAX} bytes, not {size}")
    if headers:
        if len(headers) > limits.HEADERS_COUNT_MAX:
            raise HeadersTooLarge(f"a message has at most {limits.HEADERS_COUNT_MAX} headers")
        try:
            headers_bytes = sum(len(k.encode()) + len(v.encode()) for k, v in headers.items())
        except (AttributeError, UnicodeEncodeError):
            raise InvalidArgument("headers are strings of legal Unicode", field="headers") from None
        if headers_bytes > limits.HEADERS_BYTES_MAX:
            raise HeadersTooLarge(f"headers have at most {limits.HEADERS_BYTES_MAX} bytes")
        size += headers_bytes
    return size


def batch_of(messages: Iterable[bytes | Message]) -> MessageBatch:
    """Checked messages as they travel."""
    batch = MessageBatch()
    add = batch.messages.add
    for each in messages:
        if isinstance(each, Message):
            check_message(each.payload, each.headers)
            message = add()
            message.payload = each.payload
            if each.headers:
                message.headers.update(each.headers)
        else:
            check_message(each, None)
            add().payload = each
    return batch


def check_delays(delay_ms: int, ttl_ms: int) -> None:
    """Raise for times that no run can have."""
    if not 0 <= delay_ms <= limits.DELAY_MS_MAX:
        raise InvalidArgument(f"0 to {limits.DELAY_MS_MAX} ms, not {delay_ms}", field="delay_ms")
    if not 0 <= ttl_ms <= limits.TTL_MS_MAX:
        raise InvalidArgument(f"0 to {limits.TTL_MS_MAX} ms, not {ttl_ms}", field="ttl_ms")
