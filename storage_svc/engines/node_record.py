"""The record of a storage node about the partitions of its cluster, beside the data itself.

Each of several nodes has its own id, and a record of the node that created each partition. A volume
that vanishes takes its id with it: the others remember who held the partition, so that it is
reported as lost and never quietly created again (C6). This module reads and writes the rows; the
decisions are in `storage_svc.placement`.
"""

import logging
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from storage_svc.engines.engine import Batch, Table
from storage_svc.engines.identity import IDENTITY_KEY
from storage_svc.engines.keys import u16
from storage_svc.engines.rocksdb import (
    NODE_ID_KEY,
    NODE_PREFIX,
    PLACED_KEY,
    RocksEngines,
    check_node,
)
from tidemark.limits import PARTITIONS_MAX

_NOTE: Final = "partitions"

_log = logging.getLogger(__name__)


async def stored_partitions(engines: RocksEngines, cluster_id: str) -> int:
    """The number of partitions that the data of a node has; 0 for new data.

    The database stays open until `release_node`. Raises the errors of opening it.
    """
    try:
        return await check_node(await engines.hold(), cluster_id, 0)
    except BaseException:
        await engines.release_node()
        raise


def noted_partitions(data_directory: Path) -> int:
    """The number of partitions as noted beside the database; 0 if there is no note."""
    try:
        noted = int((data_directory / _NOTE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0
    return noted if 1 <= noted <= PARTITIONS_MAX else 0


def note_partitions(data_directory: Path, partitions: int) -> None:
    """Note the number, for a start at which the database cannot be opened.

    The database decides: without the note, such a node only cannot report its partitions.
    """
    if noted_partitions(data_directory) == partitions:
        return
    written = data_directory / f"{_NOTE}.new"
    try:
        written.write_text(f"{partitions}\n", encoding="ascii")
        written.replace(data_directory / _NOTE)
    except OSError as error:
        _log.warning("the number of partitions cannot be noted: %s", error)


class NodeRecord:
    """Keeps the database open from `open` to `close`."""

    def __init__(self, engines: RocksEngines, cluster_id: str, partitions: int) -> None:
        self.cluster_id = cluster_id
        self.partitions = partitions
        """0 until the data, or `decide`, has decided the number of partitions of the cluster."""
        self.node_id = ""
        """Empty until it is open and the number of partitions is decided."""
        self.held: set[int] = set()
        """The partitions whose data is here."""
        self.placed: dict[int, str] = {}
        """The nodes that created partitions, this one included."""
        self._engines = engines

    async def open(self) -> None:
        """Raises the errors of opening the database."""
        try:
            database = await self._engines.hold()
            self.partitions = await check_node(database, self.cluster_id, self.partitions)
            if not self.partitions:
                return
            numbers = range(self.partitions)
            (node_id,) = database.load(NODE_PREFIX, Table.META, [NODE_ID_KEY])
            placed = database.load(NODE_PREFIX, Table.META, [PLACED_KEY + u16(n) for n in numbers])
            self.held = {
                number
                for number in numbers
                if database.load(u16(number), Table.META, [IDENTITY_KEY])[0] is not None
            }
            self.placed = {n: id_.decode() for n, id_ in enumerate(placed) if id_ is not None}
            if node_id is None:
                node_id = f"{random.getrandbits(64):016x}".encode()
                batch = Batch()
                batch.put(Table.META, NODE_ID_KEY, node_id)
                await database.commit(NODE_PREFIX, batch)
        except BaseException:
            await self._engines.release_node()
            raise
        self.node_id = node_id.decode()

    async def decide(self, partitions: int) -> None:
        """The number of partitions of the cluster, for new data; on disk when this returns."""
        await check_node(await self._engines.hold(), self.cluster_id, partitions)
        await self.open()

    async def remember(self, placed: Mapping[int, str]) -> None:
        """Record who created partitions; on disk when this returns."""
        news = {number: id_ for number, id_ in placed.items() if self.placed.get(number) != id_}
        if not news:
            return
        batch = Batch()
        for number, node_id in news.items():
            batch.put(Table.META, PLACED_KEY + u16(number), node_id.encode())
        database = await self._engines.hold()
        await database.commit(NODE_PREFIX, batch)
        self.placed.update(news)

    async def close(self) -> None:
        self.node_id = ""
        await self._engines.release_node()
