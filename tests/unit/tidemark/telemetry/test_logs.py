"""Logs: what a line holds and never holds, and that writing it blocks no caller."""

import enum
import io
import json
import logging
import os
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.wrappers_pb2 import BytesValue
from hypothesis import given
from hypothesis import strategies as st

from tidemark import telemetry
from tidemark.settings import TelemetrySettings
from tidemark.telemetry.logs import JsonFormatter, LineHandler, TextFormatter, loggable

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
PAYLOAD = b"the secret payload"


def record(message: str = "hello", *arguments: Any, **extras: Any) -> logging.LogRecord:
    made = logging.LogRecord("some.module", logging.INFO, "file.py", 1, message, arguments, None)
    made.created = 1_800_000_000.25
    vars(made).update(extras)
    return made


def as_json(made: logging.LogRecord) -> dict[str, Any]:
    line = JsonFormatter("broker", "broker-0").format(made)
    assert "\n" not in line
    fields = json.loads(line, parse_constant=pytest.fail)
    assert isinstance(fields, dict)
    return fields


def as_text(made: logging.LogRecord) -> str:
    return TextFormatter("broker", "broker-0").format(made)


class Colour(enum.IntEnum):
    RED = 1


class TestLogLines:
    """S4: structured logs with trace ids, and no payloads."""

    def test_a_line_says_when_how_bad_where_and_what(self) -> None:
        assert as_json(record("published %d", 3, lmq_name="orders/alice")) == {
            "time": "2027-01-15T08:00:00.250Z",
            "level": "info",
            "logger": "some.module",
            "message": "published 3",
            "service": "broker",
            "instance": "broker-0",
            "lmq_name": "orders/alice",
        }

    def test_text_for_people_says_the_same(self) -> None:
        assert as_text(record("published %d", 3, lmq_name="orders/alice")) == (
            "2027-01-15T08:00:00.250Z INFO    broker/broker-0 some.module: "
            "published 3 lmq_name=orders/alice"
        )

    def test_a_line_carries_the_trace_it_was_logged_in(self) -> None:
        context = telemetry.context_from_traceparent(TRACEPARENT)
        with telemetry.span(telemetry.tracer("test"), "work", context=context):
            fields = as_json(record())
            text = as_text(record())

        assert (fields["trace_id"], fields["span_id"]) == (TRACE_ID, SPAN_ID)
        assert f"trace_id={TRACE_ID} span_id={SPAN_ID}" in text

    @pytest.mark.parametrize(
        "value",
        [
            PAYLOAD,
            bytearray(PAYLOAD),
            memoryview(PAYLOAD),
            [PAYLOAD],
            {"body": (PAYLOAD,)},
            BytesValue(value=PAYLOAD),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_payloads_are_shown_by_their_size(self, value: object) -> None:
        made = record("got %s", value, value=value)
        if isinstance(value, list | dict):
            made.args = ()

        for line in (json.dumps(as_json(made)), as_text(made)):
            assert "secret" not in line
            assert "bytes>" in line

    def test_unknown_objects_are_shown_by_their_type(self) -> None:
        class Envelope:
            def __repr__(self) -> str:
                return PAYLOAD.decode()

        assert as_json(record(envelope=Envelope()))["envelope"] == "<Envelope>"

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (None, None),
            (True, True),
            (7, 7),
            (1.5, 1.5),
            (float("nan"), "nan"),
            (Colour.RED, "RED"),
            (Path("a/b"), "a/b"),
            (KeyError("x"), "KeyError: 'x'"),
            ({"a": [1, ("b",)]}, {"a": [1, ["b"]]}),
        ],
    )
    def test_known_values_keep_their_shape(self, value: object, shown: object) -> None:
        assert loggable(value) == shown

    def test_endless_nesting_ends(self) -> None:
        nested: list[object] = []
        nested.append(nested)

        assert loggable(nested) == [[[["<list>"]]]]

    def test_an_extra_field_never_replaces_one_of_ours(self) -> None:
        fields = as_json(record(service="impostor", time="never"))

        assert fields["service"] == "broker"
        assert (fields["service_"], fields["time_"]) == ("impostor", "never")

    def test_an_exception_is_one_field(self) -> None:
        made = record("failed")
        try:
            raise KeyError("lost")
        except KeyError:
            made.exc_info = sys.exc_info()

        fields = as_json(made)

        assert fields["message"] == "failed"
        assert fields["exception"].startswith("Traceback")
        assert fields["exception"].endswith("KeyError: 'lost'")
        assert as_text(made).endswith("KeyError: 'lost'")

    def test_arguments_that_do_not_fit_do_not_hide_the_event(self) -> None:
        assert as_json(record("%d of %d", "x"))["message"].startswith("%d of %d")

    def test_a_very_long_text_loses_its_middle(self) -> None:
        message = as_json(record("<" + "x" * 1_000_000 + ">"))["message"]

        assert len(message) < 20_000
        assert (message[0], message[-1]) == ("<", ">")

    @given(st.text(alphabet=st.characters()))
    def test_no_text_can_forge_a_line(self, text: str) -> None:
        made = record(text, name=text)

        assert as_json(made)["message"] == text
        assert len(as_text(made).splitlines()) == 1


def read_lines(descriptor: int) -> list[dict[str, Any]]:
    """Everything up to the end of the pipe."""
    with open(descriptor, encoding="ascii") as reader:
        return [json.loads(line) for line in reader]


class TestLogHandler:
    def test_lines_are_written_in_order(self) -> None:
        read_end, write_end = os.pipe()
        handler = LineHandler(write_end, JsonFormatter("broker", "0"))

        for number in range(200):
            handler.handle(record("line %d", number))
        handler.close()

        messages = [line["message"] for line in read_lines(read_end)]
        assert messages == [f"line {number}" for number in range(200)]

    def test_a_stalled_stderr_blocks_no_caller_and_the_lost_lines_are_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tidemark.telemetry.logs._LINES_WAITING_MAX", 5)
        read_end, write_end = os.pipe()
        handler = LineHandler(write_end, JsonFormatter("broker", "0"))
        line_count, pipe_bytes = 100, 64 * 1024

        for _ in range(line_count):
            handler.handle(record("x" * (pipe_bytes // 4)))
        with futures.ThreadPoolExecutor() as threads:
            reading = threads.submit(read_lines, read_end)
            handler.flush()
            handler.handle(record("it goes on"))
            handler.handle(record("last"))
            handler.close()
            lines = reading.result()

        written = sum(line["message"].startswith("x") for line in lines)
        lost = sum(line.get("lines", 0) for line in lines)
        assert lost > 0
        assert written + lost == line_count
        assert lines[-1]["message"] == "last"

    def test_a_stderr_without_a_reader_is_survived(self) -> None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        handler = LineHandler(write_end, JsonFormatter("broker", "0"))

        handler.handle(record())
        handler.flush()
        handler.handle(record())
        handler.close()
        handler.close()
        handler.handle(record("after the end"))

    @pytest.mark.parametrize("stderr", [None, io.StringIO()])
    def test_a_process_without_stderr_logs_nowhere(
        self, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO | None
    ) -> None:
        monkeypatch.setattr(sys, "stderr", stderr)

        running = telemetry.setup("broker", TelemetrySettings())
        logging.getLogger("some.module").warning("hello")
        running.shutdown()

    @pytest.mark.parametrize("stderr_closed", [False, True])
    def test_setup_logs_to_stderr_and_shutdown_leaves_no_trace(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stderr_closed: bool
    ) -> None:
        root = logging.getLogger()
        before = (root.level, list(root.handlers))
        threads = set(threading.enumerate())
        stderr = (tmp_path / "stderr").open("w")
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setenv("TIDEMARK_PARTITONS", "8")

        running = telemetry.setup("broker", TelemetrySettings(log_level="debug"))
        if stderr_closed:
            stderr.close()
        logging.getLogger("some.module").debug("hello", extra={"partition": 3})
        running.shutdown()
        running.shutdown()

        stderr.close()
        lines = (tmp_path / "stderr").read_text().splitlines()
        warning, hello = (json.loads(line) for line in lines)
        assert (warning["level"], warning["variable"]) == ("warning", "TIDEMARK_PARTITONS")
        assert (hello["level"], hello["message"], hello["partition"]) == ("debug", "hello", 3)
        assert (root.level, list(root.handlers)) == before
        assert set(threading.enumerate()) <= threads  # those of others may end meanwhile
