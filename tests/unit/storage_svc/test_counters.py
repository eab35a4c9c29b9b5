"""The record of counters, which every commit writes."""

from dataclasses import fields
from pathlib import Path

from storage_svc.engines.engine import Batch, Identity
from storage_svc.engines.rocksdb import RocksEngines
from storage_svc.partition.counters import Counters, load_counters, put_counters


async def test_each_counter_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """S2: the record names the counters one by one, so that one could be forgotten or displaced."""
    engine = await RocksEngines(tmp_path).open(Identity("counters", 0, 1))
    written = Counters(*range(1, len(fields(Counters)) + 1))
    batch = Batch()

    put_counters(batch, written)
    await engine.commit(batch)
    read, _ = await load_counters(engine)
    await engine.close()

    assert read == written
