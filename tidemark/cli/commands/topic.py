"""`tidemark topic ...`: create, show, list, change and delete topics."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemark.cli.command import Call, command
from tidemark.cli.commands.topic_settings import SETTINGS, seconds_text, with_settings
from tidemark.cli.display import units
from tidemark.cli.options import TopicName, Yes, confirm

if TYPE_CHECKING:
    from tidemark.topics import Topic

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Topics and their settings.")

DeadLetters = Annotated[
    bool, typer.Option("--dead-letters", help="Dead letters go to the topic TOPIC.dead.")
]


@app.command()
@command()
@with_settings
async def create(
    call: Call, name: TopicName, dead_letters: DeadLetters = False, *, settings: dict[str, Any]
) -> None:
    """Create a topic. Repeating it with the same settings succeeds."""
    from tidemark.topics import TopicSettings

    settings |= _named_dead_letter_topic(name, dead_letters, settings)
    topic = await call.admin.create_topic(name, TopicSettings(**_typed(settings)))
    call.out.result(topic, f"Created topic {topic.name}.")


@app.command()
@command()
async def get(call: Call, name: TopicName) -> None:
    """Show a topic with all its settings."""
    topic = await call.admin.get_topic(name)
    if call.out.as_json:
        call.out.document(topic)
    else:
        _show(call, topic)


@app.command("list")
@command()
async def list_(call: Call) -> None:
    """List the topics by name."""
    from tidemark.cli.display.layout import Column

    columns = (
        Column("TOPIC", cut=True),
        Column("SUBSCRIPTION"),
        Column("STATE"),
        Column("VISIBILITY", right=True),
        Column("ATTEMPTS", right=True, importance=1),
        Column("DEAD LETTERS", cut=True, importance=2),
        Column("RETENTION", importance=3),
        Column("IDLE AFTER", right=True, importance=4),
        Column("CREATED (UTC)", importance=5),
    )

    def row(topic: "Topic") -> tuple[str, ...]:
        settings = topic.settings
        return (
            topic.name,
            settings.subscription.value,
            "paused" if topic.paused else "active",
            units.duration(settings.visibility_timeout_ms),
            str(settings.max_attempts or "-"),
            settings.dead_letter_topic or "-",
            seconds_text(settings.retention_seconds) if settings.retention_seconds else "-",
            units.duration(settings.idle_after_ms),
            units.moment(topic.create_time_ms),
        )

    topics = [topic async for topic in call.admin.list_topics()]
    call.out.rows(topics, columns, row)


@app.command()
@command()
@with_settings
async def update(
    call: Call, name: TopicName, dead_letters: DeadLetters = False, *, settings: dict[str, Any]
) -> None:
    """Change the given settings; the others stay as they are."""
    settings |= _named_dead_letter_topic(name, dead_letters, settings)
    if not settings:
        raise typer.BadParameter("pass at least one setting to change")
    topic = await call.admin.update_topic(name, _typed(settings))
    call.out.result(topic, f"Updated topic {topic.name}: {', '.join(sorted(settings))}.")


@app.command()
@command()
async def pause(call: Call, name: TopicName) -> None:
    """Stop delivering messages of all its queues; publishing and settling go on."""
    call.out.result(await call.admin.pause_topic(name), f"Paused topic {name}.")


@app.command()
@command()
async def resume(call: Call, name: TopicName) -> None:
    """Deliver messages again, except of queues that are paused themselves."""
    call.out.result(await call.admin.resume_topic(name), f"Resumed topic {name}.")


@app.command()
@command()
async def delete(
    call: Call,
    name: TopicName,
    force: Annotated[
        bool, typer.Option("--force", help="Also delete queues that still hold messages.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Delete a topic and its queues."""
    confirm(f"Delete topic {name} and its queues?", yes)
    queues = await call.admin.delete_topic(name, force=force)
    call.out.result(
        {"topic": name, "queues": queues},
        f"Deleted topic {name} and {units.counted(queues, 'queue')}.",
    )


def _named_dead_letter_topic(
    name: str, dead_letters: bool, settings: dict[str, Any]
) -> dict[str, str]:
    """The setting that `--dead-letters` stands for."""
    from tidemark.topics import default_dead_letter_topic

    if not dead_letters:
        return {}
    if settings.get("dead_letter_topic"):
        raise typer.BadParameter("pass --dead-letters or --dead-letter-topic, not both")
    return {"dead_letter_topic": default_dead_letter_topic(name)}


def _typed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with the types of `tidemark.topics`."""
    from tidemark.topics import ConsumptionRecords, MaxWaitAction, RetryPlace, Subscription

    typed = dict(settings)
    kinds: dict[str, Callable[[str], Any]] = {
        "subscription": Subscription,
        "max_wait_action": MaxWaitAction,
        "retry_place": RetryPlace,
        "consumption_records": ConsumptionRecords,
    }
    for name in kinds.keys() & typed.keys():
        typed[name] = kinds[name](typed[name])
    return typed


def _show(call: Call, topic: "Topic") -> None:
    call.out.pairs(
        [
            ("name", topic.name),
            *((each.name, each.show(getattr(topic.settings, each.name))) for each in SETTINGS),
            ("paused", "yes" if topic.paused else "no"),
            ("version", str(topic.version)),
            ("created", f"{units.moment(topic.create_time_ms)} UTC"),
            ("updated", f"{units.moment(topic.update_time_ms)} UTC"),
        ]
    )
