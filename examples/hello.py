"""Publishes a message, receives it and acknowledges it: `python examples/hello.py [ADDRESS]`."""

import asyncio
import sys

import tidemark


async def main(address: str) -> None:
    async with tidemark.connect(address) as client:
        await client.create_topic("greetings")

        # "greetings/ada" is a lite queue: the first use creates it.
        publisher = await client.publisher("greetings/ada")
        receipt = await publisher.publish(b"Hello, Ada!", headers={"language": "en"})
        print("published at offset", receipt.offset)

        async with client.subscribe(["greetings/ada"]) as deliveries:
            async for delivery in deliveries:
                print("received", delivery.payload.decode(), "in", delivery.headers["language"])
                await delivery.ack()
                break


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
