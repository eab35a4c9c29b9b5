"""`tidemark publish`: publishes arguments, lines of stdin or files, or whole files."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer

from tidemark.cli.command import Call, Refused, command
from tidemark.cli.display import units
from tidemark.cli.options import QueueName, duration_ms, key_value, parser_of


@command()
async def publish(
    call: Call,
    queue: QueueName,
    messages: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MESSAGE]...", help="Payloads; default: the lines of stdin."),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", metavar="PATH", help="Publish the lines of a file; - for stdin."
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Publish each file, or stdin, as one message.")
    ] = False,
    header: Annotated[
        list[str] | None,
        typer.Option(
            "--header",
            "-H",
            parser=parser_of(key_value),
            metavar="KEY=VALUE",
            help="Header of all messages; repeatable.",
        ),
    ] = None,
    key: Annotated[str, typer.Option(metavar="KEY", help="Fairness key.")] = "",
    delay: Annotated[
        int,
        typer.Option(parser=duration_ms, metavar="DURATION", help="Deliver after this delay."),
    ] = 0,
    ttl: Annotated[
        int,
        typer.Option(parser=duration_ms, metavar="DURATION", help="Time to live; 0 for no limit."),
    ] = 0,
) -> None:
    """Publish messages to a queue; each run is on disk before the next is sent.

    If it fails midway, it prints how many messages were stored.
    """
    from tidemark.cli.commands import publish_input
    from tidemark.client.transport.unary import UnaryClient
    from tidemark.errors import TidemarkError

    sources = list(file or ())
    if messages and (sources or whole):
        raise typer.BadParameter("messages as arguments cannot be combined with --file or --whole")
    if not messages and not sources:
        sources = [publish_input.STDIN]
    client = UnaryClient(call.open(call.address), "tidemark-publish", timeout_ms=call.timeout_ms)
    fields: dict[str, Any] = {
        "headers": dict(header or ()),  # type: ignore[arg-type]  # pairs, made by its parser
        "fairness_key": key,
        "delay_ms": delay,
        "ttl_ms": ttl,
    }
    report = _Report()
    total = publish_input.total_bytes(sources) if sources else None
    try:
        with call.out.progress("Publishing (bytes)", total) as advance:
            async with aclosing(_runs(messages, sources, whole)) as runs:
                async for run in runs:
                    report.add(run, await client.publish(queue, run, **fields))
                    advance(sum(len(payload) + 1 for payload in run))
    except TidemarkError:
        if report.messages:
            call.out.note(
                f"Published {units.counted(report.messages, 'message')} before it failed."
            )
        raise
    except OSError as error:
        if error.filename is None and not sources:
            raise
        raise Refused(f"cannot read {error.filename or 'input'}: {error.strerror}") from None
    call.out.result({"queue": queue, **report.fields()}, report.sentence(queue))


class _Report:
    """The messages stored so far."""

    def __init__(self) -> None:
        self.messages = 0
        self._bytes = 0
        self._first: tuple[int, int] | None = None
        self._schedules: list[str] = []

    def add(self, run: list[bytes], stored: Any) -> None:
        self.messages += len(run)
        self._bytes += sum(map(len, run))
        if stored.schedule_id:
            self._schedules.append(f"{stored.partition}:{stored.schedule_id}")
        elif self._first is None:
            self._first = stored.partition, stored.first_offset

    def fields(self) -> dict[str, Any]:
        partition, offset = self._first or (None, None)
        return {
            "messages": self.messages,
            "bytes": self._bytes,
            "partition": partition,
            "first_offset": offset,
            "schedules": self._schedules,
        }

    def sentence(self, queue: str) -> str:
        words = f"Published {units.counted(self.messages, 'message')} to {queue}"
        if self._first is not None:
            words += f", from offset {units.count(self._first[1])}"
        if self._schedules:
            words += f", scheduled as {' '.join(self._schedules)}"
        return f"{words}."


async def _runs(
    messages: list[str] | None, sources: list[Path], whole: bool
) -> AsyncGenerator[list[bytes]]:
    from tidemark.cli.commands import publish_input

    for run in publish_input.runs_of(
        text.encode("utf-8", "surrogateescape") for text in messages or ()
    ):
        yield run
    for source in sources:
        if whole:
            yield [await publish_input.whole(source)]
            continue
        async with aclosing(publish_input.lines_of(source)) as lines:
            async for some in lines:
                for run in publish_input.runs_of(some):
                    yield run
