"""How the command line shows the progress of a pass."""

import asyncio

import pytest

from tidemark.cli.display import pass_progress
from tidemark.cli.display.pass_progress import describe, drawn, watched
from tidemark.client.admin.values import PassProgress

STARTING = PassProgress("STARTING_SPARK", 1_000, 0, 0)
PLANNING = PassProgress("RUNNING", 2_000, 4, 1)
APPLYING = PassProgress("RUNNING", 3_000, 8, 5, rows_planned=2_000, rows_applied=500)


def test_progress_shows_the_rows_of_the_plan_as_soon_as_it_is_made() -> None:
    """R11: planned, applied and left, with a bar; before that the tasks of Spark."""
    assert describe(STARTING) == drawn(STARTING) == "starting Spark"
    assert describe(PLANNING) == drawn(PLANNING) == "1 of 4 tasks done"
    assert describe(APPLYING) == "2,000 rows planned, 500 applied, 1,500 left"
    assert drawn(APPLYING) == "##........ 2,000 rows planned, 500 applied, 1,500 left"


async def test_without_a_terminal_each_change_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """R11."""
    monkeypatch.setattr(pass_progress, "ASK_MS", 1)
    reports = [STARTING, PLANNING, PLANNING, APPLYING]
    all_shown = asyncio.Event()

    async def work() -> str:
        await all_shown.wait()
        return "done"

    async def ask() -> PassProgress | None:
        if not reports:
            all_shown.set()
            return None
        return reports.pop(0)

    done = await watched("retention", work(), ask)

    assert done == "done"
    assert capsys.readouterr().err.splitlines() == [
        "retention: starting Spark, after 1s",
        "retention: 1 of 4 tasks done, after 2s",
        "retention: 2,000 rows planned, 500 applied, 1,500 left, after 3s",
    ]
