"""The report: one self-contained HTML page about queues and retention.

Spark counts and `charts` draws; the page loads nothing when it is opened.
"""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the customary name

from pyspark_tidemark.filters import NO_FILTER
from spark_batch.charts import bars, columns
from spark_batch.passes.table_reader import read
from spark_batch.storage_client import find_partitions
from tidemark.clock import Clock

TOPICS_SHOWN: Final = 6
QUEUES_SHOWN: Final = 15
DAYS_SHOWN: Final = 14
ACTIVE_MS: Final = 600_000
"""A queue counts as active for this long after its last activity."""

_AGES: Final = (
    ("< 1 min", 60),
    ("< 10 min", 600),
    ("< 1 h", 3_600),
    ("< 6 h", 21_600),
    ("< 1 d", 86_400),
    ("< 7 d", 604_800),
)
_OLDEST: Final = "older"
_BANDS: Final = (*(name for name, _ in _AGES), _OLDEST)

# The charts that are counted together.
_AGE: Final = "age"
_REMOVED: Final = "removed"
_ACTIVITY: Final = "activity"

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #66727f; --page: #f6f7f9; --card: #fff;
  --c0: #2f6fb3; --c1: #e0893a; --c2: #4a9a63; --c3: #b0508a; --c4: #8a7a3a; --c5: #7a8794; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaef; --soft: #98a4b1; --page: #14181d;
  --card: #1d232a; --c0: #6aa5e6; --c1: #f0a860; --c2: #7cc795; --c3: #dd86bb; --c4: #c9b768;
  --c5: #9aa7b4; } }
* { box-sizing: border-box } body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif }
main { max-width: 1560px; margin: auto; padding: 24px; display: grid; gap: 20px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)) }
header { grid-column: 1 / -1 } h1 { margin: 0; font-size: 26px } h2 { margin: 0; font-size: 17px }
p { margin: 2px 0 12px; color: var(--soft) } section { background: var(--card); padding: 20px;
  border-radius: 10px }
.facts { display: flex; flex-wrap: wrap; gap: 12px 40px; margin: 12px 0 0 }
.facts div { color: var(--soft) } .facts b { display: block; font-size: 24px; color: var(--ink) }
svg { width: 100%; height: auto } text { font-size: 12px; fill: var(--soft) }
.name { text-anchor: end; fill: var(--ink) } .mid { text-anchor: middle }
.s0 { fill: var(--c0); background: var(--c0) } .s1 { fill: var(--c1); background: var(--c1) }
.s2 { fill: var(--c2); background: var(--c2) } .s3 { fill: var(--c3); background: var(--c3) }
.s4 { fill: var(--c4); background: var(--c4) } .s5 { fill: var(--c5); background: var(--c5) }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0;
  padding: 0; font-size: 13px } .legend i { display: inline-block; width: 11px; height: 11px;
  border-radius: 3px; margin-right: 6px }
"""


def write_report(spark: SparkSession, storage: str, output: Path, clock: Clock) -> None:
    """Read the cluster and write the page."""
    now_ms = clock.wall_ms()
    partitions = find_partitions(storage)

    def rows(table: str, columns: str) -> DataFrame:
        return read(spark, partitions, table, columns, NO_FILTER)

    counted = count_all(
        queues=rows("queues", "topic,messages,bytes,last_activity"),
        runs=rows("runs", "topic,messages,publish_time"),
        history=rows("history", "retention_type,messages,executed_at"),
        now_ms=now_ms,
    )
    queues = [each for each in counted if each.chart == _ACTIVITY]
    facts = {
        "queues": f"{sum(each.rows for each in queues):,}",
        "messages": f"{sum(each.messages for each in queues):,}",
        "stored": _bytes(sum(each.bytes for each in queues)),
    }
    sections = (
        (
            "Messages by age and topic",
            "Stored messages by publish time.",
            columns(by_age(counted), "messages"),
        ),
        (
            "What retention removed",
            f"Per day, for the last {DAYS_SHOWN} days with removals.",
            columns(removed(counted), "messages"),
        ),
        (
            "Idle and active queues",
            "Active: published, delivered or settled within ten minutes.",
            columns(activity(counted), "queues"),
        ),
        (
            "Largest queues",
            "By stored messages.",
            bars(largest(rows("queues", "lmq_name,messages")), "messages"),
        ),
    )
    output.write_text(page(facts, sections, now_ms), encoding="utf-8")


class Counted(NamedTuple):
    """The rows of a table for one name and one part of a chart."""

    chart: str
    name: str
    part: str
    rows: int
    messages: int
    bytes: int


def count_all(
    *, queues: DataFrame, runs: DataFrame, history: DataFrame, now_ms: int
) -> list[Counted]:
    """Count for all charts in one action: starting one costs more than reading a small cluster."""
    age_s = (F.lit(now_ms) - F.unix_millis("publish_time")) / 1000
    band = F.lit(_OLDEST)
    for name, seconds in reversed(_AGES):
        band = F.when(age_s < seconds, name).otherwise(band)
    active = F.unix_millis("last_activity") > now_ms - ACTIVE_MS
    day = F.date_format("executed_at", "yy-MM-dd")
    kept = history.where("retention_type not in ('old_records', 'inactive_queue')")
    rows = (
        _rows(runs, _AGE, band, F.col("topic"))
        .unionAll(_rows(kept, _REMOVED, day, F.col("retention_type")))
        .unionAll(
            _rows(
                queues,
                _ACTIVITY,
                F.col("topic"),
                F.when(active, "active").otherwise("idle"),
                F.col("bytes"),
            )
        )
    )
    counted = rows.groupBy("chart", "name", "part").agg(
        F.count("*"), F.sum("messages"), F.sum("bytes")
    )
    return [Counted(*row) for row in counted.collect()]


def _rows(
    frame: DataFrame, chart: str, name: Column, part: Column, stored: Column | None = None
) -> DataFrame:
    return frame.select(
        F.lit(chart).alias("chart"),
        name.alias("name"),
        part.alias("part"),
        "messages",
        (F.lit(0).cast("bigint") if stored is None else stored).alias("bytes"),
    )


def by_age(counted: Iterable[Counted]) -> dict[str, dict[str, int]]:
    """Messages by age, then by topic; topics beyond the largest are combined."""
    ages = [each for each in counted if each.chart == _AGE]
    sizes: Counter[str] = Counter()
    for each in ages:
        sizes[each.part] += each.messages
    shown = sorted(sizes, key=lambda topic: (-sizes[topic], topic))[: TOPICS_SHOWN - 1]
    found: dict[str, Counter[str]] = {name: Counter() for name in _BANDS}
    for each in ages:
        found[each.name][each.part if each.part in shown else "(others)"] += each.messages
    return {name: dict(parts) for name, parts in found.items()}


def removed(counted: Iterable[Counted]) -> dict[str, dict[str, int]]:
    """Messages by day, then by retention type."""
    days: dict[str, dict[str, int]] = {}
    for each in counted:
        if each.chart == _REMOVED:
            days.setdefault(each.name, {})[each.part] = each.messages
    return {day: days[day] for day in sorted(days)[-DAYS_SHOWN:]}


def activity(counted: Iterable[Counted]) -> dict[str, dict[str, int]]:
    """Queues by topic, then by recent activity."""
    topics: dict[str, dict[str, int]] = {}
    for each in counted:
        if each.chart == _ACTIVITY:
            topics.setdefault(each.name, {})[each.part] = each.rows
    most = sorted(topics.items(), key=lambda topic: (-sum(topic[1].values()), topic[0]))
    return dict(most[:TOPICS_SHOWN])


def largest(queues: DataFrame) -> dict[str, int]:
    """The queues with the most messages."""
    full = queues.where("messages > 0").orderBy(F.desc("messages"), "lmq_name")
    return {row["lmq_name"]: row["messages"] for row in full.limit(QUEUES_SHOWN).collect()}


def page(facts: dict[str, str], sections: tuple[tuple[str, str, str], ...], now_ms: int) -> str:
    """The whole page."""
    at = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    shown = "".join(f"<div><b>{value}</b>{escape(name)}</div>" for name, value in facts.items())
    cards = "".join(
        f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{chart}</section>"
        for title, text, chart in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tidemark: queues and retention</title><style>{_STYLE}</style></head><body><main>"
        f'<header><h1>Queues and retention</h1><p>{at}</p><div class="facts">{shown}</div></header>'
        f"{cards}</main></body></html>\n"
    )


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
