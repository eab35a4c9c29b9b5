"""Due work that is left out for a while because a record that it needs cannot be read (V3, L11).

Pure. Sweeps do not find an entry that is left out, so that one unreadable record costs one attempt
per pause and the sound ones beside it go on. The pauses grow; opening the partition ends them.
"""

from storage_svc.engines.engine import Table

PAUSE_MS_MIN = 1_000
PAUSE_MS_MAX = 60 * 60 * 1000
ENTRIES_MAX = 10_000
"""With more unreadable records than that, the one that was left out first is tried again."""


class LeftOut:
    """Entries of due indexes that are left out, each with its failures and the end of its pause."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[tuple[Table, bytes], tuple[int, int]] = {}

    def add(self, table: Table, key: bytes, now_ms: int) -> None:
        """An entry of an index could not be acted on."""
        failures, _ = self._entries.pop((table, key), (0, 0))
        pause_ms = min(PAUSE_MS_MIN << min(failures, 20), PAUSE_MS_MAX)
        self._entries[table, key] = (failures + 1, now_ms + pause_ms)
        if len(self._entries) > ENTRIES_MAX:
            del self._entries[next(iter(self._entries))]

    def discard(self, table: Table, key: bytes) -> None:
        """An entry was acted on after all."""
        self._entries.pop((table, key), None)

    def forget_old(self, now_ms: int) -> None:
        """Forget entries that sweeps have not found again since: they were removed meanwhile."""
        forgotten = [
            entry for entry, (_, end_ms) in self._entries.items() if end_ms + PAUSE_MS_MAX < now_ms
        ]
        for entry in forgotten:
            del self._entries[entry]

    @property
    def detail(self) -> str:
        """How many there are and the key of the first, for operators; "" for none."""
        for table, key in self._entries:
            return f"{len(self._entries)} left out, first {key.hex()} of {table.value}"
        return ""

    def includes(self, table: Table, key: bytes, now_ms: int) -> bool:
        """Whether sweeps pass over an entry at that time."""
        entry = self._entries.get((table, key))
        return entry is not None and now_ms < entry[1]
