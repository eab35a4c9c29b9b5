"""The terminal: one rich console per stream, made when it is first needed."""

from functools import cache

from rich.console import Console


@cache
def console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)
