"""The frame of every command that calls a cluster: common options, channels, failures, exit.

`command` turns a coroutine function into a function that typer can register: it adds `--address`,
`--timeout` and `--json`, runs the coroutine, and reports a failure as one line and an exit code.
"""

import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from tidemark.cli.options import duration_ms
from tidemark.cli.streams import discard_stdout

if TYPE_CHECKING:
    import grpc

    from tidemark.cli.display.output import Output
    from tidemark.client.admin.admin import Admin
    from tidemark.settings import ClientSettings

TIMEOUT_MS: Final = 10_000

_COMMON: Final = (
    (
        "address",
        Annotated[
            str | None,
            typer.Option(
                metavar="HOST:PORT",
                show_default="127.0.0.1:7400",
                help="Broker address; overrides TIDEMARK_ADDRESS.",
            ),
        ],
        None,
    ),
    (
        "as_json",
        Annotated[bool, typer.Option("--json", help="Print JSON.")],
        False,
    ),
)

Command = Callable[..., Coroutine[Any, Any, None]]


class Refused(Exception):
    """The request was refused. The text is one line."""


class Call:
    """The context of a command: its output, its settings and its channels."""

    def __init__(
        self, settings: "ClientSettings", address: str, timeout_ms: int | None, out: "Output"
    ) -> None:
        self.settings = settings
        self.address = address
        self.timeout_ms = timeout_ms
        self.out = out
        self.peer = address
        """The address of the last channel, for the message when it does not answer."""
        self._channels: list[grpc.aio.Channel] = []

    @property
    def admin(self) -> "Admin":
        """The administrative calls of the broker."""
        from tidemark.client.admin.admin import Admin
        from tidemark.client.transport.repeater import Repeater

        channel = self.open(self.address)
        # A person who mistyped the address wants to know at once.
        return Admin(lambda: channel, Repeater(self.timeout_ms, while_unreachable=False))

    def open(self, address: str) -> "grpc.aio.Channel":
        """A channel that is closed when the command ends."""
        from tidemark.rpc.channel import open_channel

        self.peer = address
        self._channels.append(open_channel(address))
        return self._channels[-1]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


def command(*, timeout_ms: int | None = TIMEOUT_MS) -> Callable[[Command], Callable[..., None]]:
    """Make a typer command of a coroutine function whose first parameter is a `Call`."""

    def decorate(function: Command) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        def run(
            *, address: str | None, as_json: bool, timeout: int | None, **arguments: Any
        ) -> None:
            limit_ms = timeout_ms if timeout is None else timeout
            _run(function, arguments, address, limit_ms, as_json)

        parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        for name, annotation, default in (*_COMMON, _timeout_option(timeout_ms)):
            parameters.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
                )
            )
        run.__name__ = function.__name__
        run.__doc__ = function.__doc__
        run.__module__ = function.__module__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _timeout_option(default_ms: int | None) -> tuple[str, Any, None]:
    shown = "no limit" if default_ms is None else f"{default_ms // 1000}s"
    option = typer.Option(
        parser=duration_ms, metavar="DURATION", show_default=shown, help="Timeout of each call."
    )
    return "timeout", Annotated[int | None, option], None


def _run(
    function: Command,
    arguments: dict[str, Any],
    address: str | None,
    timeout_ms: int | None,
    as_json: bool,
) -> None:
    import sys

    from tidemark.cli import interrupts
    from tidemark.cli.display.output import Output
    from tidemark.cli.failures import ExitCode, exit_code_of, line_of
    from tidemark.errors import TidemarkError
    from tidemark.settings import ClientSettings
    from tidemark.settings.variables import SettingsError, split_address

    try:
        settings = ClientSettings.from_environment()
    except SettingsError as error:
        _fail(str(error), ExitCode.USAGE)
    if address is not None:
        try:
            split_address(address)
        except ValueError as error:
            raise typer.BadParameter(f"--address: {error}") from None
    call = Call(settings, address or settings.address, timeout_ms, Output(as_json=as_json))

    async def work() -> None:
        try:
            await function(call, **arguments)
        finally:
            await call.close()

    try:
        for value in arguments.values():
            if isinstance(value, str):
                value.encode()  # names; payloads come in lists and may be any bytes
        interrupts.run(work(), ExitCode.INTERRUPTED)
        sys.stdout.flush()
    except TidemarkError as error:
        _fail(line_of(error, call.peer), exit_code_of(error))
    except UnicodeEncodeError:
        _fail("an argument is not valid UTF-8", ExitCode.USAGE)
    except Refused as refusal:
        _fail(str(refusal), ExitCode.REFUSED)
    except KeyboardInterrupt:
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except BrokenPipeError:
        discard_stdout()
        raise typer.Exit(ExitCode.BROKEN_PIPE) from None


def _fail(line: str, code: int) -> NoReturn:
    _flush_stdout()
    typer.echo(f"tidemark: {line}", err=True)
    raise typer.Exit(code)


def _flush_stdout() -> None:
    """Flush output that precedes the failure."""
    import sys

    try:
        sys.stdout.flush()
    except OSError:
        discard_stdout()
