"""`tidemark up`: the options of the command; `tidemark.cli.supervisor` runs the cluster."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tidemark.limits import PARTITIONS_DEFAULT, PARTITIONS_MAX

Port = Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 picks a free one.")]


class Engine(StrEnum):
    """The engines of storage."""

    ROCKSDB = "rocksdb"
    REDIS = "redis"


NODES_MAX = 9
"""Their ports follow each other, and those of another kind of service come ten later."""


def up(
    context: typer.Context,
    data_dir: Annotated[
        Path,
        typer.Option(
            envvar="TIDEMARK_STORAGE_DATA_DIR",
            file_okay=False,
            help="Data directory; created if missing.",
        ),
    ] = Path("tidemark-data"),
    partitions: Annotated[
        int | None,
        typer.Option(
            envvar="TIDEMARK_PARTITIONS",
            min=0,
            max=PARTITIONS_MAX,
            show_default=f"as in the data, {PARTITIONS_DEFAULT} for new data",
            help="Number of partitions, fixed once data is stored.",
        ),
    ] = None,
    brokers: Annotated[
        int,
        typer.Option(
            min=1,
            max=NODES_MAX,
            help="Number of brokers. Those after the first use the next ports.",
        ),
    ] = 1,
    registry: Annotated[
        str,
        typer.Option(
            envvar="TIDEMARK_REGISTRY_URL",
            metavar="URL",
            show_default="members are static",
            help="Redis or Valkey server in which brokers, and with --engine redis also storage "
            "nodes, share the partitions, with failover.",
        ),
    ] = "",
    storages: Annotated[
        int,
        typer.Option(
            min=1,
            max=NODES_MAX,
            help="Number of storage nodes. Those after the first use the next ports.",
        ),
    ] = 1,
    engine: Annotated[
        Engine,
        typer.Option(
            envvar="TIDEMARK_STORAGE_ENGINE",
            help="Where data is stored: in the data directory, or on Redis or Valkey.",
        ),
    ] = Engine.ROCKSDB,
    redis_url: Annotated[
        str,
        typer.Option(
            envvar="TIDEMARK_REDIS_URL",
            metavar="URL",
            show_default="a Valkey with its data in the data directory, for trying it",
            help="Servers of --engine redis.",
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    broker_port: Port = 7400,
    storage_port: Port = 7410,
    lifecycle_port: Port = 7420,
    retention_port: Port = 7430,
    retention: Annotated[
        bool, typer.Option(help="Run retention and eviction; needs PySpark and Java.")
    ] = True,
    retention_setup: Annotated[
        str,
        typer.Option(
            metavar="COMMAND",
            help="Command that installs PySpark and Java while the other services run.",
        ),
    ] = "",
    log_dir: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="logs in the data directory",
            help="Directory for the logs of the services.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print the logs of the services instead.")
    ] = False,
) -> None:
    """Run storage, broker, lifecycle and retention on this machine until Ctrl-C.

    Other settings come from the environment; see docs/CONFIG.md.
    """
    if verbose and log_dir is not None:
        raise typer.BadParameter("--log-dir and --verbose cannot be combined")

    # In the environment it may be meant for another program: given here, it is meant for this one.
    given = context.get_parameter_source("redis_url")
    if engine is not Engine.REDIS and given is not None and given.name == "COMMANDLINE":
        raise typer.BadParameter("--redis-url needs --engine redis")
    if engine is Engine.REDIS and storages > 1 and not registry:
        raise typer.BadParameter(
            "--engine redis with several --storages needs --registry: the nodes share the "
            "partitions through it"
        )

    from tidemark.cli.supervisor import Options, following_ports, run
    from tidemark.settings.variables import RegistryUrl

    try:
        registry_url = RegistryUrl().parse(registry) if registry else ""
    except ValueError:
        # Not shown: it may hold a password.
        raise typer.BadParameter(f"--registry must be {RegistryUrl().allowed}") from None

    raise typer.Exit(
        run(
            Options(
                data_dir=data_dir,
                partitions=partitions,
                host=host,
                ports={
                    **following_ports("broker", brokers, broker_port),
                    **following_ports("storage", storages, storage_port),
                    "lifecycle": lifecycle_port,
                    "retention": retention_port,
                },
                storages=storages,
                brokers=brokers,
                registry_url=registry_url,
                engine=engine,
                redis_url=redis_url,
                retention=retention,
                retention_setup=retention_setup,
                log_dir=None if verbose else log_dir or data_dir / "logs",
            )
        )
    )
