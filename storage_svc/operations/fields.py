"""Checks of proto fields that several operations share.

A malformed field is refused here, before the operation reaches the writer; a well-formed request
that cannot be carried out is refused by the operation itself.
"""

from storage_svc.queue import bodies
from tidemark import limits
from tidemark.bodies import has_payloads
from tidemark.errors import InvalidArgument
from tidemark.field_checks import check_range
from tidemark.names import LmqName, validate_group


def queue_name(lmq_name: str) -> str:
    LmqName.parse(lmq_name)
    return lmq_name


def group_name(group: str) -> str:
    validate_group(group)
    return group


def check_body(count: int, body: bytes, bytes_max: int) -> None:
    if count <= limits.RUN_MESSAGES_MAX and len(body) <= bytes_max and has_payloads(body, count):
        return  # as most
    check_range("count", count, 1, limits.RUN_MESSAGES_MAX)
    check_range("body", len(body), 0, bytes_max)
    # A body that cannot be cut later would poison its queue, so it is parsed here, once.
    if bodies.count(body) != count:
        raise InvalidArgument(f"the body does not hold {count} messages", field="body")
