"""Options that several commands share, and how they are parsed.

Imports only typer and pure modules, because every `--help` imports it and must stay quick.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from tidemark.cli.display import units

T = TypeVar("T")


def parser_of(parse: Callable[[str], T]) -> Callable[[Any], T]:
    """A parser of an option that reports invalid text as a usage error."""

    def read(text: Any) -> T:
        if not isinstance(text, str):
            return text  # type: ignore[no-any-return]  # typer passes defaults through
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


def moment_ms(option: str, text: str | None, now_ms: int) -> int | None:
    """The time that an option names, absolute or as a time ago; None without the option."""
    if text is None:
        return None
    try:
        return units.parse_moment_ms(text, now_ms)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"{text!r} is not KEY=VALUE")
    return key, value


duration_ms = parser_of(units.parse_duration_ms)
duration_s = parser_of(units.parse_duration_s)
size_bytes = parser_of(units.parse_size_bytes)

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", help="Name of the topic.")]
QueueName = Annotated[
    str, typer.Argument(metavar="QUEUE", help="Name of the queue: TOPIC or TOPIC/LITE.")
]
PartitionNumber = Annotated[
    int, typer.Argument(metavar="PARTITION", min=0, help="Number of the partition.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Limit = Annotated[int, typer.Option(min=0, help="Maximum number; 0 for all.")]
StorageAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Storage address; overrides TIDEMARK_STORAGE_ADDRESSES."
    ),
]
LifecycleAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="Lifecycle address; overrides TIDEMARK_LIFECYCLE_ADDRESS."
    ),
]
JobsAddress = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Scheduler address; overrides TIDEMARK_JOBS_ADDRESS."),
]


def confirm(question: str, yes: bool) -> None:
    """Return if the user confirms; without a terminal, `--yes` is required."""
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise typer.BadParameter("no terminal to confirm on; pass --yes")
    from tidemark.cli.interrupts import immediate

    with immediate():
        agreed = typer.confirm(question, err=True)
    if not agreed:
        typer.echo("Nothing was changed.", err=True)
        raise typer.Exit(1)
