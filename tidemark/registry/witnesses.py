"""Commit numbers in the registry: how far storage nodes have seen the partitions of a shared store.

Storage nodes report theirs, and ask before they open a partition: one that is behind has lost data.
The highest number stays, whichever node reports it. Like the rest of the registry it may be lost or
late: then fewer losses are noticed. Garbage counts as no number.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from tidemark.errors import RegistryUnavailable

COMMIT_MAX: Final = 2**62
"""Higher numbers are garbage."""

_TIMEOUT_MS: Final = 1_000
_DIGITS: Final = 20
"""Of a number, so that scripts, which compute with doubles, compare them as texts."""
_FAULTS: Final = (RedisError, OSError, TimeoutError, AttributeError, TypeError, ValueError)

# KEYS[1] is the hash of numbers by partition; ARGV[1] the highest number that is not garbage, then
# partitions and numbers in turn.
_REPORT: Final = """
for at = 2, #ARGV, 2 do
  local known = redis.call('HGET', KEYS[1], ARGV[at])
  if not known or #known ~= #ARGV[1] or known > ARGV[1] or known < ARGV[at + 1] then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
  end
end
return #ARGV
"""


class RedisWitnesses:
    """The commit numbers of one cluster. Every method may raise RegistryUnavailable."""

    def __init__(self, url: str, cluster_id: str) -> None:
        self._redis: Any = redis.asyncio.Redis.from_url(
            url,
            socket_timeout=None,  # redis-py's can swallow a cancellation, by asyncio.wait_for
            socket_connect_timeout=_TIMEOUT_MS / 1000,
            retry=Retry(NoBackoff(), 0),
        )
        self._key = f"{{tidemark/{cluster_id}}}/commits"

    async def close(self) -> None:
        await self._redis.aclose()

    async def report(self, commits: Mapping[int, int]) -> None:
        """Raise the numbers of partitions; lower ones than are known change nothing."""
        given = [part for number, commit in commits.items() for part in (number, _text(commit))]
        call = self._redis.eval(_REPORT, 1, self._key, _text(COMMIT_MAX), *given)
        await self._answer(call)

    async def highest(self, partition: int) -> int:
        """The highest number that was reported; 0 if none is known."""
        found = await self._answer(self._redis.hget(self._key, str(partition)))
        text = b"" if found is None else found
        number = int(text) if len(text) == _DIGITS and text.isdigit() else 0
        return number if number <= COMMIT_MAX else 0

    async def _answer(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(_TIMEOUT_MS / 1000):
                return await call
        except _FAULTS as error:
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            why = str(error) or type(error).__name__
            raise RegistryUnavailable(f"the registry failed: {why}") from error


def _text(commit: int) -> str:
    return f"{commit:0{_DIGITS}d}"
