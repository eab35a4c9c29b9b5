"""The figures of commits: one measurement for all that become durable together."""

from storage_svc.partition.commit_figures import CommitFigure, CommitFigures
from storage_svc.turns import give_way
from tidemark.clock import ManualClock


async def test_commits_that_end_in_one_turn_are_one_measurement() -> None:
    """C7: a commit of the node is measured once, however many partitions take part."""
    recorded: list[CommitFigure] = []
    clock = ManualClock()
    began_ns = clock.monotonic_ns()
    figures = CommitFigures(clock, recorded.append)
    await clock.advance_ms(5)

    figures.add(began_ns + 2_000_000, 3, 100)
    figures.add(began_ns, 1, 10)
    figures.add(began_ns + 3_000_000, 2, 1)
    await give_way()

    assert recorded == [CommitFigure(duration_ns=5_000_000, operations=6, written_bytes=111)]


async def test_commits_of_different_turns_are_measured_apart() -> None:
    recorded: list[CommitFigure] = []
    clock = ManualClock()
    figures = CommitFigures(clock, recorded.append)

    figures.add(clock.monotonic_ns() - 20, 3, 100)
    await give_way()
    figures.add(clock.monotonic_ns() - 50, 1, 10)
    await give_way()

    assert recorded == [CommitFigure(20, 3, 100), CommitFigure(50, 1, 10)]
