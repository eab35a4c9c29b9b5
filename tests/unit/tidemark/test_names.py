"""Names: which are legal, how an lmq_name is taken apart, and where a queue lives."""

import collections
import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemark import limits
from tidemark.errors import InvalidName
from tidemark.names import (
    LmqName,
    partition_of,
    validate_client_id,
    validate_fairness_key,
    validate_group,
    validate_producer_id,
    validate_topic,
)

Validate = Callable[[str], object]

topics = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", fullmatch=True)
lites = st.text(min_size=1, max_size=300).filter(
    lambda text: (
        text.isprintable()
        and "/" not in text
        and text == text.strip(" ")
        and len(text.encode(errors="replace")) <= limits.LITE_NAME_BYTES_MAX
    )
)

PLAIN = [
    pytest.param("topic", validate_topic, limits.TOPIC_NAME_BYTES_MAX, id="topic"),
    pytest.param("group", validate_group, limits.GROUP_NAME_BYTES_MAX, id="group"),
]
FREE = [
    pytest.param("client_id", validate_client_id, limits.CLIENT_ID_BYTES_MAX, id="client_id"),
    pytest.param(
        "producer_id", validate_producer_id, limits.PRODUCER_ID_BYTES_MAX, id="producer_id"
    ),
    pytest.param(
        "fairness_key", validate_fairness_key, limits.FAIRNESS_KEY_BYTES_MAX, id="fairness_key"
    ),
    pytest.param(
        "lite",
        lambda text: LmqName("topic", text),
        limits.LITE_NAME_BYTES_MAX,
        id="lite",
    ),
]
HOSTILE = [
    "a\x00b",
    "a\nb",
    "a\r",
    "\ta",
    "\x7f",
    "\x85",
    "a\ud800",
    "a\u2028b",
    "\u202ea",
    "\u200b",
]


def refusal(check: Callable[[], object]) -> InvalidName:
    with pytest.raises(InvalidName) as caught:
        check()
    return caught.value


@given(topics, st.none() | lites)
def test_every_name_survives_being_written_and_parsed(topic: str, lite: str | None) -> None:
    name = LmqName(topic, lite)

    assert LmqName.parse(str(name)) == name
    assert pickle.loads(pickle.dumps(name)) == name


@given(st.text(alphabet=st.characters(), max_size=400))
def test_any_text_is_either_refused_or_parsed_without_loss(text: str) -> None:
    parsed, refused = "", None
    try:
        parsed = str(LmqName.parse(text))
    except InvalidName as error:
        refused = error

    if refused is None:
        assert parsed == text
    else:
        assert refused.metadata["field"] in ("topic", "lite")
        assert refused.detail.isascii()
        assert refused.detail.isprintable()


@pytest.mark.parametrize(
    ("text", "topic", "lite"),
    [
        ("orders", "orders", None),
        ("orders/alice@example.com", "orders", "alice@example.com"),
        ("orders/-", "orders", "-"),
        ("orders/Zoë Ω 🐟", "orders", "Zoë Ω 🐟"),
        ("_a.b-c/d:e|f\\g", "_a.b-c", "d:e|f\\g"),
    ],
)
def test_a_name_is_taken_apart_at_its_slash(text: str, topic: str, lite: str | None) -> None:
    assert LmqName.parse(text) == LmqName(topic, lite)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("", "topic"),
        ("/", "topic"),
        ("/lite", "topic"),
        ("topic/", "lite"),
        ("topic/a/b", "lite"),
        ("topic//b", "lite"),
        ("topic/ a", "lite"),
        ("topic/a ", "lite"),
        (" topic", "topic"),
        ("topic ", "topic"),
        ("..", "topic"),
        (".hidden", "topic"),
        ("-option", "topic"),
        ("tópic", "topic"),
        ("topic\n", "topic"),
    ],
)
def test_a_refusal_names_the_field_that_is_wrong(text: str, field: str) -> None:
    """S3: bad input gets a machine-readable reason."""
    assert refusal(lambda: LmqName.parse(text)).metadata == {"field": field}


@pytest.mark.parametrize(("field", "validate", "bytes_max"), [*PLAIN, *FREE])
def test_a_name_may_be_as_long_as_its_limit_and_no_longer(
    field: str, validate: Validate, bytes_max: int
) -> None:
    """S3: tested at the limit and one past it."""
    validate("x" * bytes_max)

    error = refusal(lambda: validate("x" * (bytes_max + 1)))

    assert error.metadata == {"field": field}
    assert str(bytes_max) in error.detail


@pytest.mark.parametrize(("field", "validate", "bytes_max"), FREE)
def test_the_limit_counts_bytes_not_characters(
    field: str, validate: Validate, bytes_max: int
) -> None:
    validate("é" * (bytes_max // 2))

    assert refusal(lambda: validate("é" * (bytes_max // 2) + "x")).metadata == {"field": field}


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(("field", "validate", "bytes_max"), [*PLAIN, *FREE])
def test_hostile_characters_are_refused_and_not_echoed(
    field: str, validate: Validate, bytes_max: int, text: str
) -> None:
    """S3: and the refusal can be sent and logged as it is."""
    error = refusal(lambda: validate(text))

    assert error.metadata == {"field": field}
    assert error.detail.isascii()
    assert error.detail.isprintable()


@pytest.mark.parametrize("validate", [validate_topic, validate_group])
@pytest.mark.parametrize("text", ["a b", "a/b", "a:b", "é", "a\\b"])
def test_topics_and_groups_keep_to_a_plain_alphabet(validate: Validate, text: str) -> None:
    with pytest.raises(InvalidName):
        validate(text)


def test_only_a_fairness_key_may_be_empty() -> None:
    validate_fairness_key("")

    for validate in (validate_topic, validate_group, validate_client_id, validate_producer_id):
        with pytest.raises(InvalidName):
            validate("")


def test_a_huge_name_is_refused_with_a_short_detail() -> None:
    assert len(refusal(lambda: LmqName.parse("x" * 10_000_000)).detail) < 300
    assert len(refusal(lambda: LmqName.parse("\x00" * 10_000_000)).detail) < 400


def test_a_client_id_may_hold_slashes_and_inner_spaces() -> None:
    validate_client_id("host 7/worker/3")


@pytest.mark.parametrize(
    ("lmq_name", "of_4", "of_7", "of_1024"),
    [
        ("orders", 1, 5, 845),
        ("orders/alice@example.com", 1, 0, 1009),
        ("orders/bob@example.com", 2, 6, 246),
        ("telemetry/device-000001", 2, 3, 314),
        ("a/Zoë 🐟", 3, 2, 347),
    ],
)
def test_the_partition_of_a_name_never_changes(
    lmq_name: str, of_4: int, of_7: int, of_1024: int
) -> None:
    """If this fails, stored queues would be looked for in the wrong place: mend the function."""
    assert partition_of(lmq_name, 4) == of_4
    assert partition_of(lmq_name, 7) == of_7
    assert partition_of(lmq_name, 1024) == of_1024


def test_names_that_follow_a_pattern_spread_evenly() -> None:
    counts = collections.Counter(partition_of(f"orders/user-{n * 64}", 4) for n in range(10_000))

    assert sorted(counts) == [0, 1, 2, 3]
    assert all(2300 < count < 2700 for count in counts.values())


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])), st.integers(1, 1024))
def test_a_partition_is_always_within_range(lmq_name: str, partitions: int) -> None:
    assert 0 <= partition_of(lmq_name, partitions) < partitions
