"""The catalogue of errors, and its translation to and from google.rpc.Status."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from tidemark import errors
from tidemark.errors import ALL, BY_REASON, ClientError, ServiceError, TidemarkError
from tidemark.rpc.statuses import from_status, from_trailers, to_status

EACH = pytest.mark.parametrize("error", ALL, ids=lambda error: error.reason)


def test_every_concrete_error_of_the_module_is_in_all_sorted_by_reason() -> None:
    defined = {
        each
        for _, each in inspect.getmembers(errors, inspect.isclass)
        if issubclass(each, ClientError | ServiceError) and each not in (ClientError, ServiceError)
    }

    assert set(ALL) == defined
    assert [error.reason for error in ALL] == sorted({error.reason for error in ALL})
    assert dict(BY_REASON) == {error.reason: error for error in ALL}


@EACH
def test_a_reason_is_the_name_of_its_class(error: type[TidemarkError]) -> None:
    assert error.reason == re.sub(r"(?<!^)(?=[A-Z])", "_", error.__name__).upper()


@EACH
def test_an_error_explains_itself_and_says_what_to_do(error: type[TidemarkError]) -> None:
    text = inspect.getdoc(error) or ""

    assert re.match(r"[A-Z][^\n]*\.\n\nWhat to do: [a-z]", text), text
    assert text.endswith(".")


@EACH
def test_the_tree_in_the_docstring_shows_each_error_with_its_code(
    error: type[TidemarkError],
) -> None:
    retry = r" +retry" if error.retry_after_ms is not None else ""

    line = rf"[├└]── {error.__name__} +{error.code.name}{retry}$"

    assert re.search(line, errors.__doc__ or "", re.MULTILINE)


@EACH
def test_only_errors_that_pass_by_themselves_are_unavailable(error: type[TidemarkError]) -> None:
    if error.code is StatusCode.UNAVAILABLE:
        assert issubclass(error, ServiceError)
        assert error.retry_after_ms is not None


@EACH
def test_an_error_survives_a_status_with_its_metadata_and_retry(
    error: type[TidemarkError],
) -> None:
    """S3: a machine-readable reason that a client can act on."""
    raised = error("why it failed", owner="10.0.0.7:7400", lmq_name="orders/anna")

    revived = from_status(Status.FromString(to_status(raised).SerializeToString()))

    assert type(revived) is error
    assert revived.detail == "why it failed"
    assert revived.metadata == {"owner": "10.0.0.7:7400", "lmq_name": "orders/anna"}
    assert revived.retry_after_ms == error.retry_after_ms
    assert (revived.reason, revived.code) == (error.reason, error.code)


@EACH
def test_an_error_survives_pickling_as_spark_workers_do(error: type[TidemarkError]) -> None:
    raised = error("why", retry_after_ms=7, topic="orders")

    revived = pickle.loads(pickle.dumps(raised))

    assert type(revived) is error
    assert str(revived) == f"{error.reason}: why"
    assert (revived.detail, revived.metadata, revived.retry_after_ms) == (
        "why",
        {"topic": "orders"},
        7,
    )


@EACH
def test_an_error_bears_the_name_of_the_package_that_callers_import(
    error: type[TidemarkError],
) -> None:
    """Tracebacks and spans show it: where a class is defined does not matter."""
    assert error.__module__ == "tidemark.errors"
    assert error.__name__ in errors.__all__


def test_a_retry_of_one_error_overrides_that_of_its_class() -> None:
    revived = from_status(to_status(errors.QueueFull("full", retry_after_ms=12_345)))

    assert revived.retry_after_ms == 12_345
    assert errors.QueueFull.retry_after_ms == 1_000


def test_a_status_is_not_shared_between_errors() -> None:
    first = to_status(errors.Unavailable("first"))

    first.details[0].value = b""
    first.details[1].value = b""

    revived = from_status(to_status(errors.Unavailable("second")))
    assert type(revived) is errors.Unavailable
    assert revived.retry_after_ms == errors.Unavailable.retry_after_ms


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (StatusCode.INVALID_ARGUMENT, errors.InvalidArgument),
        (StatusCode.UNAVAILABLE, errors.Unavailable),
        (StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted),
        (StatusCode.PERMISSION_DENIED, errors.PermissionDenied),
        (StatusCode.FAILED_PRECONDITION, ClientError),
        (StatusCode.NOT_FOUND, ClientError),
        (StatusCode.DATA_LOSS, ServiceError),
        (StatusCode.UNKNOWN, ServiceError),
    ],
)
def test_a_reason_of_a_newer_peer_becomes_the_class_of_its_code_and_keeps_its_name(
    code: StatusCode, expected: type[TidemarkError]
) -> None:
    status = Status(code=code.value[0], message="new")
    info = ErrorInfo(reason="FROM_THE_FUTURE", domain="tidemark", metadata={"k": "v"})
    status.details.add().Pack(info)

    revived = from_status(status)

    assert type(revived) is expected
    assert (revived.reason, revived.code) == ("FROM_THE_FUTURE", code)
    assert (revived.metadata, revived.retry_after_ms) == ({"k": "v"}, None)
    assert from_status(to_status(revived)).reason == "FROM_THE_FUTURE"


def test_a_reason_of_another_domain_is_not_taken_for_ours() -> None:
    status = Status(code=StatusCode.NOT_FOUND.value[0], message="elsewhere")
    status.details.add().Pack(ErrorInfo(reason="TOPIC_NOT_FOUND", domain="example.org"))

    revived = from_status(status)

    assert type(revived) is ClientError
    assert revived.code is StatusCode.NOT_FOUND


def test_malformed_details_leave_the_code_and_the_text() -> None:
    status = to_status(errors.Fenced("stale"))
    status.details[0].value = b"\xff\xff"

    revived = from_status(status)
    from_garbage = from_trailers(
        StatusCode.INTERNAL, "text", [("grpc-status-details-bin", b"\xff\xff")]
    )

    assert (type(revived), revived.detail) == (ClientError, "stale")
    assert revived.code is StatusCode.FAILED_PRECONDITION
    assert (type(from_garbage), from_garbage.detail) == (errors.Internal, "text")


def test_an_unknown_number_for_a_code_is_an_unknown_error() -> None:
    revived = from_status(Status(code=99, message="odd"))

    assert (type(revived), revived.code) == (ServiceError, StatusCode.UNKNOWN)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (StatusCode.UNAVAILABLE, "Socket closed", errors.Unavailable),
        (StatusCode.CANCELLED, "", errors.Unavailable),
        (StatusCode.INTERNAL, "Received RST_STREAM with error code 2", errors.Unavailable),
        (StatusCode.UNKNOWN, "Stream removed", errors.Unavailable),
        (StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", errors.DeadlineExceeded),
        (
            StatusCode.RESOURCE_EXHAUSTED,
            "SERVER: Received message larger than max (9 vs. 4)",
            errors.BatchTooLarge,
        ),
        (StatusCode.RESOURCE_EXHAUSTED, "no memory", errors.ResourceExhausted),
        (StatusCode.UNIMPLEMENTED, "Method not found!", errors.Unimplemented),
        (StatusCode.UNAUTHENTICATED, "", errors.Unauthenticated),
    ],
)
def test_an_answer_without_details_is_read_by_its_code_and_text(
    code: StatusCode, text: str, expected: type[TidemarkError]
) -> None:
    revived = from_trailers(code, text, ())

    assert type(revived) is expected
    assert revived.retry_after_ms == expected.retry_after_ms
    assert revived.detail


def test_texts_are_cut_to_whole_characters_and_never_fail() -> None:
    endless = errors.DataCorrupt("é" * 10_000, file="/data/\udcff" + "x" * 10_000)

    status = to_status(endless)

    revived = from_status(status)
    assert revived.detail == "é" * 500
    assert revived.metadata["file"] == "/data/?" + "x" * 393
