"""`tidemark topic`, `queue` and `group` as a process against a real cluster (S7, I4, I6)."""

import pytest

from tests.support.cli_process import Cli


def test_a_topic_is_created_shown_changed_and_deleted(cli: Cli) -> None:
    """S7."""
    cli.ok(
        *("topic", "create", "t-life", "--subscription", "exclusive", "--visibility-timeout", "5s"),
        *("--max-attempts", "3", "--dead-letter-topic", "t-dead", "--weight", "a=3", "--weight"),
        *("b=2", "--retention", "--retention-age", "7d", "--queue-bytes-max", "1MiB"),
    )

    created = cli.ok("topic", "get", "t-life", "--json").json
    settings = created["settings"]
    assert settings["subscription"] == "exclusive"
    assert settings["visibility_timeout_ms"] == 5_000
    assert settings["max_attempts"] == 3
    assert settings["dead_letter_topic"] == "t-dead"
    assert settings["fairness_weights"] == {"a": 3, "b": 2}
    assert settings["retention_enabled"] is True
    assert settings["retention_seconds"] == 7 * 24 * 3600
    assert settings["queue_bytes_max"] == 1024 * 1024

    changed = cli.ok("topic", "update", "t-life", "--max-attempts", "0", "--no-retention", "--json")
    assert changed.json["version"] > created["version"]
    assert changed.json["settings"]["max_attempts"] == 0
    assert changed.json["settings"]["retention_enabled"] is False
    assert changed.json["settings"]["visibility_timeout_ms"] == 5_000

    assert "t-life" in [topic["name"] for topic in cli.ok("topic", "list", "--json").json]
    assert (
        cli.ok("topic", "delete", "t-life", "--yes").out == "Deleted topic t-life and 0 queues.\n"
    )
    assert cli.run("topic", "get", "t-life").code == 1


def test_every_setting_of_a_topic_is_shown(cli: Cli) -> None:
    """S7."""
    cli.ok("topic", "create", "t-shown")

    settings = cli.ok("topic", "get", "t-shown", "--json").json["settings"]
    shown = dict(
        line.split(maxsplit=1) for line in cli.ok("topic", "get", "t-shown").out.splitlines()
    )

    assert settings.keys() <= shown.keys()
    assert shown["idle_after_ms"] == "10m"


def test_queues_are_listed_and_looked_into(cli: Cli) -> None:
    cli.ok("topic", "create", "q-look")
    cli.ok("publish", "q-look/ada", "one", "two", "--key", "k", "-H", "kind=test")
    cli.ok("publish", "q-look/bob", "three")

    listed = {
        each["lmq_name"]: each for each in cli.ok("queue", "list", "q-look", "--json").json_lines
    }
    assert {name: each["messages"] for name, each in listed.items()} == {
        "q-look/ada": 2,
        "q-look/bob": 1,
    }
    only = cli.ok("queue", "list", "q-look", "--prefix", "b", "--json").json_lines
    assert [each["lmq_name"] for each in only] == ["q-look/bob"]
    limited = cli.ok("queue", "list", "q-look", "--limit", "1")
    assert len(limited.out.splitlines()) == 2
    assert "first 1;" in limited.err

    stats = cli.ok("queue", "stats", "q-look/ada", "--json").json
    assert stats["queue"]["next_offset"] == 2
    assert stats["groups"] == []
    assert "messages        2\n" in cli.ok("queue", "stats", "q-look/ada").out

    peeked = cli.ok("queue", "peek", "q-look/ada", "--offset", "1", "--json").json_lines
    assert [(each["offset"], each["payload"]) for each in peeked] == [(1, "two")]
    assert peeked[0]["headers"] == {"kind": "test"}
    assert peeked[0]["fairness_key"] == "k"
    assert "kind=test  two" in cli.ok("queue", "peek", "q-look/ada").out


def test_payloads_cannot_steer_the_terminal(cli: Cli) -> None:
    """S3."""
    cli.ok("topic", "create", "q-escape")
    cli.ok("publish", "q-escape/a", "--whole", stdin=b"\x1b[2Jgone\xff\n")

    shown = cli.ok("queue", "peek", "q-escape/a").out
    consumed = cli.in_terminal("consume", "q-escape/a", columns=80).out

    assert "\\x1b[2Jgone\\xff\\n" in shown
    assert "\\x1b[2Jgone\\xff\\n" in consumed
    peeked = cli.ok("queue", "peek", "q-escape/a", "--json").json_lines[0]
    assert peeked["payload_base64"] == "G1sySmdvbmX/Cg=="


def test_many_queues_are_purged_and_deleted_at_once(cli: Cli) -> None:
    cli.ok("topic", "create", "q-many")
    for name in ("a1", "a2", "b1"):
        cli.ok("publish", f"q-many/{name}", "one", "two")

    purged = cli.ok("queue", "purge", "--topic", "q-many", "--prefix", "a", "--yes", "--json")
    assert purged.json == {"queues": 2, "messages": 4}
    assert cli.ok("queue", "purge", "q-many/b1", "--yes").out == "Deleted 2 messages of 1 queue.\n"

    deleted = cli.ok("queue", "delete", "--topic", "q-many", "--yes")
    assert deleted.out == "Deleted 3 queues with 0 messages.\n"
    assert cli.ok("queue", "list", "q-many", "--json").out == ""


def test_a_plain_queue_over_partitions_is_purged_once(cli: Cli) -> None:
    cli.ok("topic", "create", "q-wide", "--partitions", "4")
    for _ in range(4):
        cli.ok("publish", "q-wide", "one", "two")

    purged = cli.ok("queue", "purge", "--topic", "q-wide", "--yes", "--json")

    assert purged.json == {"queues": 1, "messages": 8}


def test_what_keeps_a_queue_loaded_is_said(cli: Cli) -> None:
    """I4, I6: the publisher of a unary call keeps its lease for a while."""
    cli.ok("topic", "create", "q-evict")
    cli.ok("publish", "q-evict/a", "one")

    kept = cli.run("queue", "evict", "q-evict/a")
    assert (kept.code, kept.out) == (1, "q-evict/a: ACTIVE\n")
    assert kept.err.startswith("tidemark: ACTIVE: the queue is in use.")

    missing = cli.run("queue", "evict", "q-evict/b", "--json")
    assert missing.code == 1
    assert missing.json["outcome"] == "NOT_PRESENT"


def test_a_delayed_publish_is_cancelled_by_what_it_printed(cli: Cli) -> None:
    cli.ok("topic", "create", "q-later")
    (schedule,) = cli.ok("publish", "q-later/a", "one", "--delay", "1h", "--json").json["schedules"]

    assert cli.ok("queue", "cancel", "q-later/a", schedule).out == "Cancelled 1 message.\n"

    again = cli.run("queue", "cancel", "q-later/a", schedule)
    assert again.code == 1
    assert "RUN_NOT_SCHEDULED" in again.err
    assert cli.run("queue", "cancel", "q-later/a", "nonsense").code == 2


def test_a_group_is_listed_moved_and_deleted(cli: Cli) -> None:
    """R15: also to a time."""
    cli.ok("topic", "create", "g-life")
    cli.ok("publish", "g-life/a", "one", "two", "three")
    cli.ok("consume", "g-life/a", "--group", "web", "--ack", "--limit", "1")

    (listed,) = cli.ok("group", "list", "g-life/a", "--json").json
    assert (listed["name"], listed["unsettled"]) == ("web", 2)
    (moved,) = cli.ok("group", "reset", "g-life/a", "web", "--at", "1h", "--yes", "--json").json
    assert moved["unsettled"] == 3
    (moved,) = cli.ok("group", "reset", "g-life/a", "web", "--last", "1", "--yes", "--json").json
    assert moved["unsettled"] == 1
    assert cli.ok("consume", "g-life/a", "--group", "web", "--ack").out == "three\n"
    cli.ok("group", "delete", "g-life/a", "web", "--yes")
    assert cli.ok("group", "list", "g-life/a", "--json").json == []
    assert cli.run("group", "delete", "g-life/a", "web", "--yes").code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("topic", "update", "t", "--json"),
        ("topic", "create", "t", "--visibility-timeout", "soon"),
        ("topic", "create", "t", "--max-attempts", "-1"),
        ("topic", "create", "t", "--subscription", "both"),
        ("topic", "create", "t", "--weight", "a"),
        ("topic", "delete", "t"),
        ("topic", "get", "t", "--address", "nowhere"),
        ("queue", "purge", "--yes"),
        ("queue", "purge", "t/a", "--topic", "t", "--yes"),
        ("queue", "delete", "t/a", "--prefix", "a", "--yes"),
        ("queue", "peek", "t/a", "--limit", "1001"),
        ("group", "reset", "t/a", "g", "--yes"),
        ("group", "reset", "t/a", "g", "--latest", "--earliest", "--yes"),
        ("group", "reset", "t/a", "g", "--at", "yesterday", "--yes"),
        ("group", "reset", "t/a", "g", "--at", "1h", "--latest", "--yes"),
        ("topic",),
    ],
)
def test_a_wrong_command_line_changes_nothing_and_exits_with_2(
    cli: Cli, arguments: tuple[str, ...]
) -> None:
    """S3."""
    done = cli.run(*arguments)

    assert done.code == 2
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("topic", "get", "nope"), "TOPIC_NOT_FOUND"),
        (("topic", "update", "nope", "--max-attempts", "1"), "TOPIC_NOT_FOUND"),
        (("topic", "delete", "nope", "--yes"), "TOPIC_NOT_FOUND"),
        (("topic", "create", "not a name"), "INVALID_NAME"),
        (("topic", "create", "t-wait", "--visibility-timeout", "1ms"), "INVALID_ARGUMENT"),
        (("queue", "list", "nope"), "TOPIC_NOT_FOUND"),
        (("queue", "stats", "nope/a"), "TOPIC_NOT_FOUND"),
        (("queue", "peek", "nope/a"), "TOPIC_NOT_FOUND"),
        (("queue", "purge", "nope/a", "--yes"), "TOPIC_NOT_FOUND"),
        (("queue", "delete", "nope/a", "--yes"), "TOPIC_NOT_FOUND"),
        (("queue", "evict", "nope/a"), "TOPIC_NOT_FOUND"),
        (("group", "list", "nope/a"), "TOPIC_NOT_FOUND"),
        (("group", "reset", "nope/a", "g", "--latest", "--yes"), "TOPIC_NOT_FOUND"),
        (("group", "delete", "nope/a", "g", "--yes"), "TOPIC_NOT_FOUND"),
        (("publish", "nope/a", "x"), "TOPIC_NOT_FOUND"),
        (("consume", "nope/a"), "TOPIC_NOT_FOUND"),
    ],
)
def test_a_refusal_is_one_line_with_its_reason_and_exit_code_1(
    cli: Cli, arguments: tuple[str, ...], reason: str
) -> None:
    """S3."""
    done = cli.run(*arguments)

    assert done.code == 1
    assert done.err.startswith(f"tidemark: {reason}: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("columns", [80, 200])
def test_tables_fit_the_terminal(cli: Cli, columns: int) -> None:
    name = "q-fit/" + "a-name-that-is-longer-than-most-" * 4
    if cli.run("topic", "get", "q-fit").code:
        cli.ok("topic", "create", "q-fit")
        cli.ok("publish", name, "x" * 300)

    shown = [
        cli.in_terminal(*arguments, columns=columns)
        for arguments in (
            ("topic", "list"),
            ("queue", "list", "q-fit"),
            ("queue", "peek", name),
            ("partitions",),
        )
    ]

    for done in shown:
        assert done.code == 0
        assert all(len(line) <= columns for line in done.out.splitlines()), done.out
    assert ("PARTITION" in shown[1].out) == (columns == 200)
    assert len(shown[1].out.splitlines()) == 2


def test_in_a_pipe_names_are_whole(cli: Cli) -> None:
    name = "q-whole/" + "a-name-that-is-longer-than-most-" * 4
    cli.ok("topic", "create", "q-whole")
    cli.ok("publish", name, "x")

    listed = cli.ok("queue", "list", "q-whole").out

    assert name in listed
    assert "\x1b" not in listed


def test_deleting_asks_on_a_terminal(cli: Cli) -> None:
    cli.ok("topic", "create", "t-asked")

    no = cli.in_terminal("topic", "delete", "t-asked", columns=80, keys="n\n", after="[y/N]")
    assert no.code == 1
    assert "Nothing was changed." in no.out
    stopped = cli.in_terminal("topic", "delete", "t-asked", columns=80, keys="\x03", after="[y/N]")
    assert stopped.code == 1
    assert cli.run("topic", "get", "t-asked").code == 0
    yes = cli.in_terminal("topic", "delete", "t-asked", columns=80, keys="y\n", after="[y/N]")
    assert yes.code == 0
    assert cli.run("topic", "get", "t-asked").code == 1


def test_a_topic_gets_a_dead_letter_topic_of_the_usual_name(cli: Cli) -> None:
    """L9."""
    created = cli.ok("topic", "create", "c-jobs", "--dead-letters", "--json").json
    both = cli.run("topic", "update", "c-jobs", "--dead-letters", "--dead-letter-topic", "other")

    assert created["settings"]["dead_letter_topic"] == "c-jobs.dead"
    assert cli.ok("topic", "get", "c-jobs.dead", "--json").json["name"] == "c-jobs.dead"
    assert (both.code, "not both" in both.err) == (2, True)


def test_the_retry_policy_of_a_topic_is_set_shown_and_checked(cli: Cli) -> None:
    """V9, S7."""
    cli.ok(
        *("topic", "create", "t-retry", "--retry-delay", "1s", "--retry-delay-max", "1m"),
        *("--retry-multiplier", "1.5", "--retry-jitter", "0.2"),
    )

    shown = dict(
        line.split(maxsplit=1) for line in cli.ok("topic", "get", "t-retry").out.splitlines()
    )
    changed = cli.ok("topic", "update", "t-retry", "--retry-place", "first", "--json").json
    refused = cli.run("topic", "update", "t-retry", "--retry-delay", "2m")
    no_number = cli.run("topic", "update", "t-retry", "--retry-multiplier", "nan")

    assert {name: value for name, value in shown.items() if name.startswith("retry")} == {
        "retry_delay_ms": "1s",
        "retry_delay_ms_max": "1m",
        "retry_multiplier": "1.5",
        "retry_jitter": "0.2",
        "retry_place": "behind",
    }
    assert changed["settings"]["retry_place"] == "first"
    assert refused.code == 1
    assert "retry_delay_ms_max is 0 or at least retry_delay_ms" in refused.err
    assert no_number.code == 2
    assert "'nan' is not a number" in no_number.err


def test_topics_and_queues_are_paused_and_resumed(cli: Cli) -> None:
    """L10: pausing twice is fine, and what is paused is shown everywhere."""
    cli.ok("topic", "create", "t-pause")
    cli.ok("publish", "t-pause/a", "one")
    cli.ok("publish", "t-pause/b", "two")

    assert cli.ok("queue", "pause", "t-pause/a").out == "Paused queue t-pause/a.\n"
    assert cli.ok("queue", "pause", "t-pause/a", "--json").json["paused"] is True
    assert cli.ok("topic", "pause", "t-pause").out == "Paused topic t-pause.\n"
    assert cli.ok("topic", "pause", "t-pause", "--json").json["paused"] is True

    shown = [line.split() for line in cli.ok("topic", "get", "t-pause").out.splitlines()]
    assert ["paused", "yes"] in shown
    listed = [line.split() for line in cli.ok("topic", "list").out.splitlines()]
    assert [line[:3] for line in listed if line[0] == "t-pause"] == [
        ["t-pause", "shared", "paused"]
    ]
    assert cli.ok("queue", "list", "t-pause").out.count(", paused") == 2
    assert "queue and topic" in cli.ok("queue", "stats", "t-pause/a").out
    assert "paused: 1 topic, 1 queue" in cli.ok("top", "--count", "1", "--interval", "100ms").out
    assert cli.ok("consume", "t-pause/b", "--ack", "--wait", "0s").out == ""

    resumed = cli.ok("queue", "resume", "t-pause/a")
    assert resumed.out == "Resumed queue t-pause/a.\n"
    assert "Its topic is paused as well." in resumed.err
    assert cli.ok("topic", "resume", "t-pause").out == "Resumed topic t-pause.\n"
    assert cli.ok("consume", "t-pause/b", "--ack", "--limit", "1", "--wait", "30s").out == "two\n"

    missing = cli.run("queue", "pause", "t-pause/nothing")
    assert missing.code == 1
    assert "there is no queue t-pause/nothing" in missing.err
