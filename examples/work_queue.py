"""A work queue: failed jobs are retried later, hopeless ones go to a dead-letter topic.

`python examples/work_queue.py [ADDRESS]`. Dead-lettering is done by the lifecycle service.
"""

import asyncio
import sys

import tidemark

ATTEMPTS = 3
RETRY_AFTER_MS = 100


def resize(image: bytes, attempt: int) -> None:
    """The work: one picture needs a second attempt, another file is not a picture."""
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
                print(f"{name}: {error}, retrying")
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


async def show_dead_letters(client: tidemark.Client) -> None:
    """Show the dead letters to an operator."""
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
        await show_dead_letters(client)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
