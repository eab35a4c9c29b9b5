"""Exit codes and the one line that describes the failure (S3)."""

import pytest

from tidemark import errors
from tidemark.cli.failures import ExitCode, exit_code_of, line_of
from tidemark.errors import TidemarkError

ADDRESS = "127.0.0.1:7400"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.TopicNotFound("no"), ExitCode.REFUSED),
        (errors.QueueFull("full"), ExitCode.REFUSED),
        (errors.PermissionDenied("no"), ExitCode.REFUSED),
        (errors.Unimplemented("no"), ExitCode.REFUSED),
        (errors.Unavailable("gone"), ExitCode.UNAVAILABLE),
        (errors.PartitionFaulty("faulty"), ExitCode.UNAVAILABLE),
        (errors.DiskFull("full"), ExitCode.UNAVAILABLE),
        (errors.DeadlineExceeded("late"), ExitCode.TIMEOUT),
        (errors.Internal("oops"), ExitCode.FAULT),
        (errors.CommitOutcomeUnknown("unknown"), ExitCode.FAULT),
        (errors.DataCorrupt("bits"), ExitCode.FAULT),
    ],
)
def test_scripts_can_tell_failures_apart(error: TidemarkError, code: ExitCode) -> None:
    assert exit_code_of(error) is code


@pytest.mark.parametrize("error", errors.ALL)
def test_every_error_is_one_line_with_its_reason_and_what_to_do(error: type[TidemarkError]) -> None:
    line = line_of(error("it\nhappened"), ADDRESS)

    assert "\n" not in line
    assert line.startswith(f"{error.reason}: ")
    action = errors.meaning_and_action(error)[1]
    assert line.endswith(action[1:])


def test_an_address_without_a_listener_is_named() -> None:
    """A broker that answers, and has no storage itself, reports the same of another address."""
    detail = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7400: "
        "Failed to connect to remote host: connect: Connection refused (111)"
    )
    refused, answered = errors.Unavailable(detail), errors.Unavailable(detail)
    refused.answered = False

    assert line_of(refused, ADDRESS).startswith(
        "UNAVAILABLE: no response from 127.0.0.1:7400 (connection refused). "
    )
    assert line_of(answered, ADDRESS).startswith("UNAVAILABLE: failed to connect")


def test_a_reason_of_a_newer_server_is_shown_as_it_is() -> None:
    newer = errors.ClientError("the moon is full")
    newer.reason = "MOON_FULL"

    assert line_of(newer, ADDRESS) == "MOON_FULL: the moon is full."
    assert exit_code_of(newer) is ExitCode.REFUSED
