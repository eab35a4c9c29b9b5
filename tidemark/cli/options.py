"""Options that several commands share, and how their texts become values.

Only typer and pure modules are imported here: commands import this to describe themselves, and
`--help` must stay quick.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from tidemark.cli.display import units

T = TypeVar("T")


def reads(parse: Callable[[str], T]) -> Callable[[Any], T]:
    """A parser for an option: what it cannot read is an error of usage."""

    def read(text: Any) -> T:
        if not isinstance(text, str):
            return text  # type: ignore[no-any-return]  # typer hands defaults through
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is not KEY=VALUE")
    return key, value


duration_ms = reads(units.parse_duration_ms)
duration_s = reads(units.parse_duration_s)
size_bytes = reads(units.parse_size_bytes)

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
QueueName = Annotated[
    str, typer.Argument(metavar="QUEUE", help="Name of the queue: topic, or topic/lite.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Limit = Annotated[int, typer.Option(min=0, help="At most that many; 0 is all.")]
StorageAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Storage; else TIDEMARK_STORAGE_ADDRESS."),
]
LifecycleAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Lifecycle; else TIDEMARK_LIFECYCLE_ADDRESS."),
]
JobsAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="The job scheduler; else TIDEMARK_JOBS_ADDRESS."),
]


def confirm(question: str, yes: bool) -> None:
    """Return if the user agrees; where nobody can be asked, `--yes` is needed."""
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked here: say --yes")
    from tidemark.cli.interrupts import immediate

    with immediate():
        agreed = typer.confirm(question, err=True)
    if not agreed:
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
