"""Messages and receipts as users see them, and the encoding of messages.

A message is checked before it joins others in a run, so that no call fails because of another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.client.arguments import check_message

_FIELD_1: Final = b"\x0a"
"""The tag of field 1 with a length, as Protocol Buffers write it."""


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
    """Of the first message; the others follow without gaps. 0 for a delayed publish."""
    messages: int = 1
    schedule_id: int = 0
    """Identifies a delayed run, to cancel it. 0 for a run that was not delayed."""
    duplicate: bool = False
    """Whether an earlier try had already stored it."""
    publisher_id: int = 0
    """The broker's publisher of the queue; `Publisher.close` destroys it (I8)."""


def batch_of(messages: Sequence[bytes | Message]) -> MessageBatch:
    """Check messages, and encode them as one batch."""
    batch = MessageBatch()
    sizes = _payload_sizes(messages)
    if sizes is not None and max(sizes) <= limits.MESSAGE_BYTES_MAX:
        batch.MergeFromString(_encoded(cast("Sequence[bytes]", messages), sizes))
        return batch
    for each in messages:
        payload, headers = (
            (each.payload, each.headers) if isinstance(each, Message) else (each, None)
        )
        check_message(payload, headers)
        message = batch.messages.add()
        message.payload = payload
        if headers:
            message.headers.update(headers)
    return batch


def _payload_sizes(messages: Sequence[bytes | Message]) -> set[int] | None:
    """The distinct sizes, if all are plain payloads; computed without a Python loop."""
    return set(map(len, messages)) if set(map(type, messages)) == {bytes} else None  # type: ignore[arg-type]


def _encoded(payloads: Sequence[bytes], sizes: set[int]) -> bytes:
    """A MessageBatch of plain payloads, serialized by hand: four times as fast as `add`.

    Both `MessageBatch.messages` and `Message.payload` are field 1, so each payload follows its tag
    and length inside a message that follows its own.
    """
    prefixes = {size: _prefix(size) for size in sizes}
    if len(prefixes) == 1:
        (prefix,) = prefixes.values()
        return prefix.join((b"", *payloads))
    return b"".join([prefixes[len(payload)] + payload for payload in payloads])


def _prefix(size: int) -> bytes:
    payload_head = _FIELD_1 + _varint(size)
    return _FIELD_1 + _varint(len(payload_head) + size) + payload_head


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
