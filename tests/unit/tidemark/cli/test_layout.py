"""Tables: which columns stay, what is cut, and that nothing is ever wrapped."""

import pytest
from rich.cells import cell_len

from tidemark.cli.display.layout import Column, Layout

COLUMNS = (
    Column("QUEUE", cut=True),
    Column("MESSAGES", right=True),
    Column("BYTES", right=True, importance=2),
    Column("OLDEST", right=True, importance=1),
)
ROW = ("orders/" + "x" * 40, "1,000,000", "10 MiB", "3m12s")


def lines(width: int | None, *rows: tuple[str, ...]) -> list[str]:
    layout = Layout(COLUMNS, rows, width)
    return [layout.header, *map(layout.line, rows)]


def test_without_a_width_everything_is_whole() -> None:
    assert lines(None, ROW) == [
        "QUEUE                                             MESSAGES   BYTES  OLDEST",
        f"{ROW[0]}  1,000,000  10 MiB   3m12s",
    ]


@pytest.mark.parametrize("width", [20, 30, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert all(cell_len(line) <= width for line in lines(width, ROW, ("a", "1", "2 B", "-")))


def test_names_are_cut_before_columns_are_lost() -> None:
    header, row = lines(60, ROW)

    assert header.split() == ["QUEUE", "MESSAGES", "BYTES", "OLDEST"]
    assert "…" in row
    assert row.endswith("1,000,000  10 MiB   3m12s")


def test_the_least_important_column_leaves_first() -> None:
    header, row = lines(44, ROW)

    assert header.split() == ["QUEUE", "MESSAGES", "OLDEST"]
    assert "1,000,000" in row


def test_wide_characters_count_for_what_they_take() -> None:
    wide = ("orders/" + "鯨" * 40, "1", "2 B", "-")

    assert all(cell_len(line) <= 60 for line in lines(60, wide))


def test_later_rows_keep_to_the_widths_of_the_first() -> None:
    layout = Layout(COLUMNS, [("a", "1", "2 B", "-")], 40)

    later = layout.line(("b" * 100, "1,000,000,000", "2 B", "-"))

    assert cell_len(later) <= 40


def test_a_table_without_rows_is_its_header() -> None:
    assert lines(80) == ["QUEUE  MESSAGES  BYTES  OLDEST"]
