"""`tidemark up`: the options of the command; running the cluster is `tidemark.cli.supervisor`'s."""

from pathlib import Path
from typing import Annotated

import typer

from tidemark.limits import PARTITIONS_MAX

Port = Annotated[int, typer.Option(min=0, max=65_535, help="Its port; 0 takes a free one.")]


def up(
    data_dir: Annotated[
        Path,
        typer.Option(
            envvar="TIDEMARK_STORAGE_DATA_DIR",
            file_okay=False,
            help="Where data is kept; created if it is missing.",
        ),
    ] = Path("tidemark-data"),
    partitions: Annotated[
        int | None,
        typer.Option(
            envvar="TIDEMARK_PARTITIONS",
            min=1,
            max=PARTITIONS_MAX,
            show_default="4",
            help="Number of partitions, fixed once data is stored.",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    broker_port: Port = 7400,
    storage_port: Port = 7410,
    lifecycle_port: Port = 7420,
    retention_port: Port = 7430,
    retention: Annotated[
        bool, typer.Option(help="Run retention and eviction, where PySpark and Java are there.")
    ] = True,
    retention_setup: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Installs PySpark and Java; the other services serve meanwhile.",
        ),
    ] = "",
    log_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="logs in the data directory",
            help="Where the services' logs go.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the services' logs here instead.")
    ] = False,
) -> None:
    """Run storage, broker, lifecycle and retention on this machine until Ctrl-C.

    Other settings of the services come from the environment, as in docs/CONFIG.md.
    """
    if verbose and log_dir is not None:
        raise typer.BadParameter("--log-dir and --verbose exclude each other")

    from tidemark.cli.supervisor import Options, run

    raise typer.Exit(
        run(
            Options(
                data_dir=data_dir,
                partitions=partitions,
                host=host,
                ports={
                    "broker": broker_port,
                    "storage": storage_port,
                    "lifecycle": lifecycle_port,
                    "retention": retention_port,
                },
                retention=retention,
                retention_setup=retention_setup,
                log_dir=None if verbose else log_dir or data_dir / "logs",
            )
        )
    )
