"""Short forms of what tests do with the SDK."""

import tidemark
from tests.support.local_broker import in_time


async def publish(client: tidemark.Client, lmq_name: str, *payloads: bytes) -> None:
    await (await client.publisher(lmq_name)).publish_many(payloads)


async def take(deliveries: tidemark.Subscription, count: int) -> list[tidemark.Delivery]:
    return [await in_time(anext(deliveries)) for _ in range(count)]
