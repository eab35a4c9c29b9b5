"""The terminal: one rich console per stream, created on first use."""

from functools import cache

from rich.console import Console


@cache
def console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)
