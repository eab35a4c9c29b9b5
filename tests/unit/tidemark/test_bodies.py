"""Bodies that are written and recognized by hand."""

import pytest

from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.bodies import body_of, is_one_payload

SIZES = [0, 1, 100, 123, 124, 125, 126, 127, 128, 129, 16_378, 16_384, 16_390, 2_097_152]
"""Around those at which a length takes one more byte."""


@pytest.mark.parametrize("size", SIZES)
def test_one_payload_is_what_the_encoder_makes_of_it_and_is_recognized(size: int) -> None:
    payload = b"x" * size

    body = body_of([payload])

    assert body == MessageBatch(messages=[Message(payload=payload)]).SerializeToString()
    assert is_one_payload(body)


def test_payloads_of_equal_and_of_different_sizes_keep_their_order() -> None:
    for payloads in ([b"a", b"b"], [b"a", b"", b"ccc"], []):
        parsed = MessageBatch.FromString(body_of(payloads))

        assert [each.payload for each in parsed.messages] == payloads


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x0a",
        b"\x0a\x02\x0a\x00",
        b"\x0a\x05\x0a\x05a",
        b"x" * 100,
        body_of([b"a", b"b"]),
        body_of([bytes(58), bytes(58)]),
        MessageBatch(messages=[Message(payload=b"a", headers={"b": "c"})]).SerializeToString(),
        MessageBatch(messages=[Message(headers={"b": "c"})]).SerializeToString(),
    ],
)
def test_nothing_else_is_taken_for_one_payload(body: bytes) -> None:
    assert not is_one_payload(body)
