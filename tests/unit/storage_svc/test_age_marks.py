"""Marks of the index of ages: a row that is added while a mark is read is not skipped later."""

from typing import Any

import pytest

from storage_svc.engines.age_rows import AgeKind, age_key, age_value
from storage_svc.engines.engine import Row
from storage_svc.partition.age_marks import AgeMarks

WAITING = AgeKind.WAITING


class SlowReader:
    """Has read its rows, but not returned them, when something happens."""

    def __init__(self, rows: list[Row], meanwhile: Any) -> None:
        self._rows = rows
        self._meanwhile = meanwhile

    async def scan(self, *_: Any, **__: Any) -> list[Row]:
        rows = list(self._rows)
        await self._meanwhile()
        return rows


def row(time_ms: int) -> Row:
    return age_key(WAITING, "jobs", time_ms, 1), age_value([7])


@pytest.mark.parametrize(
    ("stored", "expected_ms"), [([], 50), ([row(80)], 50), ([row(20)], 20)], ids=str
)
async def test_a_row_added_while_the_mark_is_read_counts(
    stored: list[Row], expected_ms: int
) -> None:
    """P3: on a store in another process, a commit may end between the read and its answer."""
    marks = AgeMarks()

    async def commit() -> None:
        marks.added(WAITING, "jobs", 60)
        marks.added(WAITING, "jobs", 50)
        marks.added(WAITING, "other", 10)
        marks.added(AgeKind.SETTLED, "jobs", 10)

    first_ms = await marks.read(SlowReader(stored, commit), WAITING, "jobs")  # type: ignore[arg-type]

    assert first_ms == marks.known_ms(WAITING, "jobs") == expected_ms


async def test_two_reads_at_once_both_take_notice() -> None:
    """P3: also of a row that was added after the other one has ended."""
    marks = AgeMarks()

    async def nothing() -> None:
        pass

    async def other_read_and_commit() -> None:
        await marks.read(SlowReader([], nothing), WAITING, "jobs")  # type: ignore[arg-type]
        marks.added(WAITING, "jobs", 50)

    await marks.read(SlowReader([], other_read_and_commit), WAITING, "jobs")  # type: ignore[arg-type]

    assert marks.known_ms(WAITING, "jobs") == 50
