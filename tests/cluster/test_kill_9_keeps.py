"""States of queues that operators and failed deliveries make, over `kill -9` of all services."""

import asyncio

from tests.cluster.conftest import StartCluster
from tests.support.lifecycle_client import client_of, until
from tests.support.local_broker import run_of
from tidemark.api.broker.v1 import topic_pb2
from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.local.cluster import SERVICES

RETRY_DELAY_MS = 3_600_000
RUNS = 600
"""More than one commit erases."""


async def test_kill_9_keeps_pauses_retries_and_purges(start_cluster: StartCluster) -> None:
    """L10, V9, S2: what was paused stays paused, what waits for a retry waits, with its attempts,
    and what was purged is gone, although its rows were not erased yet."""
    cluster = await start_cluster()
    async with client_of(cluster) as client:
        for name in ("paused", "jobs", "purged"):
            await client.create_topic(name)
        await client.create_topic("retried", retry_delay_ms=RETRY_DELAY_MS, max_attempts=5)
        queues = ["paused/a", "jobs/a", "retried/a", "retried/b"]
        await client.publish_each(*(run_of(lmq_name, b"0") for lmq_name in queues))
        await client.publish_each(*[run_of("purged/a", b"x")] * RUNS)
        (held,) = await client.pull("purged/a", max_messages=1)
        await client.topics.PauseTopic(topic_pb2.PauseTopicRequest(name="paused"))
        await client.topics.PauseQueue(topic_pb2.PauseQueueRequest(lmq_name="jobs/a"))
        await client.nack(await client.take("retried/a"))
        await client.nack(await client.take("retried/b"), delay_ms=1)
        purge = topic_pb2.PurgeQueueRequest(lmq_name="purged/a")
        purged = await client.topics.PurgeQueue(purge)

        await asyncio.gather(*map(cluster.kill, SERVICES))
        for name in SERVICES:
            await cluster.restart(name)

        retried = await until(lambda: client.pull("retried/b"))
        assert retried[0].attempt_count == 1
        assert (await client.queue("jobs/a")).paused
        topic = topic_pb2.GetTopicRequest(name="paused")
        assert (await client.topics.GetTopic(topic)).topic.paused
        for lmq_name in ("paused/a", "jobs/a", "retried/a"):
            assert await client.pull(lmq_name, wait_ms=0) == []
        assert purged.messages + len(held.batch.messages) == RUNS
        assert (await client.queue("purged/a")).messages == len(held.batch.messages)
        await client.settle(held.receipt, Ack())
        assert await client.stored("purged/a") == []
        await client.topics.ResumeTopic(topic_pb2.ResumeTopicRequest(name="paused"))
        assert len(await client.pull("paused/a")) == 1
