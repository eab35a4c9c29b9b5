"""The options of the data source, checked and turned into a filter.

Pure. An option that is unknown or cannot be applied to the table is refused with its name: a
misspelt one would read everything.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pyspark_tidemark import filters
from pyspark_tidemark.filters import NO_FILTER, ScanFilter
from pyspark_tidemark.tables import TABLES, TableShape

_QUEUE_OPTIONS: Final = ("topic", "prefix", "queue")
OPTIONS: Final = ("storage", "table", "columns", "partition", *_QUEUE_OPTIONS, "after", "before")

_ADDRESS: Final = re.compile(r"(?!https?:)\S*[^\s:]:[0-9]{1,5}|unix:\S+")


class ReadOptions(NamedTuple):
    """The options of a read."""

    storage: str
    table: str
    columns: list[str]
    scan_filter: ScanFilter

    @property
    def shape(self) -> TableShape:
        return TABLES[self.table]


def read_options(given: Mapping[str, str]) -> ReadOptions:
    """Raises ValueError with the name of the option."""
    unknown = sorted(set(given) - set(OPTIONS))
    if unknown:
        raise ValueError(f"unknown options {unknown}; known are {', '.join(OPTIONS)}")
    table = given.get("table", "")
    if table not in TABLES:
        raise ValueError(f'option "table" is one of {", ".join(TABLES)}, not {table!r}')
    if not given.get("storage"):
        raise ValueError('option "storage" is missing: the address of the storage service')
    columns = _listed(given.get("columns", ""))
    if len(set(columns)) < len(columns):
        raise ValueError(f'option "columns" names a column twice: {given["columns"]!r}')
    return ReadOptions(_addresses(given["storage"]), table, columns, _filter(given, TABLES[table]))


def _addresses(text: str) -> str:
    """gRPC would take another port where none is given, and look up a URL as the name of a host."""
    found = _some("storage", text)
    if not found or not all(_ADDRESS.fullmatch(each) for each in found):
        raise ValueError(f'option "storage" is host:port, or several with commas, not {text!r}')
    return ",".join(found)


def _filter(given: Mapping[str, str], table: TableShape) -> ScanFilter:
    for name in () if table.has_queues else _QUEUE_OPTIONS:
        if name in given:
            raise ValueError(f'option "{name}" cannot narrow this table')
    scan_filter = NO_FILTER
    if "topic" in given:
        scan_filter = replace(scan_filter, topics=tuple(_topics(given["topic"])))
    if "queue" in given:
        # A name may contain a comma, so that this option takes one queue.
        scan_filter = replace(scan_filter, queues=(_text("queue", given["queue"]),))
    if "prefix" in given:
        scan_filter = replace(scan_filter, prefix=_text("prefix", given["prefix"]))
    if "partition" in given:
        scan_filter = replace(scan_filter, partitions=tuple(_numbers(given["partition"])))
    if "after" in given:
        scan_filter = filters.after(scan_filter, _ms("after", given["after"]))
    if "before" in given:
        scan_filter = filters.before(scan_filter, _ms("before", given["before"]))
    return scan_filter


def _listed(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _some(name: str, text: str) -> list[str]:
    return _listed(_text(name, text.strip()))


def _topics(text: str) -> list[str]:
    found = _some("topic", text)
    if any("/" in each for each in found):
        raise ValueError(f'option "topic" is not {text!r}: a queue is chosen by option "queue"')
    return found


def _text(name: str, text: str) -> str:
    if not text:
        raise ValueError(f'option "{name}" is empty')
    return text


def _numbers(text: str) -> list[int]:
    found = _some("partition", text)
    if not all(each.isascii() and each.isdigit() for each in found):
        raise ValueError(f'option "partition" is a number or several, such as "0,3", not {text!r}')
    return sorted({int(each) for each in found})


def _ms(name: str, text: str) -> int:
    """Unix milliseconds, rounded up: stored times are whole ones, so that this is exact."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        example = "2026-01-31T12:00:00Z"
        raise ValueError(f'option "{name}" is a time such as {example}, not {text!r}') from None
    aware = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    us = int(aware.replace(microsecond=0).timestamp()) * 1_000_000 + aware.microsecond
    return max(0, -(-us // 1000))
