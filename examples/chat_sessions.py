"""A queue per chat session with one reader: the device that opens the session last gets it.

`python examples/chat_sessions.py [ADDRESS]`. The phone takes the session over from the laptop. It
gets the messages that the laptop has not acknowledged, and the laptop can no longer settle them.
"""

import asyncio
import sys

import tidemark
from tidemark.errors import Fenced

SESSION = "chats/ada"


async def main(address: str) -> None:
    async with (
        tidemark.connect(address, client_id="laptop") as laptop,
        tidemark.connect(address, client_id="phone") as phone,
    ):
        await laptop.create_topic("chats", subscription="exclusive")
        publisher = await laptop.publisher(SESSION)
        await publisher.publish_many([b"Hi Ada", b"Are you there?"])

        async with laptop.subscribe(
            [SESSION], on_evicted=lambda lost: print("laptop: lost", lost.lmq_name)
        ) as on_laptop:
            first, second = [await anext(on_laptop) for _ in range(2)]
            print("laptop:", first.payload.decode())
            await first.ack()
            await on_laptop.flush()

            async with phone.subscribe([SESSION]) as on_phone:
                again = await anext(on_phone)
                print("phone:", again.payload.decode())
                print("the phone's epoch is higher:", again.epoch > second.epoch)
                async for _ in on_laptop:  # ends, because all its queues were lost
                    raise AssertionError("the laptop gets no more messages")
                try:
                    await second.nack()
                except Fenced:
                    print("laptop: too late, the phone has it")
                await again.ack()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
