"""Units and texts of the command line: what people type, and what they are shown."""

import pytest

from tidemark.cli.display import texts, units


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("250", 250), ("250ms", 250), ("1.5s", 1_500), ("10m", 600_000), ("2h", 7_200_000), ("0", 0)],
)
def test_a_duration_is_read_with_its_unit(text: str, duration_ms: int) -> None:
    assert units.parse_duration_ms(text) == duration_ms


@pytest.mark.parametrize(
    "text", ["", "soon", "-1s", "1 s", "1w", "1e3", "999999999999999d", "\u0661s"]
)
def test_what_is_no_duration_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|is too large"):
        units.parse_duration_ms(text)


def test_seconds_are_whole() -> None:
    assert units.parse_duration_s("7d") == 604_800
    with pytest.raises(ValueError, match="whole number of seconds"):
        units.parse_duration_s("1500ms")


def test_sizes_are_powers_of_two() -> None:
    assert [units.parse_size_bytes(text) for text in ("7", "64KiB", "1GiB")] == [7, 65_536, 1024**3]
    for wrong in ("1KB", "-1", "1.5MiB", "999999999999999999TiB"):
        with pytest.raises(ValueError, match=r"is not a size|is too large"):
            units.parse_size_bytes(wrong)


def test_a_moment_is_so_long_ago_or_an_iso_time_in_utc() -> None:
    assert units.parse_moment_ms("2h", now_ms=10_000_000) == 2_800_000
    assert units.parse_moment_ms("99999d", now_ms=10_000_000) == 0
    assert units.parse_moment_ms("1969-12-31T12:00:00Z", now_ms=10_000_000) == 0
    assert units.parse_moment_ms("1970-01-01T00:00:01", now_ms=0) == 1000
    assert units.parse_moment_ms("1970-01-01T01:00:01+01:00", now_ms=0) == 1000
    with pytest.raises(ValueError, match="is not a time"):
        units.parse_moment_ms("yesterday", now_ms=0)


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (0, "0ms"),
        (999, "999ms"),
        (1_000, "1s"),
        (9_900, "9.9s"),
        (59_999, "59s"),
        (192_000, "3m12s"),
        (600_000, "10m"),
        (7_500_000, "2h05m"),
        (360_000_000, "4d04h"),
        (-5, "0ms"),
    ],
)
def test_a_duration_is_shown_in_two_units_at_most(duration_ms: int, text: str) -> None:
    assert units.duration(duration_ms) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.4, "0.4"),
        (9.96, "10"),
        (950, "950"),
        (999.7, "1.0k"),
        (12_345, "12.3k"),
        (999_960, "1.0M"),
        (1_250_000, "1.2M"),
        (10**16, "10P"),
    ],
)
def test_a_short_number_stays_short(number: float, text: str) -> None:
    assert units.short(number) == text


def test_counts_sizes_and_ages_are_for_people() -> None:
    assert units.counted(1, "queue") == "1 queue"
    assert units.counted(5000, "message") == "5,000 messages"
    assert [units.size(size) for size in (0, 1023, 1536, 5 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 TiB",
    ]
    assert units.ago(None, 5) == "-"
    assert units.ago(2000, 1000) == "0ms"  # clocks of two machines may differ
    assert units.moment(0) == "1970-01-01 00:00:00"


def test_what_steers_a_terminal_is_escaped() -> None:
    """S3."""
    assert texts.payload_line(b"\x1b[2J\ttab\xff\xc3\xa9") == "\\x1b[2J\\ttab\\xffé"
    assert texts.header_line({"b": "2\n", "a": "1"}) == "a=1 b=2\\n"
    assert texts.printable("\u202egnihton") == "\\u202egnihton"


def test_payloads_are_text_or_base64_in_json() -> None:
    value = {"payload": b"text", "list": [{"payload": b"\xff"}], 3: None}

    assert texts.without_bytes(value) == {
        "payload": "text",
        "list": [{"payload_base64": "/w=="}],
        "3": None,
    }
