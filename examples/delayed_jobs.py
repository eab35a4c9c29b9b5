"""Delayed jobs: published now, delivered when they are due, unless they have expired.

`python examples/delayed_jobs.py [ADDRESS]`. The lifecycle service makes scheduled jobs ready.
"""

import asyncio
import sys

import tidemark


async def main(address: str) -> None:
    async with tidemark.connect(address, client_id="delayed-jobs") as client:
        await client.create_topic("reminders")
        publisher = await client.publisher("reminders/ada")

        # The first one published is due last. A reminder that is a minute old is useless.
        for delay_ms, text in ((600, b"stand up"), (300, b"drink water"), (0, b"good morning")):
            receipt = await publisher.publish(text, delay_ms=delay_ms, ttl_ms=60_000)
            print("published", text.decode(), "scheduled" if receipt.schedule_id else "for now")

        async with client.subscribe(["reminders/ada"]) as deliveries:
            for _ in range(3):
                delivery = await anext(deliveries)
                print("now:", delivery.payload.decode())
                await delivery.ack()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
