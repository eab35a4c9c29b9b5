"""`tidemark partitions`, `top`, `dead`, `outbox`, `redrive`, `retention`, services not there."""

import asyncio
import re
import socket

import pytest

from tests.cluster.conftest import StartCluster
from tests.support.cli_process import Cli
from tidemark.local.ports import free_address

COMMANDS = (
    ("topic", "list"),
    ("queue", "list", "t"),
    ("group", "list", "t/a"),
    ("publish", "t/a", "x"),
    ("consume", "t/a"),
    ("redrive", "t"),
    ("dead", "summary", "t"),
    ("outbox", "list"),
    ("partitions",),
    ("top",),
    ("retention", "history"),
)


def test_partitions_show_what_they_hold(cli: Cli) -> None:
    """I1: a queue that is used is loaded."""
    cli.ok("topic", "create", "o-hold")
    before = cli.ok("partitions", "--json").json
    cli.ok("publish", "o-hold/a", "12345678", "12345678")
    cli.ok("consume", "o-hold/a", "--ack", "--limit", "1")

    after = cli.ok("partitions", "--json").json

    def grown(figure: str) -> int:
        return sum(int(each[figure]) for each in after) - sum(int(each[figure]) for each in before)

    assert [each["state"] for each in after] == ["SERVING"] * 4
    assert [each["link_state"] for each in after] == ["UP"] * 4
    assert {each["broker_id"] for each in after} == {"broker-0"}
    assert (grown("queues"), grown("materialized_queues")) == (1, 1)
    assert (grown("published"), grown("delivered"), grown("acked")) == (2, 1, 1)
    cli.ok("topic", "delete", "o-hold", "--force", "--yes")
    gone = cli.ok("partitions", "--json").json
    for figure in ("queues", "messages", "bytes"):
        assert [each[figure] for each in gone] == [each[figure] for each in before]
    assert cli.ok("partitions").out.count("SERVING") == 4


def test_top_prints_views_in_a_pipe(cli: Cli) -> None:
    plain = cli.ok("top", "--count", "1", "--interval", "200ms").out
    views = cli.ok("top", "--count", "2", "--interval", "200ms", "--json").json_lines

    assert "4/4 partitions serving" in plain
    assert "\x1b" not in plain
    assert [len(view["partitions"]) for view in views] == [4, 4]
    assert all(view["rates"]["published"] is not None for view in views)


@pytest.mark.parametrize("columns", [80, 200])
def test_top_fills_a_terminal_until_q_is_pressed(cli: Cli, columns: int) -> None:
    done = cli.in_terminal("top", columns=columns, keys="q", after="PARTITION")

    assert done.code == 0
    assert re.search(r"queues +[0-9]", done.out)
    assert ("COMMITS/S" in done.out) == (columns == 200)
    assert all(len(line) <= columns for line in done.out.splitlines())


def test_top_ends_with_ctrl_c(cli: Cli) -> None:
    done = cli.in_terminal("top", columns=80, keys="\x03", after="PARTITION")

    assert done.code == 130
    assert "Traceback" not in done.out


def test_what_a_server_does_not_offer_is_said_on_one_line(cli: Cli) -> None:
    """S3: these calls belong to another service."""
    storage = cli.ok("partitions", "--json").json[0]["storage_address"]
    for arguments in (
        ("retention", "run", "--dry-run", "--jobs-address", storage),
        ("retention", "status", "--jobs-address", storage),
    ):
        done = cli.run(*arguments)
        assert done.code == 1, arguments
        assert done.err.startswith("tidemark: UNIMPLEMENTED: ")
        assert done.err.count("\n") == 1


def test_dead_letters_are_counted_and_brought_back(cli: Cli) -> None:
    """L6: there are none here; who has some is tested with the sweeps."""
    cli.ok("topic", "create", "o-dead")

    counted = cli.ok("redrive", "o-dead", "--reason", "rejected", "--after", "2h", "--dry-run")
    moved = cli.ok("redrive", "o-dead", "--limit", "10", "--json")

    assert "0" in counted.out
    assert moved.json["messages"] == 0


def test_dead_letters_are_shown_counted_and_deleted(cli: Cli) -> None:
    """L9: here two that never died, which any publisher may leave in a dead-letter topic."""
    cli.ok("topic", "create", "o-graves")
    cli.ok("publish", "o-graves", "one", "two")

    counted = cli.ok("dead", "summary", "o-graves", "--json").json
    listed = cli.ok("dead", "list", "o-graves", "--json").json_lines
    none = cli.ok("dead", "delete", "o-graves", "--reason", "rejected", "--yes")
    would = cli.ok("dead", "delete", "o-graves", "--dry-run")
    deleted = cli.ok("dead", "delete", "o-graves", "--yes", "--json")

    assert counted == [
        {"reason": "", "source_lmq_name": "", "messages": 2, "oldest_dead_time_ms": None}
    ]
    assert sum(each["messages"] for each in listed) == 2
    assert (none.out, would.out) == ("Deleted 0 messages.\n", "Would delete 2 messages.\n")
    assert deleted.json == {"messages": 2}
    assert cli.ok("dead", "list", "o-graves").out.split()[:2] == ["OFFSET", "MESSAGES"]


def test_what_waits_in_outboxes_is_shown_and_dropped(cli: Cli) -> None:
    """L9: nothing waits here; who has something is tested with the sweeps."""
    shown = cli.ok("outbox", "list", "o-dead")
    dropped = cli.ok("outbox", "drop", "o-dead", "--yes", "--json")
    wrong = cli.run("outbox", "drop", "o-dead", "--entry", "7", "--yes")

    assert shown.out.split()[:2] == ["ENTRY", "DESTINATION"]
    assert dropped.json == {"messages": 0}
    assert (wrong.code, "PARTITION:SEQUENCE" in wrong.err) == (2, True)


def test_the_time_of_a_partition_is_confirmed(cli: Cli) -> None:
    """R9: also of one whose clock did not jump."""
    confirmed = cli.ok("partitions", "confirm-time", "1", "--yes", "--json").json
    returned = cli.ok("partitions", "confirm-time", "1", "--to-wall-clock", "--yes")
    missing = cli.run("partitions", "confirm-time", "99", "--yes")

    assert confirmed["partition"] == 1
    assert confirmed["partition_time_ms"] > 0
    assert "Partition 1 is at " in returned.out
    assert (missing.code, "PARTITION_NOT_FOUND" in missing.err) == (1, True)


def test_a_reason_that_no_dead_letter_has_is_refused_with_those_there_are(cli: Cli) -> None:
    """S3: reasons are lower case; another word would match nothing."""
    refused = cli.run("redrive", "o-dead", "--reason", "REJECTED")

    said = " ".join(refused.err.replace("│", " ").split())
    assert refused.code == 2
    assert "'REJECTED' is not one of" in said
    for reason in ("attempts_exhausted", "time_to_live", "rejected", "max_wait_time_eviction"):
        assert f"'{reason}'" in said


def test_the_history_tells_what_was_removed(cli: Cli) -> None:
    """R6."""
    cli.ok("topic", "create", "o-history")
    cli.ok("publish", "o-history/a", "one", "two")
    cli.ok("queue", "purge", "o-history/a", "--yes")

    rows = cli.ok("retention", "history", "--type", "purge", "--json").json_lines
    (row,) = (row for row in rows if row["lmq_name"] == "o-history/a")

    assert (row["type"], row["messages"]) == ("purge", 2)
    assert "o-history/a" in cli.ok("retention", "history").out
    assert cli.ok("retention", "history", "--type", "expired", "--json").out == ""
    unknown = cli.run("retention", "history", "--type", "nonsense")
    assert unknown.code == 1
    assert "one of expired, completed, max_wait_time_eviction, inactive_queue" in unknown.err


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_service_that_is_away_is_one_line_and_exit_code_3(
    cli: Cli, arguments: tuple[str, ...]
) -> None:
    """S3."""
    address = free_address()

    done = cli.run(*arguments, "--address", address, *_storage(arguments, address))

    assert (done.code, done.out) == (3, "")
    assert done.err.startswith(f"tidemark: UNAVAILABLE: no response from {address} ")
    assert done.err.count("\n") == 1


def _storage(arguments: tuple[str, ...], address: str) -> tuple[str, ...]:
    return ("--storage-address", address) if arguments[0] == "retention" else ()


def test_no_answer_in_time_is_exit_code_4(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"

        done = cli.run("topic", "list", "--timeout", "100ms", "--address", address)

    assert done.code == 4
    assert done.err.startswith(f"tidemark: DEADLINE_EXCEEDED: no response from {address} ")


def test_a_wrong_setting_or_argument_is_exit_code_2(cli: Cli) -> None:
    wrong = Cli({"TIDEMARK_ADDRESS": "nowhere"}).run("topic", "list")
    assert (wrong.code, wrong.err.count("\n")) == (2, 1)
    assert "TIDEMARK_ADDRESS='nowhere': must be host:port" in wrong.err
    for arguments in (
        ("redrive", "o-dead", "--after", "yesterday"),
        ("retention", "run", "--job", "nonsense"),
        ("top", "--interval", "1ms"),
        ("completion", "tcsh"),
        ("nonsense",),
    ):
        assert cli.run(*arguments).code == 2, arguments


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_names_the_command(cli: Cli, shell: str) -> None:
    assert "_TIDEMARK_COMPLETE" in cli.ok("completion", shell).out


def test_a_shell_that_asks_is_answered() -> None:
    asked = {
        "_TIDEMARK_COMPLETE": "complete_bash",
        "COMP_WORDS": "tidemark topic cre",
        "COMP_CWORD": "2",
    }

    assert Cli(asked).ok().out == "create\n"


async def test_without_storage_partitions_are_not_known(start_cluster: StartCluster) -> None:
    cluster = await start_cluster(partitions=2)
    cli = Cli.of(cluster)
    await cluster.kill("storage")
    await cluster.kill("lifecycle")

    done = await asyncio.to_thread(cli.run, "partitions")

    assert done.code == 0
    assert len(re.findall(r"^ +\d +UNKNOWN", done.out, re.MULTILINE)) == 2
    assert done.err == f"Sweeps unknown: UNAVAILABLE at {cluster.address('lifecycle')}\n"
