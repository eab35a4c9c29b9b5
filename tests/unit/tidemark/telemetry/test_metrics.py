"""Metrics: names that do not rot, and attributes that do not grow."""

import ast
import re
from collections.abc import Iterator

from tests.support.repository import ROOT, documented_metrics, parsed
from tidemark.telemetry.metrics import OTHER, TOPICS_MAX, Tally, counter, observe

SERVICES = ("broker", "storage", "lifecycle", "retention")
NAME = re.compile(rf"tidemark\.({'|'.join(SERVICES)})(\.[a-z_]+)+")


def names_in_the_code() -> list[str]:
    """Every string in a service that is the name of a metric."""
    return [
        node.value
        for package in ("broker_svc", "storage_svc", "lifecycle_svc", "spark_batch")
        for path in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and NAME.fullmatch(node.value)
    ]


def test_every_metric_is_documented_once_and_no_other_is() -> None:
    """S4."""
    assert sorted(documented_metrics()) == sorted(names_in_the_code())


def test_a_metric_is_named_in_one_place() -> None:
    names = names_in_the_code()

    assert len(names) == len(set(names))
    assert len(names) > 40


def test_a_tally_counts_by_topic_whatever_the_queue() -> None:
    tally = Tally("action")

    for number in range(1000):
        tally.add(2, f"orders/{number}", "ack")
    tally.add(1, "orders", "nack")

    assert list(tally.read()) == [
        (2000, {"topic": "orders", "action": "ack"}),
        (1, {"topic": "orders", "action": "nack"}),
    ]


def test_topics_beyond_the_bound_count_together() -> None:
    tally = Tally()

    for number in range(TOPICS_MAX + 50):
        tally.add(1, f"topic-{number}/lite")
    tally.add(5, "topic-0")

    counts = {attributes["topic"]: count for count, attributes in tally.read()}
    assert len(counts) == TOPICS_MAX + 1
    assert counts["topic-0"] == 6
    assert counts[OTHER] == 50


def test_what_is_observed_is_not_kept_while_metrics_go_nowhere() -> None:
    asked: list[int] = []

    def read() -> Iterator[tuple[float, dict[str, str]]]:
        asked.append(1)
        yield 1, {}

    observe("gauge", "tidemark.test.gauge", "of a test", read)
    counter("tidemark.test.counter", "of a test").add(1)

    assert not asked
