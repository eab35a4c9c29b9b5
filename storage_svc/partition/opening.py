"""Opening: what a partition reads before it serves.

Counters, the claim, topics and the times of deadlines: what every operation may need. No queue is
read, so that opening takes the same time however many there are.
"""

from storage_svc.engines.engine import Engine, Engines, Identity, Table
from storage_svc.engines.keys import read_u64, successor
from storage_svc.loading.handles import Handles
from storage_svc.operations.producers import Producers
from storage_svc.partition import counters as ledger
from storage_svc.partition.commit import Memory
from storage_svc.partition.deadlines import Deadlines
from storage_svc.partition.topics import Topics

_PAGE_ROWS = 10_000


async def open_memory(engines: Engines, identity: Identity) -> tuple[Memory, Deadlines]:
    """Open the engine of a partition, with what the partition knows from the start."""
    engine = await engines.open(identity)
    try:
        counters, claim = await ledger.load(engine)
        topics = Topics()
        await topics.load(engine)
        deadlines = Deadlines()
        for table in (Table.DEADLINES, Table.DELAYS):
            await _read_deadlines(engine, table, deadlines)
    except BaseException:
        await engine.close()
        raise
    handles = Handles(engine, topics, counters)
    return Memory(engine, counters, claim, topics, handles, Producers(engine)), deadlines


async def _read_deadlines(engine: Engine, table: Table, deadlines: Deadlines) -> None:
    start = b""
    while page := await engine.scan(table, start, None, limit=_PAGE_ROWS):
        for key, _ in page:
            deadlines.add(read_u64(key))
        start = successor(page[-1][0])
