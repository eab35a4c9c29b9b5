"""Where the repository is: for what tests read of it, and where they start its programs."""

import ast
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def documented_metrics() -> list[str]:
    """The names of metrics in the tables of the operations manual."""
    text = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(tidemark\.[a-z_.]+)` \|", text, re.MULTILINE)


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    source = path.read_text(encoding="utf-8")
    with without_collection():
        return ast.parse(source)


@contextmanager
def without_collection() -> Iterator[None]:
    """For what parses sources: a garbage collection meanwhile may log the traceback of a task that
    another test has left. Python 3.11 parses source lines to do so, and the outer parser fails with
    SystemError."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
