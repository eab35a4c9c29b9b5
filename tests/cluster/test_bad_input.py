"""Bad input over the public API: it gets a reason that a program can read, and changes nothing."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.local_broker import run_of
from tests.support.unary_client import CLIENT_ID, TOPIC, UnaryClient, connected
from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2, topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.errors import (
    BatchTooLarge,
    InvalidArgument,
    InvalidName,
    TidemarkError,
    TopicNotFound,
)
from tidemark.local.cluster import LocalCluster
from tidemark.rpc import from_status


@pytest.fixture
async def client(shared_cluster: LocalCluster) -> AsyncIterator[UnaryClient]:
    async with connected(shared_cluster) as client:
        yield client
        await client.delete_topic()


async def test_refused_runs_get_their_reasons_and_leave_nothing_behind(client: UnaryClient) -> None:
    """S3: one result per run; the good ones beside them are stored."""
    queue = f"{TOPIC}/ada"

    results = await client.publish_runs(
        run_of(queue, b"good", request_id=1),
        run_of("no spaces/ada", b"bad", request_id=2),
        run_of(f"{TOPIC}/", b"bad", request_id=3),
        run_of("t" * (limits.TOPIC_NAME_BYTES_MAX + 1), b"bad", request_id=4),
        run_of(queue, b"one", b"two", count=3, request_id=5),
        run_of(queue, request_id=6),
        run_of(queue, b"good too", request_id=7),
    )

    refusals = {
        result.request_id: from_status(result.error)
        for result in results
        if result.HasField("error")
    }
    assert [result.request_id for result in results] == [1, 2, 3, 4, 5, 6, 7]
    assert {number: (type(each), each.metadata) for number, each in refusals.items()} == {
        2: (InvalidName, {"field": "topic"}),
        3: (InvalidName, {"field": "lite"}),
        4: (InvalidName, {"field": "topic"}),
        5: (InvalidArgument, {"field": "count"}),
        6: (InvalidArgument, {"field": "count"}),
    }
    assert await client.drain(queue) == [b"good", b"good too"]


async def test_a_run_at_the_limit_is_stored_and_one_past_it_is_refused(client: UnaryClient) -> None:
    """S3: offsets show that what was refused took no place."""
    queue = f"{TOPIC}/ada"
    largest = [b""] * limits.RUN_MESSAGES_MAX
    heaviest = batch_of(limits.RUN_BYTES_MAX)
    too_heavy = batch_of(limits.RUN_BYTES_MAX + 1)

    assert await client.store(queue, *largest) == 0
    with pytest.raises(BatchTooLarge):
        await client.store(queue, *largest, b"")
    assert await client.store(queue, *heaviest) == len(largest)
    with pytest.raises(BatchTooLarge):
        await client.store(queue, *too_heavy)
    assert await client.store(queue, b"next") == len(largest) + len(heaviest)


def batch_of(size_bytes: int) -> list[bytes]:
    """Payloads whose batch has exactly that size on the wire, none of them too large itself."""
    payloads = [bytes(800_000)] * 5
    missing = size_bytes - run_of("", *payloads).batch.ByteSize()
    payloads[0] += bytes(missing)
    assert run_of("", *payloads).batch.ByteSize() == size_bytes
    assert len(payloads[0]) <= limits.MESSAGE_BYTES_MAX
    return payloads


async def test_a_bad_request_is_refused_as_a_whole_with_the_field_that_is_wrong(
    client: UnaryClient,
) -> None:
    """S3."""
    good: dict[str, Any] = {"client_id": CLIENT_ID, "lmq_name": f"{TOPIC}/ada"}
    wrong: list[tuple[dict[str, Any], type[TidemarkError], str]] = [
        ({"lmq_name": "no spaces"}, InvalidName, "topic"),
        ({"group": "-dash"}, InvalidName, "group"),
        ({"max_messages": limits.PULL_MESSAGES_MAX + 1}, InvalidArgument, "max_messages"),
        ({"wait_ms": limits.PULL_WAIT_MS_MAX + 1}, InvalidArgument, "wait_ms"),
    ]
    for fields, error_class, field_name in wrong:
        request = broker_pb2.PullRequest(**{**good, **fields})

        with pytest.raises(error_class) as refused:
            await client.broker.Pull(request)

        assert refused.value.metadata == {"field": field_name}
    with pytest.raises(InvalidArgument):
        await client.publish_runs()
    with pytest.raises(InvalidArgument):
        await client.settle(b"not a receipt", Ack())
    with pytest.raises(InvalidName):
        await client.topics.CreateTopic(topic_pb2.CreateTopicRequest(name="no spaces"))
    with pytest.raises(TopicNotFound):
        await client.topics.GetTopic(topic_pb2.GetTopicRequest(name="never-made"))
