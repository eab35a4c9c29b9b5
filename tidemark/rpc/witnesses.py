"""Witnesses: a call to storage carries the last commit of the partition that its caller has seen.

A partition that does not have it has lost data, and must not answer as if it had never been there.
Claims carry the same number in their request.
"""

from typing import Any, Final

import grpc

from tidemark.errors import InvalidArgument

COMMIT_MAX: Final = 2**62

_KEY: Final = "tidemark-witnessed-commit"


def witness_of(commit: int) -> tuple[tuple[str, str], ...]:
    """The metadata of a call; none if the caller has seen no commit."""
    return ((_KEY, str(commit)),) if commit else ()


def witnessed_commit(context: grpc.aio.ServicerContext[Any, Any]) -> int:
    """The commit that a caller has seen; 0 if it has seen none."""
    for key, value in context.invocation_metadata() or ():
        if key == _KEY:
            is_number = value.isdigit() and len(value) <= len(str(COMMIT_MAX))
            return check_commit(int(value) if is_number else -1)
    return 0


def check_commit(number: int) -> int:
    if not 0 <= number <= COMMIT_MAX:
        raise InvalidArgument("not the number of a commit", field="witnessed_commit")
    return number
