"""The report: one HTML page about queues and retention, with everything it needs inside.

Spark counts, `charts` draws; nothing is fetched when the page is opened.
"""

from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - everybody's name for it

from spark_batch import source
from spark_batch.charts import bars, columns
from tidemark.clock import Clock

TOPICS_SHOWN: Final = 6
QUEUES_SHOWN: Final = 15
DAYS_SHOWN: Final = 14
ACTIVE_MS: Final = 600_000
"""A queue counts as active for this long after something happened."""

_AGES: Final = (
    ("< 1 min", 60),
    ("< 10 min", 600),
    ("< 1 h", 3_600),
    ("< 6 h", 21_600),
    ("< 1 d", 86_400),
    ("< 7 d", 604_800),
)
_OLDEST: Final = "older"

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

    def read(table: str, columns: str) -> DataFrame:
        options = {"storage": storage, "table": table, "columns": columns}
        return spark.read.format(source.NAME).options(**options).load()

    now_ms = clock.wall_ms()
    queues = read("queues", "topic,lmq_name,messages,bytes,last_activity").cache()
    totals = queues.agg(
        F.count("*").alias("queues"),
        F.coalesce(F.sum("messages"), F.lit(0)).alias("messages"),
        F.coalesce(F.sum("bytes"), F.lit(0)).alias("bytes"),
    ).first()
    assert totals is not None, "an aggregate without groups has one row"
    facts = {
        "queues": f"{totals['queues']:,}",
        "messages": f"{totals['messages']:,}",
        "stored": _bytes(totals["bytes"]),
    }
    sections = (
        (
            "Messages by age and topic",
            "When what is stored now was published.",
            columns(by_age(read("runs", "topic,messages,publish_time"), now_ms), "messages"),
        ),
        (
            "What retention removed",
            f"Per day, over the last {DAYS_SHOWN} days with any.",
            columns(removed(read("history", "retention_type,messages,executed_at")), "messages"),
        ),
        (
            "Idle against active queues",
            "Active: published, delivered or settled within ten minutes.",
            columns(activity(queues, now_ms), "queues"),
        ),
        (
            "Largest queues",
            "By messages that are stored.",
            bars(largest(queues), "messages"),
        ),
    )
    output.write_text(page(facts, sections, now_ms), encoding="utf-8")
    queues.unpersist()


def by_age(runs: DataFrame, now_ms: int) -> dict[str, dict[str, int]]:
    """Messages by age, then by topic; topics beyond the largest are one."""
    age_s = (F.lit(now_ms) - F.unix_millis("publish_time")) / 1000
    band = F.lit(_OLDEST)
    for name, seconds in reversed(_AGES):
        band = F.when(age_s < seconds, name).otherwise(band)
    found = _table(runs.withColumn("band", band), F.col("band"), F.sum("messages"))
    return {name: found.get(name, {}) for name in (*(age for age, _ in _AGES), _OLDEST)}


def removed(history: DataFrame) -> dict[str, dict[str, int]]:
    """Messages by day, then by retention type."""
    day = F.date_format("executed_at", "MM-dd")
    found = (
        history.where("retention_type not in ('old_records', 'inactive_queue')")
        .groupBy(day.alias("day"), F.col("retention_type").alias("part"))
        .agg(F.sum("messages").alias("value"))
        .collect()
    )
    days: dict[str, dict[str, int]] = {}
    for row in sorted(found, key=lambda row: row["day"]):
        days.setdefault(row["day"], {})[row["part"]] = row["value"]
    return dict(list(days.items())[-DAYS_SHOWN:])


def activity(queues: DataFrame, now_ms: int) -> dict[str, dict[str, int]]:
    """Queues by topic, then by whether anything happened lately."""
    active = F.unix_millis("last_activity") > now_ms - ACTIVE_MS
    kind = F.when(active, "active").otherwise("idle")
    found = queues.groupBy("topic", kind.alias("part")).agg(F.count("*").alias("value")).collect()
    topics: dict[str, dict[str, int]] = {}
    for row in found:
        topics.setdefault(row["topic"], {})[row["part"]] = row["value"]
    most = sorted(topics.items(), key=lambda topic: (-sum(topic[1].values()), topic[0]))
    return dict(most[:TOPICS_SHOWN])


def largest(queues: DataFrame) -> dict[str, int]:
    """The queues with most messages."""
    full = queues.where("messages > 0").orderBy(F.desc("messages"), "lmq_name")
    return {row["lmq_name"]: row["messages"] for row in full.limit(QUEUES_SHOWN).collect()}


def _table(frame: DataFrame, by: Column, value: Column) -> dict[str, dict[str, int]]:
    rows = frame.groupBy(by.alias("name"), "topic").agg(value.alias("value")).collect()
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row["topic"]] = sizes.get(row["topic"], 0) + row["value"]
    shown = sorted(sizes, key=lambda topic: (-sizes[topic], topic))[: TOPICS_SHOWN - 1]
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        part = row["topic"] if row["topic"] in shown else "(others)"
        parts = found.setdefault(row["name"], {})
        parts[part] = parts.get(part, 0) + row["value"]
    return found


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
