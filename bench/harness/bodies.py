"""Run bodies as publishers make them, filled with incompressible bytes."""

from random import Random
from typing import Final

from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch

MESSAGE_BYTES: Final = 100


def random_body(random: Random, messages: int) -> bytes:
    """A serialized batch of messages of `MESSAGE_BYTES` each."""
    batch = MessageBatch(
        messages=[Message(payload=random.randbytes(MESSAGE_BYTES)) for _ in range(messages)]
    )
    return batch.SerializeToString()
