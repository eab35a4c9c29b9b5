"""Bodies of runs: the only module of storage that parses them, and only to cut or label them.

A run that is handed out whole travels as the bytes that were published. One that must be sliced is
parsed and cut in C, without a Python object per message.
"""

from collections import OrderedDict
from collections.abc import Mapping

from google.protobuf.message import DecodeError

from tidemark.api.broker.v1.message_pb2 import MessageBatch

CACHE_BYTES_MAX = 8 * 1024 * 1024


def count(body: bytes) -> int | None:
    """How many messages a body holds; None if it cannot be parsed."""
    try:
        return len(MessageBatch.FromString(body).messages)
    except DecodeError:
        return None


def cut(body: bytes, start: int, end: int) -> bytes:
    """The messages from index `start` to, not including, `end`."""
    batch = MessageBatch.FromString(body)
    del batch.messages[end:]
    del batch.messages[:start]
    return batch.SerializeToString()


def label(body: bytes, headers: Mapping[str, str], first_offset: int, offset_name: str) -> bytes:
    """The same messages, each with these headers added and its offset in another one."""
    batch = MessageBatch.FromString(body)
    for offset, message in enumerate(batch.messages, first_offset):
        for name, value in headers.items():
            message.headers[name] = value
        message.headers[offset_name] = str(offset)
    return batch.SerializeToString()


def first_headers(body: bytes) -> Mapping[str, str]:
    """The headers of the first message."""
    return MessageBatch.FromString(body).messages[0].headers


def unlabel(body: bytes, prefix: str) -> bytes:
    """The same messages without the headers whose names start with `prefix`."""
    batch = MessageBatch.FromString(body)
    for message in batch.messages:
        for name in [name for name in message.headers if name.startswith(prefix)]:
            del message.headers[name]
    return batch.SerializeToString()


class BodyCache:
    """Bodies that were stored or read recently: most messages are consumed soon after."""

    __slots__ = ("_bodies", "_bytes")

    def __init__(self) -> None:
        self._bodies: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, key: bytes) -> bytes | None:
        return self._bodies.get(key)

    def add(self, key: bytes, body: bytes) -> None:
        if len(body) > CACHE_BYTES_MAX // 8 or key in self._bodies:
            return
        self._bodies[key] = body
        self._bytes += len(body)
        while self._bytes > CACHE_BYTES_MAX:
            _, oldest = self._bodies.popitem(last=False)
            self._bytes -= len(oldest)

    def discard(self, key: bytes) -> None:
        body = self._bodies.pop(key, None)
        if body is not None:
            self._bytes -= len(body)
