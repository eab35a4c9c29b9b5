"""Fair sharing: a tenant with a huge backlog does not delay the others.

`python examples/fair_tenants.py [ADDRESS]`. All jobs are in one queue; the fairness key names the
tenant. The large tenant published first and far more, yet the small ones are served in the first
round, and the one with the higher weight gets a larger share.
"""

import asyncio
import sys
from collections import Counter

import tidemark

JOBS = 3_000
LOOKED_AT = 1_000
BODY = bytes(1_000)


async def main(address: str) -> None:
    async with tidemark.connect(address, client_id="fair-tenants") as client:
        await client.create_topic("reports", fairness_weights={"gold": 3})
        publisher = await client.publisher("reports")
        await publisher.publish_many([BODY] * JOBS, fairness_key="huge")
        await publisher.publish_many([BODY] * JOBS, fairness_key="gold")
        await publisher.publish_many([BODY] * 10, fairness_key="tiny")

        served: Counter[str] = Counter()
        async with client.subscribe(["reports"], credit=100) as deliveries:
            async for delivery in deliveries:
                served[delivery.fairness_key] += 1
                await delivery.ack()
                if served.total() == LOOKED_AT:
                    break

        print("tiny is done:", served["tiny"] == 10)
        print("gold got about three times as much:", 2 < served["gold"] / served["huge"] < 4)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
