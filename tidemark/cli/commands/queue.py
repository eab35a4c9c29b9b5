"""`tidemark queue ...`: list, inspect, purge, unload and delete queues.

Listing and inspecting load no idle queue.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from tidemark.cli.command import Call, Refused, command
from tidemark.cli.display import units
from tidemark.cli.options import Limit, QueueName, TopicName, Yes, confirm

if TYPE_CHECKING:
    from tidemark.client.admin.values import Queue, StoredMessage

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Queues and their messages.")

_AT_ONCE: Final = 32
"""Queues that are purged or deleted concurrently."""

Prefix = Annotated[
    str, typer.Option(metavar="TEXT", help="Only queues whose lite part begins with this.")
]
Queues = Annotated[list[str] | None, typer.Argument(metavar="[QUEUE]...", help="Names of queues.")]
OfTopic = Annotated[
    str, typer.Option("--topic", metavar="TOPIC", help="All queues of this topic instead.")
]


@app.command("list")
@command()
async def list_(
    call: Call,
    topic: TopicName,
    prefix: Prefix = "",
    limit: Limit = 0,
) -> None:
    """List the queues of a topic with their state; with --json, one line each."""
    from tidemark.cli.display.layout import Column
    from tidemark.clock import SystemClock

    columns = (
        Column("QUEUE", cut=True),
        Column("STATE"),
        Column("MESSAGES", right=True),
        Column("IN FLIGHT", right=True, importance=1),
        Column("BYTES", right=True, importance=3),
        Column("OLDEST", right=True, importance=2),
        Column("LAST USED", right=True, importance=4),
        Column("PARTITION", right=True, importance=5),
    )
    now_ms = SystemClock().wall_ms()

    def row(queue: "Queue") -> tuple[str, ...]:
        return (
            queue.lmq_name,
            _state(queue),
            units.count(queue.messages),
            units.count(queue.inflight),
            units.size(queue.bytes),
            units.ago(queue.oldest_publish_time_ms, now_ms),
            units.ago(queue.last_activity_time_ms, now_ms),
            str(queue.partition),
        )

    queues = call.admin.list_queues(topic, lite_prefix=prefix)
    shown = await call.out.stream(queues, columns, row, limit=limit)
    if shown and shown == limit and not call.out.as_json:
        call.out.note(f"Showing the first {units.count(shown)}; raise --limit for more.")


@app.command()
@command()
async def stats(call: Call, queue: QueueName) -> None:
    """Show one queue and its groups."""
    from tidemark.cli.commands.group import show_groups
    from tidemark.clock import SystemClock

    found = await call.admin.get_queue(queue)
    if call.out.as_json:
        call.out.document(found)
        return
    shown = found.queue
    now_ms = SystemClock().wall_ms()
    call.out.pairs(
        [
            ("name", shown.lmq_name),
            ("state", _state(shown)),
            ("paused", _paused(shown)),
            ("messages", units.count(shown.messages)),
            ("in flight", units.count(shown.inflight)),
            ("bytes", units.size(shown.bytes)),
            ("oldest message", units.ago(shown.oldest_publish_time_ms, now_ms)),
            ("next offset", units.count(shown.next_offset)),
            ("last used", f"{units.ago(shown.last_activity_time_ms, now_ms)} ago"),
            ("created", f"{units.moment(shown.create_time_ms)} UTC"),
            ("partition", str(shown.partition)),
            ("queue id", str(shown.queue_id)),
        ]
    )
    if found.groups:
        call.out.print("")
        show_groups(call, found.groups)


@app.command()
@command()
async def pause(call: Call, queue: QueueName) -> None:
    """Stop delivering messages of a queue; publishing and settling go on."""
    call.out.result(await call.admin.pause_queue(queue), f"Paused queue {queue}.")


@app.command()
@command()
async def resume(call: Call, queue: QueueName) -> None:
    """Deliver messages of a queue again."""
    resumed = await call.admin.resume_queue(queue)
    call.out.result(resumed, f"Resumed queue {queue}.")
    if resumed.topic_paused and not call.out.as_json:
        call.out.note("Its topic is paused as well.")


@app.command()
@command()
async def peek(
    call: Call,
    queue: QueueName,
    offset: Annotated[int, typer.Option(min=0, help="First offset to show.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of messages.")] = 10,
    group: Annotated[
        str, typer.Option(metavar="NAME", help="Only messages that this group has not settled.")
    ] = "",
) -> None:
    """Show messages without taking them; with --json, one line each."""
    from tidemark.cli.display import texts
    from tidemark.cli.display.layout import Column
    from tidemark.clock import SystemClock

    messages = await call.admin.peek_queue(queue, offset=offset, max_messages=limit, group=group)
    if call.out.as_json:
        for message in messages:
            call.out.json_line(message)
        return
    columns = (
        Column("OFFSET", right=True),
        Column("AGE", right=True, importance=1),
        Column("KEY", importance=2, cut=True),
        Column("HEADERS", importance=3, cut=True),
        Column("PAYLOAD", cut=True),
    )
    now_ms = SystemClock().wall_ms()

    def row(message: "StoredMessage") -> tuple[str, ...]:
        return (
            str(message.offset),
            units.ago(message.publish_time_ms, now_ms),
            texts.printable(message.fairness_key) or "-",
            texts.header_line(message.headers) or "-",
            texts.payload_line(message.payload),
        )

    call.out.rows(messages, columns, row)


@app.command()
@command()
async def purge(
    call: Call,
    queues: Queues = None,
    topic: OfTopic = "",
    prefix: Prefix = "",
    yes: Yes = False,
) -> None:
    """Delete all messages of queues, except those under a reservation."""
    what = _chosen(queues, topic, prefix)
    confirm(f"Delete all messages of {what}?", yes)
    admin = call.admin
    named = _named(call, queues, topic, prefix, only_full=True)
    done, messages = await _for_each(call, "Purging", named, admin.purge_queue)
    call.out.result(
        {"queues": done, "messages": messages},
        f"Deleted {units.counted(messages, 'message')} of {units.counted(done, 'queue')}.",
    )


@app.command()
@command()
async def delete(
    call: Call,
    queues: Queues = None,
    topic: OfTopic = "",
    prefix: Prefix = "",
    yes: Yes = False,
) -> None:
    """Delete queues with everything in them."""
    what = _chosen(queues, topic, prefix)
    confirm(f"Delete {what} with everything in them?", yes)
    admin = call.admin
    named = _named(call, queues, topic, prefix, only_full=False)
    done, messages = await _for_each(call, "Deleting", named, admin.delete_queue)
    call.out.result(
        {"queues": done, "messages": messages},
        f"Deleted {units.counted(done, 'queue')} with {units.counted(messages, 'message')}.",
    )


@app.command()
@command()
async def evict(call: Call, queue: QueueName) -> None:
    """Try to unload a queue now and print the outcome; exit code 1 if it stays loaded."""
    eviction = await call.admin.evict_queue(queue)
    call.out.result(eviction, f"{queue}: {eviction.outcome}")
    if not eviction.unloaded:
        raise Refused(f"{eviction.outcome}: {_WHY[eviction.outcome]}")


@app.command()
@command()
async def cancel(
    call: Call,
    queue: QueueName,
    schedule: Annotated[
        str,
        typer.Argument(
            metavar="SCHEDULE", help="PARTITION:ID, as printed by `tidemark publish --delay`."
        ),
    ],
) -> None:
    """Cancel a delayed publish that is not yet due."""
    partition, separator, schedule_id = schedule.partition(":")
    if not (separator and partition.isdecimal() and schedule_id.isdecimal()):
        raise typer.BadParameter(f"{schedule!r} is not PARTITION:ID")
    messages = await call.admin.cancel_scheduled(queue, int(partition), int(schedule_id))
    call.out.result({"messages": messages}, f"Cancelled {units.counted(messages, 'message')}.")


_WHY: Final = {
    "NOT_TRACKED": "the broker stopped tracking the queue in the meantime. Try again.",
    "ACTIVE": "the queue is in use. Wait until its publishers and subscribers are gone.",
    "NOT_IDLE_ENOUGH": "its idle window has not passed. See idle_after_ms of the topic.",
    "PENDING_SETTLEMENTS": "settlements are pending. Try again.",
    "HAS_DELIVERIES": "consumers hold messages. Wait until they are settled or expire.",
    "HAS_INFLIGHT": "messages are in flight. Wait until they are settled or expire.",
    "NOT_PRESENT": "there is no such queue. Check the spelling.",
    "RACE_LOST": "the queue changed at the same time. Try again.",
}


def _state(queue: "Queue") -> str:
    loaded = "loaded" if queue.materialized else "idle"
    return f"{loaded}, paused" if queue.paused or queue.topic_paused else loaded


def _paused(queue: "Queue") -> str:
    if queue.topic_paused:
        return "queue and topic" if queue.paused else "topic"
    return "queue" if queue.paused else "no"


def _chosen(queues: list[str] | None, topic: str, prefix: str) -> str:
    """The selected queues in words: either names or a topic."""
    if bool(queues) == bool(topic):
        raise typer.BadParameter("pass queue names, or a topic with --topic")
    if prefix and not topic:
        raise typer.BadParameter("--prefix requires --topic")
    if queues:
        return queues[0] if len(queues) == 1 else f"{len(queues)} queues"
    return f"the queues {topic}/{prefix}*" if prefix else f"all queues of {topic}"


async def _named(
    call: Call, queues: list[str] | None, topic: str, prefix: str, *, only_full: bool
) -> AsyncIterator[str]:
    for name in queues or ():
        yield name
    if topic:
        async for queue in call.admin.list_queues(topic, lite_prefix=prefix):
            if queue.messages or not only_full:
                yield queue.lmq_name


async def _for_each(
    call: Call,
    title: str,
    names: AsyncIterator[str],
    act: Callable[[str], Awaitable[int]],
) -> tuple[int, int]:
    """Act on many queues, some concurrently; returns their number and the sum of the results.

    A queue that spans partitions is listed in each of them, but acted on once.
    """
    import asyncio

    done = total = 0
    seen: set[str] = set()
    with call.out.progress(title, None) as advance:
        while True:
            batch: list[str] = []
            async for name in names:
                if "/" not in name:  # only plain queues span partitions
                    if name in seen:
                        continue
                    seen.add(name)
                batch.append(name)
                if len(batch) == _AT_ONCE:
                    break
            if not batch:
                return done, total
            total += sum(await asyncio.gather(*map(act, batch)))
            done += len(batch)
            advance(len(batch))
