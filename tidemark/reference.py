"""Writes the reference pages docs/ERRORS.md and docs/CONFIG.md from the code they describe.

`python -m tidemark.reference` writes them, `--check` only says which are stale and exits with 1.
Never edit those pages by hand.
"""

import argparse
import ast
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tidemark import errors, limits
from tidemark.settings import SERVICES, ClientSettings
from tidemark.settings.variables import Variable

DOCS: Final = Path(__file__).resolve().parent.parent / "docs"

_GENERATED: Final = "<!-- Written by `python -m tidemark.reference`; change the code instead. -->"


class Limit(NamedTuple):
    """A constant of `tidemark.limits` as the documentation shows it."""

    name: str
    value: int
    doc: str


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tidemark.reference", description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which pages are stale")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the pages are")
    options = parser.parse_args(arguments)
    stale = [
        (path, text)
        for path, text in _pages(options.docs)
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path, text in stale:
        if options.check:
            print(f"{path.name} is stale: run `python -m tidemark.reference`", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.name}")
    return 1 if options.check and stale else 0


def _pages(docs: Path) -> Iterator[tuple[Path, str]]:
    yield docs / "ERRORS.md", errors_page()
    yield docs / "CONFIG.md", config_page()


# ----------------------------------------------------------------------------------------- errors


def errors_page() -> str:
    rows = [
        (
            f"`{error.reason}`",
            error.code.name,
            "no" if error.retry_after_ms is None else f"after {error.retry_after_ms} ms",
            *map(_sentence, errors.meaning_and_action(error)),
        )
        for error in errors.ALL
    ]
    return _page(
        "Errors",
        f"Every error carries a `google.rpc.ErrorInfo` with the domain `{errors.DOMAIN}` and one "
        "of these reasons. Where a retry helps, a `google.rpc.RetryInfo` says after how long. The "
        "Python client raises a class of `tidemark.errors` for each.",
        _table(("reason", "gRPC code", "retry", "meaning", "what to do"), rows),
    )


# ------------------------------------------------------------------------- settings and limits


def config_page() -> str:
    shared = _shared_variables()
    sections = [
        "Services are configured by environment variables alone. An empty variable counts as "
        "unset. A value that is not allowed stops the service at its start with one line and exit "
        "status 2; a variable that begins with `TIDEMARK_` and is not listed here is warned about.",
        "## All services",
        _variables_table(shared),
    ]
    for service in SERVICES:
        title = _one_line(service.__doc__ or "").rstrip(".")
        own = [variable for variable in service.variables() if variable not in shared]
        sections += [f"## {title}", _variables_table(own)]
    sections += [
        f"## {_one_line(ClientSettings.__doc__ or '').rstrip('.')}",
        _variables_table(ClientSettings.variables()),
        "## Limits",
        "Fixed in the code. Unless it says otherwise, input beyond a limit is refused with a "
        "reason and changes nothing.",
        _limits_table(),
    ]
    return _page("Configuration", *sections)


def _shared_variables() -> list[Variable[object]]:
    """What every service reads, in the order of the first."""
    first, *others = (list(service.variables()) for service in SERVICES)
    return [variable for variable in first if all(variable in other for other in others)]


def _variables_table(variables: Iterable[Variable[object]]) -> str:
    rows = [
        (f"`{variable.name}`", _default(variable.default), variable.kind.allowed, variable.doc)
        for variable in variables
    ]
    return _table(("variable", "default", "allowed", "meaning"), rows)


def _default(value: object) -> str:
    if value == "":
        return "(empty)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def all_limits() -> list[Limit]:
    """The public constants of `tidemark.limits`, each with the string below it."""
    body = ast.parse(inspect.getsource(limits)).body
    docs = [node.value if isinstance(node, ast.Expr) else None for node in body[1:]] + [None]
    found = []
    for node, doc in zip(body, docs, strict=True):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        name = node.target.id
        if name.startswith("_"):
            continue
        if not (isinstance(doc, ast.Constant) and isinstance(doc.value, str)):
            raise ValueError(f"limits.{name} has no string below it that describes it")
        found.append(Limit(name, getattr(limits, name), _one_line(doc.value)))
    return found


def _limits_table() -> str:
    rows = [(f"`{limit.name}`", _with_unit(limit), limit.doc) for limit in all_limits()]
    return _table(("limit", "value", "meaning"), rows)


def _with_unit(limit: Limit) -> str:
    """The number, its unit from the name, and a reading aid for large ones."""
    words = limit.name.split("_")
    if "BYTES" in words:
        return _readable(limit.value, "bytes", (("MiB", 1024 * 1024), ("KiB", 1024)))
    if "MS" in words:
        return _readable(limit.value, "ms", (("days", 86_400_000), ("hours", 3_600_000)))
    return f"{limit.value:,}"


def _readable(value: int, unit: str, larger: Iterable[tuple[str, int]]) -> str:
    for name, size in larger:
        if size <= value < 1024 * size and value % size == 0:
            return f"{value:,} {unit} ({value // size} {name})"
    return f"{value:,} {unit}"


# --------------------------------------------------------------------------------------- Markdown


def _page(title: str, *sections: str) -> str:
    return "\n\n".join((f"# {title}", _GENERATED, *sections)) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


if __name__ == "__main__":
    sys.exit(main())
