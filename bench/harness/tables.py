"""Prints a finished run: a table per measurement, the bars, the machine."""

from rich.console import Console
from rich.table import Table

from bench.harness.benchmark import Bar, Bench, Result
from bench.harness.figures import Figure


def show(bench: Bench, console: Console) -> None:
    facts = bench.report()
    console.print(f"[bold]{bench.name}[/bold]", _line(facts["settings"]))
    console.print(_line(facts["machine"]), style="dim")
    console.print(_line(facts["versions"]), style="dim")
    for results in bench.tables:
        console.print(_figures(results))
    if bench.bars:
        console.print(_bars(bench.bars))


def _figures(results: list[Result]) -> Table:
    names = list(dict.fromkeys(name for result in results for name in result.figures))
    table = Table("variant", title="median ± spread of the rounds", title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    for result in results:
        figures = result.figures
        table.add_row(result.name, *(_cell(figures.get(name)) for name in names))
    return table


def _bars(bars: list[Bar]) -> Table:
    table = Table("bar", "value", "limit", "holds")
    for bar in bars:
        sign = "≥" if bar.at_least else "≤"
        holds = "[green]yes[/green]" if bar.holds else "[bold red]NO[/bold red]"
        table.add_row(bar.name, number(bar.value), f"{sign} {number(bar.limit)}", holds)
    return table


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    if len(figure.rounds) == 1:
        return number(figure.median)
    return f"{number(figure.median)} ± {number(figure.spread)}"


def number(value: float) -> str:
    """Three significant digits, and all digits before the decimal point."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _line(facts: object) -> str:
    assert isinstance(facts, dict)
    return ", ".join(f"{name} {value}" for name, value in facts.items())
