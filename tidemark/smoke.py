"""Publishes a message, consumes it and removes its traces: `python -m tidemark.smoke ADDRESS`.

The command of the chart's `helm test`. It goes through the broker to the disk and back, in a queue
that no other run of it uses, and exits with 1 and one line on stderr if something is not as it
should be. A cluster that is still starting is given time. It touches no topic but its own.
"""

import argparse
import asyncio
import sys
import uuid
from collections.abc import Sequence
from typing import Final

import grpc

from tidemark.api.broker.v1.broker_pb2 import PublishRequest, PullRequest, SettleRequest
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack, Message, MessageBatch, PublishRun, Settlement
from tidemark.api.broker.v1.topic_pb2 import CreateTopicRequest, DeleteQueueRequest
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.clock import SystemClock
from tidemark.errors import TidemarkError
from tidemark.rpc import from_status, open_channel, wait_until_serving
from tidemark.rpc.health import READINESS
from tidemark.settings.variables import Address

TOPIC: Final = "tidemark-smoke"

TIMEOUT_MS_DEFAULT: Final = 60_000

_PULL_WAIT_MS: Final = 10_000


class SmokeFailed(Exception):
    """The cluster answered, but not as it should. The text is one line, made for operators."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tidemark.smoke", description=__doc__)
    parser.add_argument("address", type=Address().parse, help="host:port of a broker")
    parser.add_argument("--timeout-ms", type=int, default=TIMEOUT_MS_DEFAULT)
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_until_it_works(options.address, options.timeout_ms))
    except TidemarkError as error:
        print(f"{error.reason}: {error.detail}", file=sys.stderr)
        return 1
    except SmokeFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _until_it_works(address: str, timeout_ms: int) -> None:
    """Try again, in another queue, for as long as the cluster says that this may help."""
    clock = SystemClock()
    deadline_ms = clock.monotonic_ms() + timeout_ms
    async with open_channel(address) as channel:
        await wait_until_serving(channel, READINESS, timeout_ms, clock)
        while True:
            try:
                return await _round_trip(channel)
            except TidemarkError as error:
                wait_ms = error.retry_after_ms
                if wait_ms is None or clock.monotonic_ms() + wait_ms > deadline_ms:
                    raise
            await clock.sleep_ms(wait_ms)


async def _round_trip(channel: grpc.aio.Channel) -> None:
    client_id = f"smoke-{uuid.uuid4().hex}"
    lmq_name = f"{TOPIC}/{client_id}"
    payload = client_id.encode()
    topics, broker = TopicServiceStub(channel), BrokerServiceStub(channel)
    await topics.CreateTopic(CreateTopicRequest(name=TOPIC))

    batch = MessageBatch(messages=[Message(payload=payload)])
    run = PublishRun(lmq_name=lmq_name, batch=batch, count=1)
    published = await broker.Publish(PublishRequest(client_id=client_id, runs=[run]))
    if published.results[0].HasField("error"):
        raise from_status(published.results[0].error)
    print(f"published to {lmq_name}")

    pull = PullRequest(client_id=client_id, lmq_name=lmq_name, wait_ms=_PULL_WAIT_MS)
    pulled = await broker.Pull(pull)
    received = [message.payload for each in pulled.deliveries for message in each.batch.messages]
    if received != [payload]:
        raise SmokeFailed(f"published one message, {len(received)} came back")
    print("received it")

    ack = Settlement(request_id=1, receipt=pulled.deliveries[0].receipt, ack=Ack())
    settled = await broker.Settle(SettleRequest(client_id=client_id, settlements=[ack]))
    if settled.results[0].HasField("error"):
        raise from_status(settled.results[0].error)
    print("acknowledged it")

    await topics.DeleteQueue(DeleteQueueRequest(lmq_name=lmq_name))
    print("Tidemark works.")


if __name__ == "__main__":
    sys.exit(main())
