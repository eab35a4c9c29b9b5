"""The publish path, where a partition does not have the newest topic yet."""

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from broker_svc.publish.publish_path import Attempt, PublishPath
from tidemark.api.broker.v1.message_pb2 import PublishResult, PublishRun
from tidemark.api.storage.v1.exchange_pb2 import Operation
from tidemark.clock import ManualClock, SystemClock
from tidemark.errors import TidemarkError, TopicNotFound, Unavailable
from tidemark.rpc.statuses import from_status
from tidemark.topics import Topic

RUNS = 4


class Topics:
    """A home of topics whose later answers come first."""

    def __init__(self) -> None:
        self.renewed = self.brought = 0
        self.refusal: TidemarkError | None = None

    async def get(self, name: str) -> Topic:
        return Topic(name)

    async def renew(self, name: str) -> Topic:
        self.renewed += 1
        for _ in range(10 * (RUNS - self.renewed)):
            await SystemClock().sleep_ms(0)
        if self.refusal is not None:
            raise self.refusal
        return Topic(name, version=2)

    async def bring(self, partition: int, topic: Topic) -> None:
        self.brought += 1


class Node:
    """A publish path over one link, and what it asks."""

    def __init__(self) -> None:
        self.topics = Topics()
        self.asked: list[Operation] = []
        self.results: list[PublishResult] = []
        link = self.link = Mock(partition=0)
        link.ask.side_effect = lambda operation, _done: self.asked.append(operation)
        self.path = PublishPath({0: link}, self.topics, Mock(), Mock(), ManualClock())  # type: ignore[arg-type]
        self.publisher = Mock(partitions=(0,), unanswered=0)
        self.publisher.lease.failed = False
        self.publisher.lease.loaded = AsyncMock()
        self.cache = Mock(opening={})
        self.cache.find.return_value = self.publisher

    def refused_as_outdated(self, number: int, lmq_name: str) -> None:
        run = PublishRun(
            request_id=number, lmq_name=lmq_name, count=1, partition=0, sequence=number
        )
        attempt = Attempt(run, self.publisher, "till-7", self.cache, self.results.append, b"x")
        self.path.repeat(attempt, 0)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.asked) + len(self.results) < count:
                await SystemClock().sleep_ms(0)


@pytest.fixture
async def node() -> Node:
    return Node()


async def test_runs_that_wait_for_the_newest_topic_keep_their_order(node: Node) -> None:
    """S2: also those that are refused while others wait; the topic is read once for all."""
    for number in range(1, RUNS):
        node.refused_as_outdated(number, "orders/a" if number < RUNS - 1 else "orders/b")
    await SystemClock().sleep_ms(0)
    node.refused_as_outdated(RUNS, "orders/a")
    await node.until(RUNS)

    of_a = [each.append.sequence for each in node.asked if each.append.lmq_name == "orders/a"]
    assert of_a == [1, 2, RUNS]
    assert len(node.asked) == RUNS
    assert {each.append.topic_version for each in node.asked} == {2}
    assert (node.topics.renewed, node.topics.brought) == (2, 2)


async def test_runs_behind_one_that_cannot_be_sent_again_are_not_sent_either(node: Node) -> None:
    """S2: they would overtake it."""
    node.link.check_serving.side_effect = [Unavailable("the link is broken"), None, None, None]
    for number in range(1, RUNS):
        node.refused_as_outdated(number, "orders/a" if number < RUNS - 1 else "orders/b")
    await node.until(RUNS - 1)

    assert [each.request_id for each in node.results] == [1, 2]
    assert [each.append.lmq_name for each in node.asked] == ["orders/b"]


async def test_all_runs_that_wait_get_the_reason_if_there_is_no_topic(node: Node) -> None:
    """S3."""
    node.topics.refusal = TopicNotFound("there is no topic orders")
    for number in range(RUNS):
        node.refused_as_outdated(number, "orders/a")
    await node.until(RUNS)

    assert [each.request_id for each in node.results] == list(range(RUNS))
    assert {type(from_status(each.error)) for each in node.results} == {TopicNotFound}
    assert not node.asked
