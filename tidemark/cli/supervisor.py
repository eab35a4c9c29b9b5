"""Runs a cluster for `tidemark up`: checks, starts and stops it, and prints where it is.

The first Ctrl-C, SIGTERM or SIGHUP stops the services in order, the second kills them. A service
that ends by itself is restarted. If it fails too often, the others are stopped, except for
retention, which is optional and starts later, because it may have to be installed. Exit codes: 0
after a clean stop, 2 for problems that the user can fix (a port, a directory, a setting), 1 for
all others.
"""

import asyncio
import errno
import fcntl
import importlib
import os
import shutil
import signal
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import typer

from tidemark.clock import Clock, SystemClock
from tidemark.errors import RegistryUnavailable
from tidemark.local.cluster import LocalCluster, ServiceName, Stopped, kind_of, names_of
from tidemark.local.java import why_no_spark
from tidemark.local.ports import join_address, listening_socket
from tidemark.local.restarts import GaveUp, ServiceKeeper
from tidemark.local.service_process import ServiceFailed
from tidemark.local.setup import SetupFailed, run_setup
from tidemark.local.valkey import LocalValkey, NoValkey, running_valkey
from tidemark.settings import ClientSettings, RetentionSettings, StorageSettings
from tidemark.settings.variables import SettingsError

CLEAN: Final = 0
FAILED: Final = 1
REFUSED: Final = 2

_STOP_SLACK_MS: Final = 2_000
"""Time to close its data that a service gets beyond its grace period for open calls."""

_DATA: Final = {"rocksdb": "node", "redis": "valkey"}
"""The directories in which engines have their data, below that of the cluster."""

T = TypeVar("T")


class Refusal(Exception):
    """Nothing was started, for a reason that the user can fix. The text is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the command."""

    data_dir: Path
    partitions: int | None
    host: str
    ports: Mapping[ServiceName, int]
    log_dir: Path | None
    """None shows logs on stderr."""
    storages: int = 1
    brokers: int = 1
    registry_url: str = ""
    """Where brokers find each other; empty: they are static."""
    engine: str = "rocksdb"
    redis_url: str = ""
    """Servers of the engine redis; empty: a Valkey is started for it."""
    retention: bool = True
    retention_setup: str = ""
    """A shell command that installs PySpark and Java; empty to install nothing."""


def run(options: Options) -> int:
    """Run a cluster until it is stopped or fails; returns the exit code."""
    try:
        settings = RetentionSettings.from_environment()
        no_retention = _why_no_retention(options, settings)
        _check_durability(options)
        ports = {
            name: port
            for name, port in options.ports.items()
            if name != "retention" or not no_retention
        }
        with _locked(options.data_dir), ExitStack() as beside:
            _check_ports(options.host, ports)
            _check_engine(options)
            valkey = _valkey_beside(options, beside)
            cluster = LocalCluster(
                options.data_dir,
                host=options.host,
                ports=ports,
                partitions=options.partitions,
                log_dir=options.log_dir,
                stop_timeout_ms=settings.shutdown_grace_ms + _STOP_SLACK_MS,
                retention=not no_retention,
                storages=options.storages,
                brokers=options.brokers,
                registry_url=options.registry_url,
                environment={"storage": _engine_variables(options, valkey)},
            )
            clock = SystemClock()
            living = _live(cluster, options, valkey, no_retention, settings.java_home, clock)
            return asyncio.run(_supervise(cluster, living))
    except (Refusal, SettingsError, NoValkey) as refusal:
        _print_error(str(refusal))
        return REFUSED


def _check_durability(options: Options) -> None:
    """Refuse to expect a replica of the Valkey that is started: all partitions would be FAULTY."""
    if options.engine != "redis" or options.redis_url:
        return
    if StorageSettings.value_of("redis_durability") == "replicated":
        raise Refusal(
            "TIDEMARK_REDIS_DURABILITY=replicated needs --redis-url: the Valkey that is started "
            "otherwise has no replica"
        )


def _check_engine(options: Options) -> None:
    """Refuse the data directory of another engine: the cluster would be an empty one."""
    own = options.data_dir / _DATA[options.engine]
    for engine, name in _DATA.items():
        if (options.data_dir / name).exists() and not own.exists() and not options.redis_url:
            raise Refusal(
                f"data directory {options.data_dir} has the data of --engine {engine}, "
                f"and none of --engine {options.engine}"
            )


def _valkey_beside(options: Options, beside: ExitStack) -> LocalValkey | None:
    """Start a Valkey where the engine needs one that is not named."""
    if options.engine != "redis" or options.redis_url:
        return None
    log_file = None if options.log_dir is None else options.log_dir / "valkey.log"
    return beside.enter_context(running_valkey(options.data_dir / _DATA["redis"], log_file))


def _engine_variables(options: Options, valkey: LocalValkey | None) -> dict[str, str]:
    """The engine of storage."""
    if options.engine != "redis":
        return {"TIDEMARK_STORAGE_ENGINE": options.engine}
    url = options.redis_url if valkey is None else valkey.url
    return {"TIDEMARK_STORAGE_ENGINE": "redis", "TIDEMARK_REDIS_URL": url}


def _why_no_retention(options: Options, settings: RetentionSettings) -> str:
    """Why retention does not run; empty if it does, or will once it is installed."""
    if not options.retention:
        return "--no-retention"
    return "" if options.retention_setup else why_no_spark(settings.java_home)


def following_ports(kind: str, count: int, first: int) -> dict[ServiceName, int]:
    """The ports of several services of a kind: one after the other, or all of them free ones."""
    return {name: first + place if first else 0 for place, name in enumerate(names_of(kind, count))}


async def _supervise(cluster: LocalCluster, living: Coroutine[Any, Any, NoReturn]) -> int:
    signals = _StopSignals()
    exit_code = FAILED
    try:
        await signals.interrupt(living)
        _print("Stopping ...")
        exit_code = CLEAN
    except Refusal as refusal:
        _print_error(str(refusal))
        exit_code = REFUSED
    except ServiceFailed as failure:
        _print_error(f"{failure}; stopping the others")
    except GaveUp as gave_up:
        _print_error(f"{gave_up}: giving up, stopping the others")
    finally:
        stopped = await signals.interrupt(cluster.stop())
    if stopped is None:
        _print_error("second signal: killed the remaining services")
        return FAILED
    if not _report(stopped) and exit_code == CLEAN:
        return FAILED
    return exit_code


async def _live(
    cluster: LocalCluster,
    options: Options,
    valkey: LocalValkey | None,
    no_retention: str,
    java_home: str,
    clock: Clock,
) -> NoReturn:
    """Start and run; ends only by an exception."""
    begin_ms = clock.monotonic_ms()
    if options.registry_url:
        await _check_registry(options.registry_url)
    try:
        await cluster.start([name for name in cluster.services if name != "retention"])
    except OSError as error:
        raise Refusal(str(error)) from None
    except ServiceFailed as failure:
        if failure.exit_code == REFUSED:  # the service itself found such a reason
            raise Refusal(str(failure)) from None
        # Others become healthy only once storage has its data, and cannot know why it has not.
        if why := cluster.last_error("storage"):
            raise ServiceFailed(f"{failure} (storage: {why})", failure.exit_code) from None
        raise
    took_ms = clock.monotonic_ms() - begin_ms
    _print_ready(cluster, "" if valkey is None else valkey.url, no_retention, took_ms)
    storage = ServiceKeeper(cluster, "storage", clock, _print_error)
    others = [
        ServiceKeeper(
            cluster,
            name,
            clock,
            _print_error,
            after=None if kind_of(name) == "storage" else storage,
        )
        for name in cluster.services
        if name not in ("storage", "retention")
    ]
    work: list[Coroutine[Any, Any, None]] = [keeper.keep() for keeper in (storage, *others)]
    if valkey is not None:
        work.append(valkey.keep(clock, _print_error))
    if not no_retention:
        keeper = ServiceKeeper(cluster, "retention", clock, _print_error, after=storage)
        work.append(_run_retention(keeper, options.retention_setup, java_home, clock))
    await _all(work)
    raise AssertionError("services are kept until one of them is given up")


async def _run_retention(keeper: ServiceKeeper, setup: str, java_home: str, clock: Clock) -> None:
    """Install and run retention. The other services continue if it fails."""
    begin_ms = clock.monotonic_ms()
    try:
        if setup:
            await run_setup(setup, lambda line: _print(f"retention: {line}"))
            importlib.invalidate_caches()
            missing = await asyncio.to_thread(why_no_spark, java_home)
            if missing:
                raise SetupFailed(missing)
        await keeper.start()
        took_ms = clock.monotonic_ms() - begin_ms
        _print(f"retention is ready ({took_ms / 1000:.1f} s)")
        await keeper.keep()
    except (GaveUp, SetupFailed) as failure:
        _print_error(f"{failure}: retention stays off, the other services continue")


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first failure cancels the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _StopSignals:
    """Lets a signal end the current wait, one signal at a time."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[signal.Signals] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) != signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(each, self._received.put_nowait, each)

    async def interrupt(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work; None if a signal cancelled it."""
        working = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._received.get())
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        working.cancel()
        await asyncio.wait({working})
        return None if working.cancelled() else working.result()


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Lock the directory against a second `tidemark up` while this process runs."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = (data_dir / "up.lock").open("a+")
    except OSError as error:
        raise Refusal(f"cannot use data directory {data_dir}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise Refusal(
                f"data directory {data_dir} is in use by another `tidemark up`, "
                f"process {lock.read().strip() or 'unknown'}"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _check_ports(host: str, ports: Mapping[ServiceName, int]) -> None:
    """Find ports in use before any service is started."""
    with ExitStack() as held:  # held together, to detect two services with one port
        for name, port in ports.items():
            try:
                held.enter_context(listening_socket(host, port))
            except OSError as error:
                reason = str(error.strerror).partition(" (")[0]  # Python adds the address
                if error.errno == errno.EADDRINUSE:
                    reason = "already in use"
                address = join_address(host, port)
                hint = f"(see --host, --{kind_of(name)}-port)"
                raise Refusal(f"{name} cannot listen on {address}: {reason} {hint}") from None


async def _check_registry(url: str) -> None:
    """A broker waits for its registry; people who start a cluster want to know at once."""
    from tidemark.registry.redis_registry import RedisRegistry

    registry = RedisRegistry(url, cluster_id="", kind="")
    try:
        await registry.check()
    except RegistryUnavailable as error:
        raise Refusal(f"{error.detail} (see --registry)") from None
    finally:
        await registry.close()


def _print_ready(cluster: LocalCluster, own_valkey: str, no_retention: str, took_ms: int) -> None:
    broker = cluster.address("broker")
    default = broker == ClientSettings().address
    facts = [
        (kind, " ".join(cluster.address(each) for each in cluster.services_of(kind)))
        for kind in ("broker", "storage", "lifecycle")
    ]
    if no_retention:
        facts.append(("retention", f"off: {no_retention}"))
    else:
        facts.append(("retention", f"{cluster.address('retention')} (starting)"))
    if own_valkey:
        facts.append(("valkey", own_valkey))
    facts.append(("data", str(cluster.data_dir.resolve())))
    if cluster.log_dir is not None:
        facts.append(("logs", str(cluster.log_dir.resolve())))
    facts += [
        ("Python", f'tidemark.connect("{broker}")'),
        ("shell", f"{_program()} top" + ("" if default else f" --address {broker}")),
        ("gRPC", f"grpcurl -plaintext {broker} list"),
        ("stop", f"Ctrl-C, or kill {os.getpid()}"),
    ]
    _print(typer.style(f"Tidemark is ready ({took_ms / 1000:.1f} s)", bold=True, fg="green"))
    for name, value in facts:
        _print(f"  {typer.style(f'{name:<10}', dim=True)} {value}")


def _program() -> str:
    """How to type the command `tidemark` here: the environment is often not on the PATH."""
    if shutil.which("tidemark") is not None:
        return "tidemark"
    return os.path.relpath(Path(sys.executable).parent / "tidemark")


def _report(stopped: Sequence[Stopped]) -> bool:
    """Print how the services stopped; returns whether all stopped cleanly."""
    clean = [each.name for each in stopped if each.clean]
    if clean:
        _print(f"Stopped {', '.join(clean)}.")
    for each in stopped:
        if each.exit_code == -signal.SIGKILL:
            _print_error(f"{each.name} did not stop in time and was killed")
        elif not each.clean:
            _print_error(f"{each.name} stopped with exit code {each.exit_code}")
    return len(clean) == len(stopped)


def _print(line: str) -> None:
    with suppress(OSError):  # the reader is gone; the cluster keeps running
        typer.echo(line)


def _print_error(line: str) -> None:
    with suppress(OSError):
        typer.echo(f"tidemark up: {line}", err=True)
