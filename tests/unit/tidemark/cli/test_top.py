"""`tidemark top`: rates from two samples, and how they look on screens of any size."""

from dataclasses import replace

import pytest
from rich.cells import cell_len

from tidemark.cli.top.screen import Line, Screen
from tidemark.cli.top.view import History, Sample, view_of
from tidemark.client.admin.values import Fault, Partition, Sweeper

IDLE = Partition(
    partition=0,
    state="SERVING",
    faults=(),
    broker_id="broker-0",
    broker_address="127.0.0.1:7400",
    broker_epoch=1,
    storage_address="127.0.0.1:7410",
    queues=0,
    materialized_queues=0,
    messages=0,
    bytes=0,
    reservations=0,
    commits=0,
    published=0,
    delivered=0,
    acked=0,
    link_state="UP",
    link_detail="",
    paused_queues=0,
    paused_topics=0,
)
SWEEPER = Sweeper(0, "WAITING", 1, 2, 3, 3, 0, 5_000, 0, "")
CLOCK = "2026-01-31 12:00:00 UTC"


def sample(
    at_ms: int, *partitions: Partition, sweepers: dict[int, Sweeper] | None = None
) -> Sample:
    return Sample(at_ms, partitions, sweepers or {})


def test_rates_are_differences_by_the_time_between_the_samples() -> None:
    before = sample(1_000, replace(IDLE, published=100, delivered=50, acked=40, commits=7))
    after = sample(3_000, replace(IDLE, published=300, delivered=60, acked=40, commits=11))

    rates = view_of(before, after).rates

    assert (rates.published, rates.delivered, rates.acked, rates.commits) == (100, 5, 0, 2)


def test_a_first_sample_has_figures_and_no_rates() -> None:
    view = view_of(None, sample(0, replace(IDLE, queues=10, materialized_queues=3, messages=7)))

    assert view.rates.published is None
    assert (view.queues, view.loaded, view.idle, view.messages) == (10, 3, 7, 7)


def test_a_counter_that_went_back_gives_no_rate() -> None:
    before = sample(0, replace(IDLE, commits=100, published=5))
    after = sample(1_000, replace(IDLE, commits=2, published=6))

    rates = view_of(before, after).rates

    assert (rates.commits, rates.published) == (None, 1)


def test_two_samples_of_one_moment_give_no_rate() -> None:
    assert view_of(sample(5, IDLE), sample(5, IDLE)).rates.published is None


def test_totals_go_over_partitions_and_new_ones_have_no_rate_yet() -> None:
    before = sample(0, IDLE)
    other = replace(IDLE, partition=1, published=50, messages=2, reservations=3, bytes=8)
    after = sample(1_000, replace(IDLE, published=10, messages=1), other)

    view = view_of(before, after)

    assert view.rates.published == 10
    assert (view.messages, view.reservations, view.bytes) == (3, 3, 8)
    assert view.partitions[1].rates.published is None


def test_bars_grow_from_the_right_and_show_the_least_value() -> None:
    history = History(size_max=4)
    assert history.bars(4) == "    "
    for value in (None, 0, 1, 50, 100, 0):
        history.add(value)

    assert history.bars(4) == "▁▄█ "
    assert history.bars(2) == "█ "
    assert history.bars(6) == "  ▁▄█ "
    assert history.bars(0) == ""


def shown(
    width: int | None, height: int | None, *partitions: Partition, trouble: str = ""
) -> list[Line]:
    sweepers = {each.partition: replace(SWEEPER, partition=each.partition) for each in partitions}
    before = sample(0, *partitions, sweepers=sweepers)
    after = sample(1_000, *partitions, sweepers=sweepers)
    view = view_of(before, after)
    screen = Screen("127.0.0.1:7400")
    screen.add(view)
    return screen.lines(view, width, height, clock=CLOCK, trouble=trouble)


MILLION = replace(
    IDLE,
    queues=250_000,
    materialized_queues=1,
    messages=123_456_789,
    bytes=9 * 1024**3,
    reservations=100_000,
)


@pytest.mark.parametrize(("width", "height"), [(40, 15), (80, 24), (200, 50)])
def test_a_million_queues_fit_every_screen(width: int, height: int) -> None:
    partitions = [replace(MILLION, partition=number) for number in range(64)]

    lines = shown(width, height, *partitions)

    assert len(lines) <= height
    assert all(cell_len(line.text) <= width for line in lines)
    text = "\n".join(line.text for line in lines)
    assert "16,000,000" in text
    assert "█░" in text, "64 loaded queues in 16 million are still seen"
    assert ("more partitions" in text) == (height < 64)


def test_wide_screens_show_more_columns() -> None:
    narrow = "\n".join(line.text for line in shown(80, 24, MILLION))
    wide = "\n".join(line.text for line in shown(200, 24, MILLION))

    assert "COMMITS/S" not in narrow
    assert "COMMITS/S" in wide
    assert "BROKER" in wide


def test_a_partition_that_does_not_serve_comes_first_and_in_red() -> None:
    broken = replace(
        IDLE, partition=9, state="FAULTY", faults=(Fault("COMMIT_FAILED", "no space", 1),)
    )

    lines = shown(80, 24, IDLE, broken)

    header = next(at for at, line in enumerate(lines) if line.text.startswith("PARTITION"))
    assert "COMMIT_FAILED" in lines[header + 1].text
    assert lines[header + 1].style == "red"
    assert "1/2 partitions serving" in lines[0].text
    assert lines[0].style == "bold red"


def test_trouble_is_shown_below_the_last_figures() -> None:
    lines = shown(80, 24, IDLE, trouble="UNAVAILABLE: the broker is gone")

    assert lines[-1] == Line("UNAVAILABLE: the broker is gone", "bold red")


def test_sweeps_that_are_not_known_say_why() -> None:
    view = view_of(None, Sample(0, (IDLE,), {}, "UNIMPLEMENTED at 127.0.0.1:7420"))

    lines = Screen("x:1").lines(view, 80, 24, clock=CLOCK)

    assert "sweeps      unknown               UNIMPLEMENTED at 127.0.0.1:7420" in [
        line.text for line in lines
    ]
