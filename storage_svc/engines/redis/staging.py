"""The rest of a sealed commit: its pieces are applied one by one, each by a script of its own."""

from typing import Final

from redis.exceptions import ResponseError

from storage_svc.engines.engine import Identity, Table
from storage_svc.engines.marks import Mark
from storage_svc.engines.redis.layout import base_key, declared_keys, mark_key, staged_key
from storage_svc.engines.redis.reads import translated
from storage_svc.engines.redis.scripts import APPLY
from storage_svc.engines.redis.server import AnswerLost, Server, is_moved_away
from tidemark.clock import SystemClock

_RETRY_MS: Final = 50
_CLOCK = SystemClock()


async def apply_staged(server: Server, identity: Identity, mark: Mark, within_ms: int) -> None:
    """Apply what is left of a sealed commit, under the opening of a mark.

    A piece that was applied is gone, so that it is safe to ask again. Returns at once where there
    is nothing to apply, and where another node has opened the partition: that node does it. Raises
    AnswerLost if no piece can be applied for so long.
    """
    base = base_key(identity) + b":"
    mark_first, *tables = declared_keys(mark_key(identity), base, Table)
    keys = (mark_first, staged_key(identity), *tables)  # a piece may write to any table
    deadline_ms = _CLOCK.monotonic_ms() + within_ms
    while True:
        try:
            (left,) = await server.run(
                APPLY, keys, mark.epoch, mark.opening, base, within_ms=within_ms
            )
        except (ResponseError, AnswerLost) as error:
            if isinstance(error, ResponseError) and not is_moved_away(error):
                raise translated(error) from error
            if _CLOCK.monotonic_ms() >= deadline_ms:
                raise AnswerLost(str(error)) from error
            await _CLOCK.sleep_ms(_RETRY_MS)
            continue
        if not left or isinstance(left, list):
            return
        deadline_ms = _CLOCK.monotonic_ms() + within_ms
