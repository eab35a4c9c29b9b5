"""Charts as SVG text: bars and stacked columns, drawn for one self-contained page.

Pure: numbers in, text out. Colours come from the page's style, so that it follows the reader's
choice of light or dark; every mark carries its figure as a tooltip.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

WIDTH: Final = 720
_LABEL: Final = 190
_VALUE: Final = 90
_ROW: Final = 26
_HEIGHT: Final = 240
_FOOT: Final = 28
_SERIES: Final = 6
"""Colours in the style; further series share the last."""


def bars(values: Mapping[str, int], unit: str) -> str:
    """One horizontal bar per name, in the order given."""
    if not any(values.values()):
        return _nothing()
    most = max(values.values())
    room = WIDTH - _LABEL - _VALUE
    marks = []
    for row, (name, value) in enumerate(values.items()):
        y = row * _ROW
        length = round(room * value / most, 1)
        marks.append(
            f'<text class="name" x="{_LABEL - 8}" y="{y + 17}">{_short(name, 26)}</text>'
            f'<rect class="s0" x="{_LABEL}" y="{y + 4}" width="{length}" height="18" rx="3">'
            f"<title>{escape(name)}: {value:,} {unit}</title></rect>"
            f'<text x="{_LABEL + length + 6}" y="{y + 17}">{value:,}</text>'
        )
    return _svg(_ROW * len(values), marks)


def columns(values: Mapping[str, Mapping[str, int]], unit: str) -> str:
    """One stacked column per name, with a legend of the parts."""
    totals = {name: sum(parts.values()) for name, parts in values.items()}
    if not any(totals.values()):
        return _nothing()
    series = sorted({part for parts in values.values() for part in parts})
    most = max(totals.values())
    plot = _HEIGHT - _FOOT
    step = WIDTH / len(values)
    marks = []
    for at, (name, parts) in enumerate(values.items()):
        top = float(plot)
        left = round(at * step + step * 0.15, 1)
        for part in series:
            value = parts.get(part, 0)
            height = round((plot - 20) * value / most, 1)
            top -= height
            if height:
                marks.append(
                    f'<rect class="{_colour(series, part)}" x="{left}" y="{top:.1f}" '
                    f'width="{step * 0.7:.1f}" height="{height}">'
                    f"<title>{escape(name)}, {escape(part)}: {value:,} {unit}</title></rect>"
                )
        middle = round(at * step + step / 2, 1)
        marks.append(f'<text class="mid" x="{middle}" y="{_HEIGHT - 10}">{_short(name, 14)}</text>')
        marks.append(f'<text class="mid" x="{middle}" y="{top - 5:.1f}">{totals[name]:,}</text>')
    legend = "".join(
        f'<li><i class="{_colour(series, part)}"></i>{escape(part)}</li>' for part in series
    )
    return _svg(_HEIGHT, marks) + f'<ul class="legend">{legend}</ul>'


def _colour(series: Sequence[str], part: str) -> str:
    return f"s{min(series.index(part), _SERIES - 1)}"


def _svg(height: int, marks: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(marks)}</svg>'


def _nothing() -> str:
    return '<p class="nothing">Nothing yet.</p>'


def _short(text: str, characters_max: int) -> str:
    shown = text if len(text) <= characters_max else text[: characters_max - 1] + "…"
    return escape(shown)
