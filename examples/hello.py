"""Publishes a message, pulls it back and acknowledges it: `python examples/hello.py [ADDRESS]`."""

import asyncio
import sys

from tidemark.api.broker.v1.broker_pb2 import PublishRequest, PullRequest, SettleRequest
from tidemark.api.broker.v1.broker_pb2_grpc import BrokerServiceStub
from tidemark.api.broker.v1.message_pb2 import Ack, Message, MessageBatch, PublishRun, Settlement
from tidemark.api.broker.v1.topic_pb2 import CreateTopicRequest
from tidemark.api.broker.v1.topic_pb2_grpc import TopicServiceStub
from tidemark.rpc import from_status, open_channel


async def main(address: str) -> None:
    async with open_channel(address) as channel:
        topics, broker = TopicServiceStub(channel), BrokerServiceStub(channel)
        await topics.CreateTopic(CreateTopicRequest(name="greetings"))

        # "greetings/ada" is a lite queue: it exists from its first message on.
        batch = MessageBatch(messages=[Message(payload=b"Hello, Ada!")])
        run = PublishRun(lmq_name="greetings/ada", batch=batch, count=1)
        published = await broker.Publish(PublishRequest(client_id="hello", runs=[run]))
        if published.results[0].HasField("error"):  # every run has a result of its own
            raise from_status(published.results[0].error)
        print("published at offset", published.results[0].receipt.first_offset)

        pull = PullRequest(client_id="hello", lmq_name="greetings/ada", wait_ms=5_000)
        for delivery in (await broker.Pull(pull)).deliveries:
            for message in delivery.batch.messages:
                print("received", message.payload.decode())
            ack = Settlement(request_id=1, receipt=delivery.receipt, ack=Ack())
            settled = await broker.Settle(SettleRequest(client_id="hello", settlements=[ack]))
            print("acknowledged", settled.results[0].messages)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
