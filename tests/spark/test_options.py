"""The options of the data source: what they mean, and which are refused (S3)."""

from functools import partial
from typing import Any

import pytest

from pyspark_tidemark.filters import ScanFilter
from pyspark_tidemark.options import read_options
from pyspark_tidemark.source import TidemarkSource

NOON_MS = 1_767_268_800_000  # 2026-01-01T12:00:00Z


def read(**given: str) -> Any:
    return read_options({"storage": "s:1", "table": "runs", **given})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ScanFilter()),
        ({"topic": "b, a"}, ScanFilter(topics=("b", "a"))),
        ({"queue": "a/x,y"}, ScanFilter(queues=("a/x,y",))),
        ({"prefix": "a/"}, ScanFilter(prefix="a/")),
        ({"partition": "3,0"}, ScanFilter(partitions=(0, 3))),
        ({"after": "2026-01-01T12:00:00Z"}, ScanFilter(after_ms=NOON_MS)),
        ({"after": "2026-01-01 12:00"}, ScanFilter(after_ms=NOON_MS)),
        ({"before": "2026-01-01T13:00:00+01:00"}, ScanFilter(before_ms=NOON_MS)),
        ({"before": "2026-01-01T12:00:00.000001Z"}, ScanFilter(before_ms=NOON_MS + 1)),
        ({"after": "1970-01-01", "before": "1970-01-01"}, ScanFilter(before_ms=0)),
    ],
)
def test_an_option_narrows_what_storage_reads(given: dict[str, str], expected: ScanFilter) -> None:
    """P2."""
    assert read(**given).scan_filter == expected


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"topics": "a"}, r"unknown options \['topics'\]"),
        ({"topic": " "}, '"topic" is empty'),
        ({"queue": ""}, '"queue" is empty'),
        ({"prefix": ""}, '"prefix" is empty'),
        ({"partition": "-1"}, '"partition" is a number'),
        ({"after": "yesterday"}, '"after" is a time'),
        ({"storage": ""}, '"storage" is missing'),
        ({"storage": " , "}, '"storage" is host:port'),
        ({"storage": "a:1,b"}, '"storage" is host:port, .* not .a:1,b.'),
        ({"storage": "http://a:1"}, '"storage" is host:port'),
        ({"topic": "a/x"}, 'by option "queue"'),
        ({"columns": "topic,topic"}, '"columns" names a column twice'),
        ({"table": "system_metrics", "topic": "a"}, '"topic" cannot narrow'),
        ({"table": "nonsense"}, "is one of runs, groups"),
    ],
)
def test_an_option_that_cannot_be_applied_is_refused(given: dict[str, str], why: str) -> None:
    """S3: ignored, it would read everything."""
    with pytest.raises(ValueError, match=why):
        read(**given)


@pytest.mark.parametrize("address", ["a:1", "[::1]:1", "a.b-c:65535", "dns:///a:1", "unix:/a"])
def test_storage_is_one_address_or_several(address: str) -> None:
    """P1: all that gRPC takes."""
    assert read(storage=f"{address}, b:2").storage == f"{address},b:2"


def test_a_stream_is_refused_whatever_spark_asks_for_first() -> None:
    """S3: 4.1 asks for the latest offset first, without arguments."""
    source = TidemarkSource({"storage": "127.0.0.1:1", "table": "runs"})
    reader: Any = source.streamReader(source.schema())

    for ask in (
        reader.initialOffset,
        reader.latestOffset,
        partial(reader.latestOffset, {}, None),
    ):
        with pytest.raises(RuntimeError, match="does not support readStream yet: read it with"):
            ask()
