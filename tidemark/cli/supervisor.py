"""Runs a cluster for `tidemark up`: checks, starts, says where it is, stops it when asked.

The first Ctrl-C, SIGTERM or SIGHUP stops the services in order, the second kills them. A service
that ends by itself is started again; one that is given up ends the others, except retention, which
also joins later: it may have to be installed. Exit codes: 0 after a clean stop, 2 for what the user
can put right (a port, a directory, a setting), 1 for the rest.
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
from tidemark.local.cluster import SERVICES, LocalCluster, ServiceName, Stopped
from tidemark.local.java import why_no_spark
from tidemark.local.ports import join_address, listening_socket
from tidemark.local.restarts import GaveUp, ServiceKeeper
from tidemark.local.service_process import ServiceFailed
from tidemark.local.setup import SetupFailed, run_setup
from tidemark.settings import ClientSettings, RetentionSettings
from tidemark.settings.variables import SettingsError

CLEAN: Final = 0
FAILED: Final = 1
REFUSED: Final = 2

_STOP_SLACK_MS: Final = 2_000
"""What a service gets beyond its grace for open calls, to close what it has open."""


T = TypeVar("T")


class Refusal(Exception):
    """Nothing was started, for a reason the user can put right. The text is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for."""

    data_dir: Path
    partitions: int | None
    host: str
    ports: Mapping[ServiceName, int]
    log_dir: Path | None
    """None shows logs on stderr."""
    retention: bool = True
    retention_setup: str = ""
    """A shell command that installs what retention needs; empty if that is not to be done."""


def run(options: Options) -> int:
    """Run a cluster until it is stopped or fails; the exit code."""
    try:
        settings = RetentionSettings.from_environment()
        no_retention = _why_no_retention(options, settings)
        ports = {
            name: port
            for name, port in options.ports.items()
            if name != "retention" or not no_retention
        }
        with _locked(options.data_dir):
            _check_ports(options.host, ports)
            cluster = LocalCluster(
                options.data_dir,
                host=options.host,
                ports=ports,
                partitions=options.partitions,
                log_dir=options.log_dir,
                stop_timeout_ms=settings.shutdown_grace_ms + _STOP_SLACK_MS,
                retention=not no_retention,
            )
            clock = SystemClock()
            living = _live(cluster, options, no_retention, settings.java_home, clock)
            return asyncio.run(_supervise(cluster, living))
    except (Refusal, SettingsError) as refusal:
        _complain(str(refusal))
        return REFUSED


def _why_no_retention(options: Options, settings: RetentionSettings) -> str:
    """Empty if retention runs, or will once it is installed."""
    if not options.retention:
        return "--no-retention"
    return "" if options.retention_setup else why_no_spark(settings.java_home)


async def _supervise(cluster: LocalCluster, living: Coroutine[Any, Any, NoReturn]) -> int:
    signals = _StopSignals()
    exit_code = FAILED
    try:
        await signals.interrupt(living)
        _say("Stopping ...")
        exit_code = CLEAN
    except Refusal as refusal:
        _complain(str(refusal))
        exit_code = REFUSED
    except ServiceFailed as failure:
        _complain(f"{failure}; stopping the others")
    except GaveUp as gave_up:
        _complain(f"{gave_up}: giving up, stopping the others")
    finally:
        stopped = await signals.interrupt(cluster.stop())
    if stopped is None:
        _complain("asked to stop a second time: killed what was left")
        return FAILED
    if not _report(stopped) and exit_code == CLEAN:
        return FAILED
    return exit_code


async def _live(
    cluster: LocalCluster, options: Options, no_retention: str, java_home: str, clock: Clock
) -> NoReturn:
    """Start and run; ends only by an exception that says why."""
    begin_ms = clock.monotonic_ms()
    try:
        await cluster.start(SERVICES)
    except OSError as error:
        raise Refusal(str(error)) from None
    except ServiceFailed as failure:
        if failure.exit_code == REFUSED:  # by the service itself, for the same kind of reasons
            raise Refusal(str(failure)) from None
        raise
    _say_ready(cluster, no_retention, clock.monotonic_ms() - begin_ms)
    storage = ServiceKeeper(cluster, "storage", clock, _complain)
    others = [
        ServiceKeeper(cluster, name, clock, _complain, after=storage)
        for name in SERVICES
        if name != "storage"
    ]
    work: list[Coroutine[Any, Any, None]] = [keeper.keep() for keeper in (storage, *others)]
    if not no_retention:
        keeper = ServiceKeeper(cluster, "retention", clock, _complain, after=storage)
        work.append(_run_retention(keeper, options.retention_setup, java_home, clock))
    await _all(work)
    raise AssertionError("services are kept until one of them is given up")


async def _run_retention(keeper: ServiceKeeper, setup: str, java_home: str, clock: Clock) -> None:
    """Install and run retention beside the other services, which go on whatever becomes of it."""
    begin_ms = clock.monotonic_ms()
    try:
        if setup:
            await run_setup(setup, lambda line: _say(f"retention: {line}"))
            importlib.invalidate_caches()
            missing = await asyncio.to_thread(why_no_spark, java_home)
            if missing:
                raise SetupFailed(missing)
        await keeper.start()
        took_ms = clock.monotonic_ms() - begin_ms
        _say(f"retention is ready ({took_ms / 1000:.1f} s)")
        await keeper.keep()
    except (GaveUp, SetupFailed) as failure:
        _complain(f"{failure}: retention stays off, the other services go on")


async def _all(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class _StopSignals:
    """Turns signals into the end of whatever is being waited for, one signal at a time."""

    def __init__(self) -> None:
        self._received: asyncio.Queue[signal.Signals] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) != signal.SIG_IGN:  # as nohup has it
                loop.add_signal_handler(each, self._received.put_nowait, each)

    async def interrupt(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work, or None if a signal came first and the work was cancelled."""
        working = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._received.get())
        await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        working.cancel()
        await asyncio.wait({working})
        return None if working.cancelled() else working.result()


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Keep a second `tidemark up` away from the directory for as long as this process lives."""
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
    """Refuse now what a service would refuse a second later, when others have started."""
    with ExitStack() as held:  # all at once, so that two services with one port are noticed
        for name, port in ports.items():
            try:
                held.enter_context(listening_socket(host, port))
            except OSError as error:
                reason = str(error.strerror).partition(" (")[0]  # Python adds the address
                if error.errno == errno.EADDRINUSE:
                    reason = "already in use"
                address = join_address(host, port)
                raise Refusal(
                    f"{name} cannot listen on {address}: {reason} (see --host, --{name}-port)"
                ) from None


def _say_ready(cluster: LocalCluster, no_retention: str, took_ms: int) -> None:
    broker = cluster.address("broker")
    default = broker == ClientSettings().address
    facts = [(name, cluster.address(name)) for name in ("broker", "storage", "lifecycle")]
    if no_retention:
        facts.append(("retention", f"off: {no_retention}"))
    else:
        facts.append(("retention", f"{cluster.address('retention')} (joins when it is ready)"))
    facts.append(("data", str(cluster.data_dir.resolve())))
    if cluster.log_dir is not None:
        facts.append(("logs", str(cluster.log_dir.resolve())))
    facts += [
        ("Python", f'tidemark.connect("{broker}")'),
        ("shell", f"{_program()} top" + ("" if default else f" --address {broker}")),
        ("gRPC", f"grpcurl -plaintext {broker} list"),
        ("stop", f"Ctrl-C, or kill {os.getpid()}"),
    ]
    _say(typer.style(f"Tidemark is ready ({took_ms / 1000:.1f} s)", bold=True, fg="green"))
    for name, value in facts:
        _say(f"  {typer.style(f'{name:<10}', dim=True)} {value}")


def _program() -> str:
    """The command `tidemark` as it can be typed here: often the environment is not on the PATH."""
    if shutil.which("tidemark") is not None:
        return "tidemark"
    return os.path.relpath(Path(sys.executable).parent / "tidemark")


def _report(stopped: Sequence[Stopped]) -> bool:
    """Say how the services ended; whether all did so cleanly."""
    clean = [each.name for each in stopped if each.clean]
    if clean:
        _say(f"Stopped {', '.join(clean)}.")
    for each in stopped:
        if each.exit_code == -signal.SIGKILL:
            _complain(f"{each.name} did not stop in time and was killed")
        elif not each.clean:
            _complain(f"{each.name} stopped with exit code {each.exit_code}")
    return len(clean) == len(stopped)


def _say(line: str) -> None:
    with suppress(OSError):  # nobody reads any more: no reason to let the cluster go
        typer.echo(line)


def _complain(line: str) -> None:
    with suppress(OSError):
        typer.echo(f"tidemark up: {line}", err=True)
