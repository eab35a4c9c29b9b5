"""Bodies are cut exactly, labelled message by message, and cached within a bound."""

from hypothesis import given
from hypothesis import strategies as st

from storage_svc.queue import bodies
from storage_svc.queue.bodies import CACHE_BYTES_MAX, BodyCache
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch

LARGEST_CACHED = CACHE_BYTES_MAX // 8


def batch(*texts: str) -> bytes:
    return MessageBatch(
        messages=[Message(payload=text.encode(), headers={"of": text}) for text in texts]
    ).SerializeToString()


def read(body: bytes) -> list[str]:
    return [message.payload.decode() for message in MessageBatch.FromString(body).messages]


@given(st.lists(st.text(max_size=5), max_size=12), st.data())
def test_a_cut_holds_the_messages_of_its_indexes(texts: list[str], data: st.DataObject) -> None:
    """S2: a slice of a run is those messages, in order, unchanged."""
    start = data.draw(st.integers(0, len(texts)))
    end = data.draw(st.integers(start, len(texts)))

    cut = bodies.cut(batch(*texts), start, end)

    assert MessageBatch.FromString(cut) == MessageBatch.FromString(batch(*texts[start:end]))


def test_labels_are_added_to_the_headers_of_each_message_with_its_own_offset() -> None:
    """L6: the copy of a dead-lettered message keeps its headers and names its origin."""
    labelled = bodies.label(batch("a", "b"), {"reason": "expired"}, 40, "offset")

    assert read(labelled) == ["a", "b"]
    assert [dict(message.headers) for message in MessageBatch.FromString(labelled).messages] == [
        {"of": "a", "reason": "expired", "offset": "40"},
        {"of": "b", "reason": "expired", "offset": "41"},
    ]


def test_a_cached_body_is_found_until_it_is_discarded() -> None:
    cache = BodyCache()
    cache.add(b"key", b"body")
    assert cache.get(b"key") == b"body"

    cache.discard(b"key")
    cache.discard(b"key")

    assert cache.get(b"key") is None


def test_a_body_that_would_push_out_too_many_others_is_not_cached() -> None:
    cache = BodyCache()

    cache.add(b"fits", bytes(LARGEST_CACHED))
    cache.add(b"too large", bytes(LARGEST_CACHED + 1))

    assert cache.get(b"fits") is not None
    assert cache.get(b"too large") is None


def test_the_oldest_bodies_leave_a_full_cache() -> None:
    """I1: memory is bounded by the cache, not by the backlog."""
    cache = BodyCache()
    for number in range(8):
        cache.add(b"%d" % number, bytes(LARGEST_CACHED))
    assert cache.get(b"0") is not None

    cache.add(b"one more", b"!")

    assert cache.get(b"0") is None
    assert cache.get(b"1") is not None
    assert cache.get(b"one more") == b"!"


def test_what_is_added_twice_or_discarded_counts_once() -> None:
    cache = BodyCache()
    for number in range(8):
        cache.add(b"0", bytes(LARGEST_CACHED))
        cache.discard(b"absent")
        cache.add(b"gone %d" % number, bytes(LARGEST_CACHED))
        cache.discard(b"gone %d" % number)

    for number in range(1, 8):
        cache.add(b"%d" % number, bytes(LARGEST_CACHED))

    assert all(cache.get(b"%d" % number) is not None for number in range(8))
