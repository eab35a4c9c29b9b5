"""Messages and receipts as users see them, and the encoding of messages.

A message is checked before it joins others in a run, so that no call fails because of another.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.bodies import body_of
from tidemark.client.arguments import check_message


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


Answer: TypeAlias = asyncio.Future[PublishReceipt]
"""Through which a call gets its receipt, or the reason why there is none."""


def batch_of(messages: Sequence[bytes | Message]) -> MessageBatch:
    """Check messages, and encode them as one batch."""
    batch = MessageBatch()
    sizes = _payload_sizes(messages)
    if sizes is not None and max(sizes) <= limits.MESSAGE_BYTES_MAX:
        batch.MergeFromString(body_of(cast("Sequence[bytes]", messages)))
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
