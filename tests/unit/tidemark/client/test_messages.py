"""Messages as they travel, and what can be refused without a broker."""

from hypothesis import given
from hypothesis import strategies as st

from tidemark.api.broker.v1.message_pb2 import Message as MessageProto
from tidemark.api.broker.v1.message_pb2 import MessageBatch
from tidemark.client.publish.messages import Message, batch_of


@given(st.lists(st.binary(max_size=300), min_size=1))
def test_plain_payloads_are_encoded_as_protocol_buffers_would(payloads: list[bytes]) -> None:
    expected = MessageBatch(messages=[MessageProto(payload=payload) for payload in payloads])

    assert batch_of(payloads) == expected


def test_lengths_around_each_size_of_a_varint_are_encoded_right() -> None:
    sizes = [0, 1, 124, 125, 126, 127, 128, 16_380, 16_383, 16_384, 1_048_576]

    for size in sizes:
        assert [each.payload for each in batch_of([bytes(size)] * 2).messages] == [bytes(size)] * 2


def test_messages_with_and_without_headers_keep_their_order() -> None:
    batch = batch_of([b"a", Message(b"b", headers={"k": "v"}), Message(b"c")])

    assert [(each.payload, dict(each.headers)) for each in batch.messages] == [
        (b"a", {}),
        (b"b", {"k": "v"}),
        (b"c", {}),
    ]
