"""`tidemark publish` and `tidemark consume` as a process against a real cluster (S2, V8, E3)."""

import json
import signal
import subprocess
from pathlib import Path

from tests.support.cli_process import TIMEOUT_S, Cli


def test_lines_of_stdin_and_of_files_are_published_in_their_order(cli: Cli, tmp_path: Path) -> None:
    cli.ok("topic", "create", "m-lines")
    (tmp_path / "first").write_bytes(b"three\r\nfour")
    (tmp_path / "second").write_bytes(b"five\n\nsix\n")

    cli.ok("publish", "m-lines/a", stdin=b"one\ntwo\n")
    files = ("--file", str(tmp_path / "first"), "--file", str(tmp_path / "second"))
    published = cli.ok("publish", "m-lines/a", *files, "--json").json

    assert published["messages"] == 5
    assert published["first_offset"] == 2
    consumed = cli.ok("consume", "m-lines/a", "--ack").out
    assert consumed == "one\ntwo\nthree\nfour\nfive\n\nsix\n"


def test_many_lines_go_in_large_runs_and_come_back_whole(cli: Cli) -> None:
    """S2."""
    cli.ok("topic", "create", "m-many")
    lines = b"".join(b"%d\n" % number for number in range(50_000))

    assert cli.ok("publish", "m-many/a", stdin=lines).out.startswith("Published 50,000 messages")

    assert cli.ok("consume", "m-many/a", "--ack").out.encode() == lines
    assert cli.ok("consume", "m-many/a", "--ack").out == ""


def test_a_whole_file_is_one_message_byte_by_byte(cli: Cli, tmp_path: Path) -> None:
    cli.ok("topic", "create", "m-whole")
    (tmp_path / "file").write_bytes(bytes(range(256)))

    cli.ok("publish", "m-whole/a", "--whole", "--file", str(tmp_path / "file"), "--key", "k")

    (message,) = cli.ok("consume", "m-whole/a", "--json").json_lines
    assert message["fairness_key"] == "k"
    peeked = cli.ok("queue", "peek", "m-whole/a", "--json").json_lines
    assert message["payload_base64"] == peeked[0]["payload_base64"]


def test_looking_without_ack_changes_nothing_and_keeps_nothing(cli: Cli) -> None:
    """K5: it left a group behind that kept every message for good, and counted deliveries."""
    cli.ok("topic", "create", "m-look")
    empty = cli.ok("consume", "m-look/a", "--group", "debug").out
    missing = cli.run("queue", "stats", "m-look/a")
    cli.ok("publish", "m-look/a", "one", "two", "-H", "a=b")

    first = cli.ok("consume", "m-look/a", "--group", "debug", "--json").json_lines
    second = cli.ok("consume", "m-look/a", "--group", "debug", "--limit", "1").out
    groups = cli.ok("group", "list", "m-look/a", "--json").json
    taken = cli.ok("consume", "m-look/a", "--ack", "--json").json_lines

    assert (empty, missing.code) == ("", 1), "nor is a queue made by looking for it"
    assert [each["payload"] for each in first] == ["one", "two"]
    assert first[0].keys() == taken[0].keys()
    assert (first[0]["headers"], first[0]["attempt_count"]) == ({"a": "b"}, None)
    assert second == "one\n"
    assert groups == []
    assert [(each["payload"], each["delivery_count"]) for each in taken] == [("one", 1), ("two", 1)]
    assert cli.ok("queue", "stats", "m-look/a", "--json").json["queue"]["messages"] == 0


def test_looking_shows_what_the_group_has_not_settled(cli: Cli) -> None:
    """K5: also in a queue that spans partitions, some of which the group has not seen."""
    cli.ok("topic", "create", "m-seen", "--partitions", "4", "--retention")
    cli.ok("publish", "m-seen", *(str(number) for number in range(3)))
    cli.ok("consume", "m-seen", "--ack", "--group", "web")
    cli.ok("publish", "m-seen", stdin=b"".join(b"%d\n" % number for number in range(3, 3000)))

    left = cli.ok("consume", "m-seen", "--group", "web").out.split()
    every = cli.ok("consume", "m-seen", "--group", "other").out.split()

    assert sorted(map(int, left)) == list(range(3, 3000))
    assert sorted(map(int, every)) == list(range(3000))


def test_groups_have_their_own_progress(cli: Cli) -> None:
    cli.ok("topic", "create", "m-groups", "--retention")
    cli.ok("publish", "m-groups/a", "one")

    assert cli.ok("consume", "m-groups/a", "--ack", "--group", "x").out == "one\n"
    assert cli.ok("consume", "m-groups/a", "--ack", "--group", "y").out == "one\n"
    assert cli.ok("consume", "m-groups/a", "--ack", "--group", "x").out == ""


def test_following_prints_what_arrives_until_ctrl_c(cli: Cli) -> None:
    cli.ok("topic", "create", "m-follow")
    process = cli.start("consume", "m-follow/a", "--follow", "--ack", "--json")
    try:
        assert process.stdout is not None
        for payload in ("one", "two"):
            cli.ok("publish", "m-follow/a", payload)
            assert json.loads(process.stdout.readline())["payload"] == payload

        process.send_signal(signal.SIGINT)

        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, out, err) == (130, b"", b"")
    assert cli.ok("queue", "stats", "m-follow/a", "--json").json["queue"]["messages"] <= 1


def test_a_slow_pipe_is_published_line_by_line(cli: Cli) -> None:
    """A line is stored while its writer is still writing; Ctrl-C ends it cleanly."""
    cli.ok("topic", "create", "m-slow")
    process = cli.start("publish", "m-slow/a")
    try:
        assert process.stdin is not None
        process.stdin.write(b"first\nhalf of the sec")
        process.stdin.flush()

        waited = cli.ok("consume", "m-slow/a", "--wait", "30s", "--limit", "1").out

        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)
    finally:
        process.kill()
        _, err = process.communicate()
    assert waited == "first\n"
    assert (process.returncode, err) == (130, b"")


def test_a_reader_that_goes_away_ends_the_command_quietly(cli: Cli) -> None:
    cli.ok("topic", "create", "m-pipe")
    cli.ok("publish", "m-pipe/a", stdin=b"0123456789\n" * 20_000)

    process = cli.start("consume", "m-pipe/a")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"0123456789\n"
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait()

    assert (process.returncode, err) == (141, b"")
    assert len(cli.ok("consume", "m-pipe/a").out.splitlines()) == 20_000


def test_an_exclusive_queue_is_only_taken_when_asked_to(cli: Cli) -> None:
    """E1, E3."""
    cli.ok("topic", "create", "m-own", "--subscription", "exclusive")
    cli.ok("publish", "m-own/a", "one")

    assert cli.ok("consume", "m-own/a").out == "one\n", "looking takes nothing from its owner"
    refused = cli.run("consume", "m-own/a", "--ack")
    assert refused.code == 1
    assert refused.err.startswith("tidemark: NOT_SUBSCRIBED: queue m-own/a is exclusive")

    taken = cli.ok("consume", "m-own/a", "--take-over", "--ack", "--json").json_lines
    assert [(each["payload"], each["epoch"] > 0) for each in taken] == [("one", True)]


def test_a_failure_half_way_says_what_was_stored(cli: Cli) -> None:
    """S3: a line beyond the message limit."""
    cli.ok("topic", "create", "m-half")

    failed = cli.run("publish", "m-half/a", "one", "two", "x" * 100_000)
    assert failed.code == 0, "arguments may be large"
    too_large = cli.run("publish", "m-half/b", stdin=b"one\n" + b"x" * 2_000_000)

    assert too_large.code == 1
    assert too_large.err.splitlines()[0] == "Published 1 message before it failed."
    assert too_large.err.splitlines()[1].startswith("tidemark: MESSAGE_TOO_LARGE: ")
    assert cli.ok("consume", "m-half/b").out == "one\n"


def test_wrong_arguments_are_refused_before_anything_is_sent(cli: Cli, tmp_path: Path) -> None:
    """S3."""
    missing = cli.run("publish", "m/a", "--file", str(tmp_path / "missing"))
    assert missing.code == 1
    assert "No such file or directory" in missing.err
    for arguments in (
        ("publish", "m/a", "x", "--file", "-"),
        ("publish", "m/a", "x", "--delay", "soon"),
        ("publish", "m/a", "x", "-H", "no-value"),
        ("consume", "m/a", "--follow"),
        ("consume", "m/a", "--take-over"),
        ("consume", "m/a", "--wait", "2h"),
    ):
        done = cli.run(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
    not_text = cli.run("consume", b"m/\xff")
    assert (not_text.code, not_text.err) == (2, "tidemark: an argument is not valid UTF-8\n")


def test_bytes_that_are_no_text_are_published_as_they_are(cli: Cli) -> None:
    cli.ok("topic", "create", "m-bytes")

    assert cli.run("publish", "m-bytes/a", b"\xff\xfe").code == 0

    (message,) = cli.ok("consume", "m-bytes/a", "--json").json_lines
    assert message["payload_base64"] == "//4="
    raw = subprocess.run(
        cli.command("consume", "m-bytes/a"), capture_output=True, timeout=TIMEOUT_S, check=True
    )
    assert raw.stdout == b"\xff\xfe\n"


def test_messages_that_cannot_be_printed_stay_in_the_queue(cli: Cli) -> None:
    """S2: the disk of the output is full."""
    cli.ok("topic", "create", "m-full")
    cli.ok("publish", "m-full/a", "one", "two")

    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(
            cli.command("consume", "m-full/a", "--ack"),
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
        )

    assert process.returncode == 5
    assert process.stderr == b"tidemark: input or output failed: No space left on device\n"
    assert cli.ok("consume", "m-full/a", "--ack").out == "one\ntwo\n"
