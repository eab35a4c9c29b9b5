"""Arguments of public calls: what is taken, what is refused, and under which name."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark import limits
from tidemark.client import arguments
from tidemark.errors import ClientError, HeadersTooLarge, InvalidArgument, InvalidName
from tidemark.topics import MaxWaitAction, Subscription


class Index:
    """A whole number of another library."""

    def __index__(self) -> int:
        return 7


@pytest.mark.parametrize("value", [True, 1.0, 1.5, float("nan"), "1", b"1", None, [], 1j])
def test_only_whole_numbers_are_numbers(value: object) -> None:
    """K3: a bool is none, and a float is none even where it is whole."""
    with pytest.raises(InvalidArgument) as refused:
        arguments.check_int("credit", value, 0, 10)

    assert refused.value.metadata["field"] == "credit"
    assert type(value).__name__ in str(refused.value)


def test_numbers_keep_to_their_range() -> None:
    """K3."""
    assert arguments.check_int("credit", 1, 1, 10) == 1
    assert arguments.check_int("credit", Index(), 1, 10) == 7
    for value in (0, 11, 2**70, -(2**70), 10**10_000):
        with pytest.raises(InvalidArgument, match="credit is 1 to 10"):
            arguments.check_int("credit", value, 1, 10)


@given(st.integers(0, 10**12))
def test_a_timedelta_is_as_good_as_milliseconds_and_never_becomes_shorter(micros: int) -> None:
    """K3."""
    duration_ms = arguments.check_ms("wait_ms", timedelta(microseconds=micros), 0, 10**12)

    assert 0 <= duration_ms * 1000 - micros < 1000
    assert arguments.check_ms("wait_ms", duration_ms, 0, 10**12) == duration_ms


@pytest.mark.parametrize(
    "value", [1500.0, "1500", None, True, timedelta(-1), timedelta.max, -1, 2**70]
)
def test_what_is_no_duration_is_refused_with_the_name_of_the_argument(value: object) -> None:
    """K3."""
    with pytest.raises(InvalidArgument) as refused:
        arguments.check_delay_ms(value, limits.DELAY_MS_MAX)

    assert refused.value.metadata["field"] == "delay_ms"


def test_a_visibility_timeout_of_zero_is_that_of_the_topic_where_there_is_one() -> None:
    """K3."""
    assert arguments.check_visibility_ms(timedelta(0), optional=True) == 0
    assert arguments.check_visibility_ms(timedelta(seconds=1), optional=False) == 1000
    for value in (0, 49, limits.VISIBILITY_TIMEOUT_MS_MAX + 1):
        with pytest.raises(InvalidArgument, match="visibility_ms"):
            arguments.check_visibility_ms(value, optional=False)


@pytest.mark.parametrize("value", [None, 5, b"orders", ["orders"], "orders/\ud800", "", "a b", "/"])
def test_what_is_no_name_of_a_queue_is_refused(value: object) -> None:
    """K3."""
    with pytest.raises((InvalidArgument, InvalidName)):
        arguments.check_lmq_name(value)


@pytest.mark.parametrize("value", ["orders", b"orders", None, 5, [], [5], [None], iter([])])
def test_queues_are_named_in_a_list_that_is_not_empty(value: object) -> None:
    """K3."""
    with pytest.raises(InvalidArgument) as refused:
        arguments.check_lmq_names(value)

    assert refused.value.metadata["field"] == "lmq_names"


def test_queues_may_come_from_a_generator_but_not_from_an_endless_one() -> None:
    """K3."""

    def endless() -> Any:
        while True:
            yield "orders"

    assert arguments.check_lmq_names(f"orders/{n}" for n in range(2)) == ["orders/0", "orders/1"]
    with pytest.raises(InvalidArgument, match="at most"):
        arguments.check_lmq_names(endless())


@pytest.mark.parametrize("value", ["text", bytearray(b"x"), memoryview(b"x"), 5, None, [b"x"]])
def test_a_payload_is_bytes(value: object) -> None:
    """K3."""
    with pytest.raises(InvalidArgument) as refused:
        arguments.check_message(value, None)

    assert refused.value.metadata["field"] == "payload"
    assert ("encode" in str(refused.value)) == isinstance(value, str)


@pytest.mark.parametrize(
    "value", [5, "k=v", [("k", "v")], {1: "v"}, {"k": 1}, {"k": None}, {"k": b"v"}, {"k": "\ud800"}]
)
def test_headers_are_texts_by_texts(value: object) -> None:
    """K3."""
    with pytest.raises(InvalidArgument) as refused:
        arguments.check_message(b"x", value)

    assert refused.value.metadata["field"] == "headers"


def test_headers_keep_to_their_limits() -> None:
    """S3."""
    arguments.check_message(b"x", {"k": "v" * (limits.HEADERS_BYTES_MAX - 1)})
    with pytest.raises(HeadersTooLarge):
        arguments.check_message(b"x", {"k": "v" * limits.HEADERS_BYTES_MAX})


def test_callbacks_are_plain_functions() -> None:
    """K3: a coroutine function would be called, and never awaited."""

    async def awaited(_: object) -> None: ...

    arguments.check_callback("on_evicted", None)
    arguments.check_callback("on_evicted", print)
    wrongs: list[Any] = [5, "print", awaited]
    for wrong in wrongs:
        with pytest.raises(InvalidArgument) as refused:
            arguments.check_callback("on_evicted", wrong)
        assert refused.value.metadata["field"] == "on_evicted"


@pytest.mark.parametrize(
    "value", ["", "localhost", "localhost:", ":1", "a b:1", "a:99999", [], [1], None, 7400, [""]]
)
def test_addresses_are_hosts_with_ports(value: object) -> None:
    """K3."""
    with pytest.raises(InvalidArgument) as refused:
        arguments.check_addresses(value)

    assert refused.value.metadata["field"] == "addresses"
    assert arguments.check_addresses(("a:1", "[::1]:2")) == ["a:1", "[::1]:2"]


def test_settings_are_taken_in_their_own_types_and_durations_as_timedeltas() -> None:
    """K3."""
    given = {
        "subscription": "exclusive",
        "max_wait_action": MaxWaitAction.DEAD_LETTER,
        "visibility_timeout_ms": timedelta(seconds=2),
        "retention_seconds": timedelta(days=1, microseconds=1),
        "idle_after_ms": 0,
        "fairness_weights": {"vip": 9},
        "dead_letter_topic": "",
    }

    assert arguments.check_settings(given) == {
        "subscription": Subscription.EXCLUSIVE,
        "max_wait_action": MaxWaitAction.DEAD_LETTER,
        "visibility_timeout_ms": 2000,
        "retention_seconds": 86_401,
        "idle_after_ms": 0,
        "fairness_weights": {"vip": 9},
        "dead_letter_topic": "",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("subscription", "both"),
        ("subscription", []),
        ("max_attempts", 2.0),
        ("max_attempts", True),
        ("max_attempts", 2**40),
        ("partitions", 100_000),
        ("visibility_timeout_ms", 5),
        ("retention_seconds", "a day"),
        ("retention_enabled", 1),
        ("dead_letter_topic", None),
        ("dead_letter_topic", "a/b"),
        ("fairness_weights", {"vip": 0}),
        ("fairness_weights", {5: 5}),
        ("fairness_weights", [("vip", 5)]),
        ("queue_messages_max", 2**64),
        ("colour", "red"),
    ],
)
def test_settings_that_no_topic_can_have_are_refused_by_name(name: str, value: object) -> None:
    """K3."""
    with pytest.raises(ClientError) as refused:
        arguments.check_settings({name: value})

    assert refused.value.metadata["field"] in (name, "topic", "fairness_key")


@given(st.dictionaries(st.text(), st.integers() | st.floats() | st.text() | st.none()))
def test_settings_of_any_kind_are_taken_or_refused(settings: dict[str, object]) -> None:
    """K3: nothing else is raised."""
    with suppress(ClientError):
        arguments.check_settings(settings)
