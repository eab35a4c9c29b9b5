"""What is to be published: lines as they arrive, cut into runs that fit one call."""

import os
import threading
from pathlib import Path

import pytest

from tidemark import limits
from tidemark.cli.commands import publish_input
from tidemark.errors import MessageTooLarge


def test_runs_hold_a_thousand_messages_and_keep_their_order() -> None:
    payloads = [b"%d" % number for number in range(2_500)]

    runs = list(publish_input.runs_of(payloads))

    assert [len(run) for run in runs] == [1000, 1000, 500]
    assert [payload for run in runs for payload in run] == payloads


def test_runs_stay_below_a_mebibyte_unless_one_message_is_larger() -> None:
    large, small = b"x" * 2_000_000, b"y" * 600_000

    runs = list(publish_input.runs_of([small, small, large, b"z"]))

    assert [[len(payload) for payload in run] for run in runs] == [
        [600_000],
        [600_000],
        [2_000_000],
        [1],
    ]


async def test_lines_lose_their_ends_and_the_last_needs_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"one\r\n\ntwo\nlast")

    lines = [line async for some in publish_input.lines_of(tmp_path / "file") for line in some]

    assert lines == [b"one", b"", b"two", b"last"]


async def test_a_file_larger_than_one_read_is_read_to_its_end(tmp_path: Path) -> None:
    content = b"".join(b"line %d\n" % number for number in range(90_000))
    (tmp_path / "file").write_bytes(content)

    lines = [line async for some in publish_input.lines_of(tmp_path / "file") for line in some]

    assert b"".join(line + b"\n" for line in lines) == content
    assert await publish_input.whole(tmp_path / "file") == content
    assert publish_input.total_bytes([tmp_path / "file"]) == len(content)


async def test_an_endless_line_is_refused_once_it_is_too_long() -> None:
    """The whole input was read into memory."""
    with pytest.raises(MessageTooLarge):
        async for _ in publish_input.lines_of(Path("/dev/zero")):
            pass
    with pytest.raises(MessageTooLarge):
        await publish_input.whole(Path("/dev/zero"))


async def test_the_longest_line_may_end_with_a_carriage_return(tmp_path: Path) -> None:
    line = b"x" * limits.MESSAGE_BYTES_MAX
    (tmp_path / "file").write_bytes(line + b"\r\n")

    assert [each async for each in publish_input.lines_of(tmp_path / "file")] == [[line]]


async def test_lines_are_there_before_their_writer_is_done(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    may_end = threading.Event()

    def write() -> None:
        with (tmp_path / "pipe").open("wb", buffering=0) as pipe:
            pipe.write(b"one\ntwo\nhal")
            may_end.wait(30)
            pipe.write(b"f\n")

    writer = threading.Thread(target=write)
    writer.start()
    lines = publish_input.lines_of(tmp_path / "pipe")

    first = await anext(lines)
    may_end.set()
    rest = [line async for some in lines for line in some]

    writer.join()
    assert (first, rest) == ([b"one", b"two"], [b"half"])
    assert publish_input.total_bytes([tmp_path / "pipe"]) is None


async def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        await publish_input.whole(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        await publish_input.whole(tmp_path)
