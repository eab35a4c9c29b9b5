"""The smoke test: `python -m tidemark.smoke ADDRESS` publishes a message and consumes it.

`helm test` runs it. The message goes through the broker to disk and back, in a separate queue,
which is deleted afterwards. A cluster that is still starting is given time. On failure it prints
one line to stderr and exits with 1.
"""

import argparse
import asyncio
import sys
import uuid
from collections.abc import Sequence
from typing import Final

import grpc

from tidemark.api.broker.v1.message_pb2 import Ack
from tidemark.client.admin.admin import Admin
from tidemark.client.transport.codec import settlement_of
from tidemark.client.transport.repeater import Repeater
from tidemark.client.transport.unary import UnaryClient
from tidemark.clock import SystemClock
from tidemark.errors import TidemarkError
from tidemark.rpc import open_channel, wait_until_serving
from tidemark.rpc.health import READINESS
from tidemark.settings.variables import Address

TOPIC: Final = "tidemark-smoke"

TIMEOUT_MS_DEFAULT: Final = 60_000

_PULL_WAIT_MS: Final = 10_000
_GROUP: Final = "default"


class SmokeFailed(Exception):
    """The cluster answered, but not as expected. The text is one line, for operators."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tidemark.smoke", description=__doc__)
    parser.add_argument("address", type=Address().parse, help="host:port of a broker")
    parser.add_argument("--timeout-ms", type=int, default=TIMEOUT_MS_DEFAULT)
    options = parser.parse_args(arguments)
    try:
        asyncio.run(_retry_until_it_works(options.address, options.timeout_ms))
    except TidemarkError as error:
        print(f"{error.reason}: {error.detail}", file=sys.stderr)
        return 1
    except SmokeFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


async def _retry_until_it_works(address: str, timeout_ms: int) -> None:
    """Retry, each time with a new queue, while a retry may help."""
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
    repeater = Repeater(None, while_unreachable=False)
    admin, client = Admin(lambda: channel, repeater), UnaryClient(channel, client_id)
    await admin.create_topic(TOPIC)

    await client.publish(lmq_name, [payload], headers={})
    print(f"published to {lmq_name}")

    pulled = await client.pull(lmq_name, _GROUP, max_messages=10, wait_ms=_PULL_WAIT_MS)
    received = [message.payload for each in pulled.deliveries for message in each.batch.messages]
    if received != [payload]:
        raise SmokeFailed(f"published one message, received {len(received)}")
    print("received it")

    await client.settle([settlement_of(pulled.deliveries[0].receipt, Ack(), request_id=1)])
    print("acknowledged it")

    await admin.delete_queue(lmq_name)
    print("Tidemark works.")


if __name__ == "__main__":
    sys.exit(main())
