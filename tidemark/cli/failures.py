"""Exit codes and error lines of commands.

Pure. Scripts can rely on the codes; the line has the reason and a remedy.
"""

from enum import IntEnum
from typing import Final

from grpc import StatusCode

from tidemark import errors
from tidemark.errors import ClientError, TidemarkError


class ExitCode(IntEnum):
    """Part of the interface; docs/CLI.md lists them."""

    OK = 0
    REFUSED = 1
    """The request was refused: not found, already exists, not allowed."""
    USAGE = 2
    """The command line or a setting is invalid; nothing was sent."""
    UNAVAILABLE = 3
    """The service is unavailable; the same command may succeed later."""
    TIMEOUT = 4
    """No response in time; the call may have taken effect."""
    FAULT = 5
    """The service failed, or the outcome is unknown."""
    INTERRUPTED = 130
    """Ctrl-C."""
    BROKEN_PIPE = 141
    """The reader of the output went away."""


_TRANSIENT: Final = (StatusCode.UNAVAILABLE, StatusCode.RESOURCE_EXHAUSTED)
_NO_CONNECTION: Final = "failed to connect to all addresses"


def exit_code_of(error: TidemarkError) -> ExitCode:
    if isinstance(error, errors.DeadlineExceeded):
        return ExitCode.TIMEOUT
    if error.code in _TRANSIENT and not isinstance(error, ClientError):
        return ExitCode.UNAVAILABLE
    return ExitCode.REFUSED if isinstance(error, ClientError) else ExitCode.FAULT


def line_of(error: TidemarkError, address: str) -> str:
    """`REASON: what happened. What to do.`, on one line."""
    detail = " ".join(error.detail.split())
    if detail.startswith(_NO_CONNECTION) and not error.answered:
        why = detail.rpartition(": ")[2].partition(" (")[0] or "no connection"
        return (
            f"{error.reason}: no response from {address} ({why.lower()}). "
            "Check the address, and that the service is running; `tidemark up` starts a cluster."
        )
    if isinstance(error, errors.DeadlineExceeded):
        detail = f"no response from {address} in time"
    known = errors.BY_REASON.get(error.reason)
    if known is None:
        return f"{error.reason}: {_sentence(detail)}"
    _, action = errors.meaning_and_action(known)
    return f"{error.reason}: {_sentence(detail)} {action[:1].upper()}{action[1:]}"


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
