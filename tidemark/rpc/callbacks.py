"""Results of requests on a stream, passed to callbacks.

A future costs an object, a callback and a turn of the event loop for each result. Where a frame
carries hundreds of results, callbacks get them as they are read.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from tidemark.errors import TidemarkError

T = TypeVar("T")

Done: TypeAlias = Callable[[T | TidemarkError], None]
"""Gets a result, or the reason why there is none. Called once."""

_log = logging.getLogger(__name__)


def pass_on(done: Done[T], result: T | TidemarkError) -> None:
    """A caller that raises must not keep the others from their results, nor end the stream."""
    try:
        done(result)
    except Exception:
        _log.exception("a result was not taken")


def complete(future: "asyncio.Future[T]", result: T | TidemarkError) -> None:
    """The callback of a caller that awaits a future, which raises the reason."""
    if future.done():  # its caller was cancelled
        return
    if isinstance(result, TidemarkError):
        future.set_exception(result)
        future.exception()  # marks it as retrieved: the caller may be gone
    else:
        future.set_result(result)
