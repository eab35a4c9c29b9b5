"""The screen of `tidemark top`: a view as lines of text for a given size.

Pure. The head shows the whole cluster; below it is one line per partition, unhealthy ones first.
Partitions that do not fit are counted.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len, set_cell_size

from tidemark.cli.display import units
from tidemark.cli.display.layout import Column, Layout
from tidemark.cli.display.texts import printable
from tidemark.cli.top.view import History, PartitionView, View

_BAR_WIDTH_MAX: Final = 40
_LABEL_WIDTH: Final = 12
_FIGURES_WIDTH: Final = 22

COLUMNS: Final = (
    Column("PARTITION", right=True),
    Column("STATE"),
    Column("IN/S", right=True),
    Column("OUT/S", right=True),
    Column("ACK/S", right=True),
    Column("DEPTH", right=True),
    Column("BYTES", right=True, importance=3),
    Column("QUEUES", right=True),
    Column("LOADED", right=True),
    Column("RESERVED", right=True, importance=1),
    Column("COMMITS/S", right=True, importance=4),
    Column("SWEEP", importance=2),
    Column("FOUND", right=True, importance=5),
    Column("NEXT IN", right=True, importance=6),
    Column("BROKER", importance=7),
)


class Line(NamedTuple):
    """A line and its rich style."""

    text: str
    style: str = ""


class Screen:
    """Draws one view after the other and keeps rates for the small charts."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._flows = {name: History() for name in ("published", "delivered", "acked")}

    def add(self, view: View) -> None:
        for name, history in self._flows.items():
            history.add(getattr(view.rates, name))

    def lines(
        self, view: View, width: int | None, height: int | None, *, clock: str, trouble: str = ""
    ) -> list[Line]:
        """The lines of a screen; without a size, all of them."""
        lines = self._head(view, width or 100, clock)
        room = None if height is None else height - len(lines) - 2 - bool(trouble)
        lines += _table(view.partitions, width, room)
        if trouble:
            lines.append(Line(trouble, "bold red"))
        return [Line(_fit(line.text, width), line.style) for line in lines]

    def _head(self, view: View, width: int, clock: str) -> list[Line]:
        total = len(view.partitions)
        serving = f"{view.serving}/{total} partitions serving"
        chart = min(60, width - _LABEL_WIDTH - _FIGURES_WIDTH)
        share = _share(view, min(_BAR_WIDTH_MAX, width // 4))
        loaded = f"{units.short(view.loaded)} loaded, {units.short(view.idle)} idle"
        return [
            Line(f"tidemark top  {self._address}  {serving}  {clock}", _style(view)),
            Line(""),
            *(
                Line(_figures(name, f"{_rate(getattr(view.rates, name))}/s", history.bars(chart)))
                for name, history in self._flows.items()
            ),
            Line(_figures("commits", f"{_rate(view.rates.commits)}/s", "")),
            Line(
                _figures("depth", f"{units.short(view.messages)} messages", units.size(view.bytes))
            ),
            Line(_figures("reserved", units.count(view.reservations), "")),
            Line(_figures("queues", units.count(view.queues), f"{share}  {loaded}{_paused(view)}")),
            Line(_figures("sweeps", *_sweeps(view))),
            Line(""),
        ]


def _table(partitions: Sequence[PartitionView], width: int | None, room: int | None) -> list[Line]:
    ordered = sorted(partitions, key=lambda each: (each.healthy, each.partition.partition))
    shown = ordered if room is None or len(ordered) <= room else ordered[: max(0, room - 1)]
    rows = [_row(each) for each in shown]
    layout = Layout(COLUMNS, rows, width)
    lines = [Line(layout.header, "bold")]
    for each, row in zip(shown, rows, strict=True):
        lines.append(Line(layout.line(row), "" if each.healthy else "red"))
    if len(shown) < len(ordered):
        lines.append(Line(f"... and {len(ordered) - len(shown)} more partitions", "dim"))
    return lines


def _row(view: PartitionView) -> tuple[str, ...]:
    partition, sweeper = view.partition, view.sweeper
    faults = ",".join(fault.reason for fault in partition.faults)
    return (
        str(partition.partition),
        faults or partition.state,
        _rate(view.rates.published),
        _rate(view.rates.delivered),
        _rate(view.rates.acked),
        units.short(partition.messages),
        units.size(partition.bytes),
        units.short(partition.queues),
        units.short(partition.materialized_queues),
        units.short(partition.reservations),
        _rate(view.rates.commits),
        sweeper.state if sweeper else "-",
        units.short(sweeper.last_found) if sweeper else "-",
        units.duration(sweeper.next_in_ms) if sweeper else "-",
        partition.broker_id or "-",
    )


def _paused(view: View) -> str:
    paused = [
        units.counted(number, noun)
        for number, noun in ((view.paused_topics, "topic"), (view.paused_queues, "queue"))
        if number
    ]
    return f"  paused: {', '.join(paused)}" if paused else ""


def _sweeps(view: View) -> tuple[str, str]:
    if view.sweeps_unknown:
        return "unknown", printable(view.sweeps_unknown)
    sweepers = [each.sweeper for each in view.partitions if each.sweeper is not None]
    failing = sum(each.failures > 0 for each in sweepers)
    if not sweepers:
        return "none", ""
    soonest = min(each.next_in_ms for each in sweepers)
    words = f"next in {units.duration(soonest)}"
    return f"{len(sweepers)} sweepers", f"{failing} failing, {words}" if failing else words


def _figures(label: str, figure: str, more: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{figure:<{_FIGURES_WIDTH}}{more}".rstrip()


def _share(view: View, width: int) -> str:
    """A bar of loaded and idle queues; one loaded queue in a million is still visible."""
    full = -(-view.loaded * width // view.queues) if view.queues else 0
    return "█" * full + "░" * (width - full)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else units.short(rate)


def _style(view: View) -> str:
    return "bold" if view.serving == len(view.partitions) else "bold red"


def _fit(text: str, width: int | None) -> str:
    if width is None or cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…"
