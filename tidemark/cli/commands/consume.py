"""`tidemark consume`: takes messages from a queue and prints them.

What is acknowledged was printed and flushed before; what is not acknowledged goes back untried
when the command ends.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.display import units
from tidemark.cli.options import Limit, QueueName, duration_ms

if TYPE_CHECKING:
    from tidemark.cli.messages import Batch, Messages

_PER_PULL: Final = 1000
_FOLLOW_WAIT_MS: Final = 20_000


@command()
async def consume(
    call: Call,
    queue: QueueName,
    group: Annotated[str, typer.Option(metavar="NAME", help="The consumer group.")] = "default",
    ack: Annotated[
        bool, typer.Option("--ack", help="Acknowledge what was printed; else it goes back.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as messages arrive; needs --ack.")
    ] = False,
    limit: Limit = 0,
    wait: Annotated[
        int,
        typer.Option(
            parser=duration_ms, metavar="DURATION", help="Wait that long for a first message."
        ),
    ] = 0,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take an exclusive queue from its owner.")
    ] = False,
    client_id: Annotated[
        str | None, typer.Option(metavar="ID", show_default="one of its own", help="Who consumes.")
    ] = None,
) -> None:
    """Print messages of a queue, a line each; with --json as JSON lines with all their fields.

    Without --follow it ends when there are no more. Without --ack messages are only shown: they go
    back untried when the command ends.
    """
    import secrets

    from tidemark.cli.messages import Messages
    from tidemark.limits import PULL_WAIT_MS_MAX

    if follow and not ack:
        raise typer.BadParameter("--follow needs --ack; `tidemark queue peek` shows without taking")
    if wait > PULL_WAIT_MS_MAX:
        raise typer.BadParameter(f"--wait is at most {units.duration(PULL_WAIT_MS_MAX)}")
    client = Messages(
        call.open(call.address),
        client_id or f"tidemark-consume-{secrets.token_hex(4)}",
        timeout_ms=call.timeout_ms,
    )
    wait_ms = max(wait, _FOLLOW_WAIT_MS) if follow else wait
    if take_over:
        await client.subscribe(queue, group)
    held: list[Batch] = []
    try:
        shown = 0
        while not limit or shown < limit:
            most = min(_PER_PULL, limit - shown) if limit else _PER_PULL
            batches = await client.pull(queue, group, max_messages=most, wait_ms=wait_ms)
            held += batches
            for batch in batches:
                shown += _print(call, batch)
            if ack and batches:
                sys.stdout.flush()
                await client.ack(batches)
                held.clear()
            if follow:
                continue
            if not batches:
                break
            wait_ms = 0
    finally:
        await _leave(client, queue, group, held, subscribed=take_over)


def _print(call: Call, batch: "Batch") -> int:
    for message in batch.messages:
        if call.out.as_json:
            call.out.json_line(message)
        elif call.out.on_terminal:
            from tidemark.cli.display.texts import payload_line

            call.out.print(payload_line(message.payload))
        else:  # a pipe gets what was published, byte by byte
            sys.stdout.buffer.write(message.payload + b"\n")
    return len(batch.messages)


async def _leave(
    client: "Messages", queue: str, group: str, held: list["Batch"], *, subscribed: bool
) -> None:
    """Give back what is held, also after Ctrl-C; what fails here runs out by itself."""
    from contextlib import suppress

    from tidemark.errors import TidemarkError

    with suppress(TidemarkError):
        if held:
            await client.release(held)
    with suppress(TidemarkError):
        if subscribed:
            await client.unsubscribe(queue, group)
