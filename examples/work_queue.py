"""A work queue: failed jobs are tried again later, hopeless ones go to a dead-letter topic.

`python examples/work_queue.py [ADDRESS]`. Dead-lettering is done by the lifecycle service.
"""

import asyncio
import sys

import tidemark

ATTEMPTS = 3
RETRY_AFTER_MS = 100


def resize(image: bytes, attempt: int) -> None:
    """The work: one picture needs a second try, another is no picture at all."""
    if image == b"cat.png" and attempt == 0:
        raise TimeoutError("the disk was slow")
    if image == b"notes.txt":
        raise ValueError("not a picture")


async def work(client: tidemark.Client, jobs: int) -> None:
    ended = 0
    async with client.subscribe(["pictures"], group="resizers", credit=10) as deliveries:
        async for delivery in deliveries:
            name = delivery.payload.decode()
            try:
                resize(delivery.payload, delivery.attempt)
            except TimeoutError as error:
                print(f"{name}: {error}, once more")
                await delivery.nack(delay_ms=RETRY_AFTER_MS)
                continue
            except ValueError as error:
                print(f"{name}: {error}, given up")
                await delivery.dead_letter(str(error))
            else:
                print(f"{name}: done at attempt {delivery.attempt + 1}")
                await delivery.ack()
            ended += 1
            if ended == jobs:
                break


async def bury(client: tidemark.Client) -> None:
    """Somebody looks into what could not be done."""
    async with client.subscribe(["pictures-dead"], group="operators") as deliveries:
        async for delivery in deliveries:
            why = delivery.headers["tidemark-dead-detail"]
            print(f"{delivery.payload.decode()}: dead, because {why}")
            await delivery.ack()
            break


async def main(address: str) -> None:
    async with tidemark.connect(address, client_id="work-queue") as client:
        await client.create_topic("pictures-dead")
        await client.create_topic(
            "pictures",
            visibility_timeout_ms=10_000,
            max_attempts=ATTEMPTS,
            dead_letter_topic="pictures-dead",
        )
        publisher = await client.publisher("pictures")
        await publisher.publish_many([b"dog.png", b"cat.png", b"notes.txt"])

        await work(client, jobs=3)
        await bury(client)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
