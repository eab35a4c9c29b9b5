"""The entry point of `tidemark`: registers the commands."""

import os
from typing import Annotated

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from tidemark import __version__
from tidemark.cli.commands import cluster, dead, group, outbox, partitions, queue, retention, topic
from tidemark.cli.commands.completion import completion
from tidemark.cli.commands.consume import consume
from tidemark.cli.commands.publish import publish
from tidemark.cli.commands.top import top
from tidemark.cli.commands.up import up
from tidemark.cli.streams import standard_streams

app = typer.Typer(
    name="tidemark",
    help="Tidemark: a message-queue cluster for very many, mostly idle queues.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help, in a third of the time
    pretty_exceptions_enable=False,  # an unexpected failure shows Python's own traceback
)
app.command()(up)
app.add_typer(topic.app, name="topic")
app.add_typer(queue.app, name="queue")
app.add_typer(group.app, name="group")
app.command()(publish)
app.command()(consume)
app.add_typer(dead.app, name="dead")
app.command()(dead.redrive)
app.add_typer(outbox.app, name="outbox")
app.add_typer(partitions.app, name="partitions")
app.add_typer(cluster.app, name="cluster")
app.command()(top)
app.add_typer(retention.app, name="retention")
app.command()(completion)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tidemark {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options before the command. Without it, typer would hide a single command's name."""


def main() -> None:
    # Before a command imports gRPC, which else writes to the terminal whenever a broker stops.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # noqa: TID251 - handed on, not read
    completion_init()  # answers shells that use the script of `tidemark completion`
    with standard_streams():
        app(prog_name="tidemark")


if __name__ == "__main__":
    main()
