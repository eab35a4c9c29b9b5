"""Bodies that are written and recognized by hand."""

import pytest

from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.bodies import body_of, has_payloads

SIZES = [0, 1, 100, 123, 124, 125, 126, 127, 128, 129, 16_378, 16_384, 16_390, 2_097_152]
"""Around those at which a length takes one more byte."""


@pytest.mark.parametrize("size", SIZES)
def test_one_payload_is_what_the_encoder_makes_of_it_and_is_recognized(size: int) -> None:
    payload = b"x" * size

    body = body_of([payload])

    assert body == MessageBatch(messages=[Message(payload=payload)]).SerializeToString()
    assert has_payloads(body, 1)
    assert not has_payloads(body, 2)


def test_payloads_of_equal_and_of_different_sizes_keep_their_order() -> None:
    for payloads in ([b"a", b"b"], [b"a", b"", b"ccc"], []):
        parsed = MessageBatch.FromString(body_of(payloads))

        assert [each.payload for each in parsed.messages] == payloads


@pytest.mark.parametrize("size", [0, 1, 125, 126, 200])
def test_payloads_of_one_size_are_recognized_with_their_number(size: int) -> None:
    body = body_of([bytes(size)] * 10)

    assert [count for count in range(20) if has_payloads(body, count)] == [10]


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (b"", 0),
        (b"", 1),
        (b"\x0a", 1),
        (b"\x0a\x02\x0a\x00", 1),
        (b"\x0a\x05\x0a\x05a", 1),
        (b"x" * 100, 1),
        (b"x" * 100, 1000),
        (body_of([b"a", b"b"]), 1),
        (body_of([b"a", b"bcd"]), 2),
        (body_of([b"", b"bcd"]), 2),
        (body_of([bytes(9)]) + b"\x0a\x0b\x0a\x08" + bytes(9), 2),
        (MessageBatch(messages=[Message(headers={"b": "c"})]).SerializeToString(), 1),
        (MessageBatch(messages=[Message(headers={"b": "c"})] * 2).SerializeToString(), 2),
    ],
)
def test_nothing_else_is_taken_for_payloads(body: bytes, count: int) -> None:
    assert not has_payloads(body, count)
