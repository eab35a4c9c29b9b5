"""How the RocksDB files of a node are opened, and how RocksDB's errors are translated.

This module owns every RocksDB option and the translation of errors; the layout is described at the
head of `rocksdb.py`. It never reads or writes a key.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    DBCompressionType,
    DBRecoveryMode,
    Options,
    Rdict,
)

from storage_svc.engines import wal
from storage_svc.engines.engine import Table
from tidemark.errors import DataCorrupt, DataDirectoryInUse, DiskFull, FormatNotSupported

MIB: Final = 1024 * 1024
WAL_BYTES_MAX: Final = 128 * MIB
OPEN_FILES_MAX: Final = 512

_NEVER: Final = 1 << 30  # files in level 0

# Tables that are only scanned; the others answer "is this key there?" and get a bloom filter.
_SCANNED = frozenset(
    {
        Table.RESERVATIONS,
        Table.SETTLED,
        Table.DEADLINES,
        Table.DELAYS,
        Table.SCHEDULE,
        Table.TTL,
        Table.AGES,
        Table.OUTBOX,
        Table.PRODUCER_INDEX,
        Table.ERASURES,
        Table.HISTORY_INDEX,
        Table.CONSUMED,
        Table.METRICS,
    }
)


@dataclass(frozen=True, slots=True)
class Memory:
    """The block cache of the process, and the cap of write buffers."""

    cache: Cache
    write_buffer_bytes_max: int


def open_database(directory: Path, memory: Memory, *, uncompacted: Collection[Table] = ()) -> Rdict:
    """The database; created if the directory holds none. Tables in `uncompacted` are not compacted:
    a compaction that meets a bad block would end all commits."""
    directory.mkdir(parents=True, exist_ok=True)
    logs = sorted(directory.glob("*.log"))
    exists = (directory / "CURRENT").exists()
    if not exists and (logs or any(directory.glob("*.sst"))):
        # RocksDB would create a new database and delete these files.
        raise DataCorrupt(f"{directory} holds data but no file CURRENT", file="CURRENT")
    for log in logs:
        if wal.has_altered_length(log):
            raise DataCorrupt(f"{log} holds a record of the wrong length", file=log.name)
    families = {table.value: _family_options(table, memory) for table in Table}
    for table in uncompacted:
        families[table.value].set_disable_auto_compactions(True)
        families[table.value].set_level_zero_slowdown_writes_trigger(_NEVER)
        families[table.value].set_level_zero_stop_writes_trigger(_NEVER)
    try:
        return Rdict(str(directory), _database_options(memory, create=not exists), families)
    except Exception as error:
        raise translated(error, directory) from error


def _database_options(memory: Memory, *, create: bool) -> Options:
    options = Options(raw_mode=True)
    options.create_if_missing(create)
    options.create_missing_column_families(True)
    options.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    options.set_db_write_buffer_size(memory.write_buffer_bytes_max)
    options.set_max_total_wal_size(WAL_BYTES_MAX)
    options.set_max_open_files(OPEN_FILES_MAX)
    options.set_max_background_jobs(2)
    options.set_bytes_per_sync(MIB)  # tables reach the disk steadily, not in one long sync
    options.set_max_log_file_size(MIB)
    options.set_keep_log_file_num(4)
    options.set_stats_dump_period_sec(0)
    return options


def _family_options(table: Table, memory: Memory) -> Options:
    blocks = BlockBasedOptions()
    blocks.set_block_cache(memory.cache)
    blocks.set_cache_index_and_filter_blocks(True)
    blocks.set_pin_l0_filter_and_index_blocks_in_cache(True)
    # In parts of 4 KiB: the cache is cut into shards of 1 MiB, and the filter of a whole file does
    # not fit in one beside anything else. Each read of a cold queue would load all of it again.
    blocks.set_index_type(BlockBasedIndexType.two_level_index_search())
    blocks.set_pin_top_level_index_and_filter(True)
    if table not in _SCANNED:
        blocks.set_bloom_filter(10, False)
        blocks.set_partition_filters(True)

    options = Options(raw_mode=True)
    options.set_block_based_table_factory(blocks)
    share = 2 if table is Table.RUN_BODIES else 4
    options.set_write_buffer_size(memory.write_buffer_bytes_max // share)
    options.set_arena_block_size(64 * 1024)  # every table in use takes at least one of these
    options.set_compression_type(DBCompressionType.lz4())
    # Queued messages are soon deleted: rewrite files that consist mostly of tombstones.
    options.add_compact_on_deletion_collector_factory(10_000, 5_000, 0.5)
    # A write is either refused or not slowed down at all: no_slowdown would refuse slowed ones.
    options.set_max_write_buffer_number(3)
    options.set_level_zero_slowdown_writes_trigger(36)
    options.set_level_zero_stop_writes_trigger(36)
    options.set_soft_pending_compaction_bytes_limit(0)
    options.set_hard_pending_compaction_bytes_limit(0)
    return options


def translated(error: Exception, directory: Path) -> Exception:
    """The error for a message of RocksDB: rocksdict raises bare Exception with nothing but text."""
    message = f"{directory}: {error}"
    if "lock hold by current process" in message or "While lock file" in message:
        return DataDirectoryInUse(f"{directory} is open in another process")
    if "Corruption" in message:
        # Errors in the log come without a name.
        named = re.findall(r"\d{6}\.\w+|MANIFEST-\d+", str(error))
        files = named[:1] or sorted(log.name for log in directory.glob("*.log"))
        return DataCorrupt(f"{message} in {', '.join(files)}", file=", ".join(files))
    if "Column families not opened" in message:
        return FormatNotSupported(f"{message}: tables of another version")
    if "No space left on device" in message:
        return DiskFull(message)
    return OSError(message)
