"""Idempotent publish: an import that crashed is run again from the start and stores nothing twice.

`python examples/idempotent_publish.py [ADDRESS]`. Within one run the client retries safely by
itself. Across restarts the program needs reproducible sequence numbers: here the number of each
part of the file, with the id of the import as producer id.
"""

import asyncio
import secrets
import sys

import tidemark
from tidemark.errors import SequenceTooOld

PART_LINES = 100
LINES = [b"line %d" % number for number in range(1_000)]


async def import_lines(address: str, import_id: str, crash_after: int | None = None) -> int:
    """Publish the file part by part; returns how many parts were already stored."""
    there = 0
    async with tidemark.connect(
        address, client_id="importer", producer_id=f"import-{import_id}"
    ) as client:
        publisher = await client.publisher(f"accounts/{import_id}")
        parts = [LINES[at : at + PART_LINES] for at in range(0, len(LINES), PART_LINES)]
        for sequence, part in enumerate(parts, start=1):
            if sequence == crash_after:
                break
            try:
                (receipt,) = await publisher.publish_many(part, sequence=sequence)
                there += receipt.duplicate
            except SequenceTooOld:
                there += 1  # beyond the last thousand that storage remembers
    return there


async def main(address: str) -> None:
    import_id = secrets.token_hex(4)  # of a real import: the name and the date of its file
    async with tidemark.connect(address, client_id="idempotent-publish") as client:
        await client.create_topic("accounts")
        print("parts there before the crash:", await import_lines(address, import_id, 7))
        print("parts there after it:", await import_lines(address, import_id))

        lines: list[bytes] = []
        while batch := await client.pull(f"accounts/{import_id}", max_messages=10_000):
            lines += batch.payloads
            await client.settle(batch, ack=True)
        print("every line once:", lines == LINES)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7400"))
