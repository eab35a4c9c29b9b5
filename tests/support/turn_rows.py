"""Counts the rows that one turn of the event loop reads from the engine, or writes to a batch."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from storage_svc.engines.engine import Batch
from storage_svc.engines.node_database import NodeDatabase


class TurnRows:
    """The rows of the turn with the most of them; the engine of this process is the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._now = 0
        rows, load = NodeDatabase.rows, NodeDatabase.load

        def counted_rows(database: NodeDatabase, *where: Any, **how: Any) -> Any:
            return self._count(rows(database, *where, **how))

        def counted_load(database: NodeDatabase, *where: Any) -> Any:
            return self._count(load(database, *where))

        monkeypatch.setattr(NodeDatabase, "rows", counted_rows)
        monkeypatch.setattr(NodeDatabase, "load", counted_load)
        for change in ("put", "delete", "delete_all"):
            monkeypatch.setattr(Batch, change, self._counting(getattr(Batch, change)))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """From here on, until the end of the block."""
        selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
        select = selector.select

        def begin_turn(timeout: float | None = None) -> Any:
            self._now = 0
            return select(timeout)

        self.most = self._now = 0
        selector.select = begin_turn
        try:
            yield
        finally:
            del selector.select

    def _count(self, found: Sequence[Any]) -> Sequence[Any]:
        self._add(len(found))
        return found

    def _add(self, rows: int) -> None:
        self._now += rows
        self.most = max(self.most, self._now)

    def _counting(self, change: Any) -> Any:
        def counted(batch: Batch, *what: Any) -> None:
            before = len(batch)
            change(batch, *what)
            self._add(len(batch) - before)

        return counted
