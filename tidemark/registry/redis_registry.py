"""The registry in Redis or Valkey.

One script per call judges and changes everything at once, by the time of the server, so that the
clocks of members do not matter. All keys are in one slot, so that the server may be any of a
cluster: calls follow it to the master of the slot. Members bring the highest version they have seen
and the time at which they joined, so that a flushed registry does not go backwards. The URL may
hold credentials: it is never logged and is in no error.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from hashlib import sha1
from typing import Any, Final

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, NoScriptError, RedisError

from tidemark.errors import MemberReplaced, RegistryUnavailable
from tidemark.registry import scripts
from tidemark.registry.protocol import Assignment, Member, Timers, View

_CONNECTIONS_MAX: Final = 8
COMMIT_MAX: Final = 2**62
"""Higher commit numbers are garbage."""
_COMMIT_DIGITS: Final = 20
"""Of a commit number: scripts, which compute with doubles, compare them as texts."""
_KEYS: Final = ("members", "beats", "suspected", "assignment", "progress", "commits")
_FAULTS: Final = (RedisError, OSError, TimeoutError, AttributeError, TypeError, ValueError)
"""The last three: an answer that the script cannot have returned."""


class RedisRegistry:
    """The members of one kind of one cluster."""

    def __init__(self, url: str, cluster_id: str, kind: str, timers: Timers | None = None) -> None:
        """`kind` separates members of different services, such as "brokers"."""
        self._timers = timers or Timers()
        self._url = url
        self._redis = self._client()
        self._master: Any = None
        """The server of a cluster that has the slot, if the one that the URL names has not."""
        slot = f"{{tidemark/{cluster_id}}}/{kind}"
        self._keys = [f"{slot}/{name}" for name in _KEYS]
        self._channel = f"{slot}/changes"
        self._joined: dict[Member, tuple[str, str]] = {}
        """When each member of this process has joined, and whether it drains."""

    async def close(self) -> None:
        await self._leave_master()
        await self._redis.aclose()

    async def check(self) -> None:
        """Raises RegistryUnavailable if the server does not answer, or refuses the credentials."""
        try:
            async with asyncio.timeout(self._timers.answer_ms / 1000):
                await self._redis.ping()
        except _FAULTS as error:
            raise self._unavailable(error) from error

    async def beat(self, member: Member, seen_version: int, held: Collection[int] = ()) -> View:
        joined_us, draining = self._joined.get(member, ("0", "0"))
        answer = await self._run(
            scripts.BEAT,
            member.member_id,
            member.address,
            member.incarnation,
            joined_us,
            draining,
            seen_version,
            self._timers.time_to_live_ms,
            ",".join(map(str, sorted(held))),
        )
        try:
            status, *rest = [each.decode(errors="replace") for each in answer]
            if status == "REPLACED":
                raise MemberReplaced(
                    f"another process with the id {member.member_id} has joined at {rest[0]}",
                    member_id=member.member_id,
                    address=rest[0],
                )
            joined_us, draining, settled, seen, version, picture, *members = rest
            self._joined[member] = joined_us, draining
            return _view(version, picture, members, seen, settled)
        except _FAULTS as error:
            raise self._unavailable(error) from error

    async def look(self) -> View:
        answer = await self._run(scripts.LOOK, self._timers.time_to_live_ms)
        try:
            settled, seen, version, picture, *members = [
                each.decode(errors="replace") for each in answer
            ]
            return _view(version, picture, members, seen, settled)
        except _FAULTS as error:
            raise self._unavailable(error) from error

    async def leave(self, member: Member) -> None:
        await self._run(scripts.LEAVE, member.member_id, member.incarnation)

    async def suspect(self, member_id: str, incarnation: int) -> None:
        timers = self._timers
        await self._run(scripts.SUSPECT, member_id, incarnation, timers.beat_ms, timers.suspect_ms)

    async def drain(self, member_id: str, incarnation: int) -> bool:
        return bool(await self._run(scripts.DRAIN, member_id, incarnation))

    async def assign(self, assignment: Assignment, expected_version: int) -> bool:
        picture = {
            "holders": {str(number): each for number, each in assignment.holders.items()},
            "pinned": sorted(assignment.pinned),
        }
        return bool(
            await self._run(
                scripts.ASSIGN, expected_version, assignment.version, json.dumps(picture)
            )
        )

    async def report_commits(self, commits: Mapping[int, int]) -> None:
        """Raise the commit numbers of partitions; lower ones than are known change nothing."""
        given = [part for number, commit in commits.items() for part in (number, _text(commit))]
        await self._run(scripts.REPORT_COMMITS, _text(COMMIT_MAX), *given)

    async def highest_commit(self, partition: int) -> int:
        """The highest number that was reported for a partition; 0 if none is known."""
        text = await self._run(scripts.HIGHEST_COMMIT, partition)
        is_number = isinstance(text, bytes) and len(text) == _COMMIT_DIGITS and text.isdigit()
        number = int(text) if is_number else 0
        return number if number <= COMMIT_MAX else 0

    async def changes(self) -> AsyncIterator[None]:
        try:
            async with self._redis.pubsub() as channel:
                async with asyncio.timeout(self._timers.answer_ms / 1000):
                    await channel.subscribe(self._channel)
                asked = False
                while True:
                    message = await channel.get_message(timeout=self._timers.listen_ms / 1000)
                    if message is None:
                        if asked:
                            raise TimeoutError("the registry does not answer its listeners")
                        await channel.ping()
                    asked = message is None
                    if message is not None and message["type"] in ("message", "subscribe"):
                        yield
        except _FAULTS as error:
            raise self._unavailable(error) from error

    async def _run(self, script: str, *arguments: str | int) -> Any:
        given = (len(self._keys), *self._keys, self._channel, *arguments)
        try:
            async with asyncio.timeout(self._timers.answer_ms / 1000):
                try:
                    return await self._evaluate(script, given)
                except MovedError as error:  # not executed
                    await self._leave_master()
                    self._master = self._client(error.host, error.port)
                    return await self._evaluate(script, given)
        except _FAULTS as error:
            # A demoted master, or one that is gone from its cluster: ask for the address again.
            await self._leave_master()
            await self._redis.connection_pool.disconnect(inuse_connections=False)
            raise self._unavailable(error) from error

    async def _evaluate(self, script: str, given: Sequence[str | int]) -> Any:
        server = self._redis if self._master is None else self._master
        digest = sha1(script.encode(), usedforsecurity=False).hexdigest()
        try:
            return await server.evalsha(digest, *given)
        except NoScriptError:
            return await server.eval(script, *given)

    async def _leave_master(self) -> None:
        master, self._master = self._master, None
        if master is not None:
            await master.aclose()

    def _client(self, host: str = "", port: int = 0) -> Any:
        """Connections to the server that the URL names, or to another one in the same way."""
        client: Any = redis.asyncio.Redis.from_url(
            self._url,
            socket_timeout=None,  # redis-py's can swallow a cancellation, by asyncio.wait_for
            socket_connect_timeout=self._timers.answer_ms / 1000,
            # A repeated script could follow a later one of this member.
            retry=Retry(NoBackoff(), 0),
            max_connections=_CONNECTIONS_MAX,
        )
        if host:
            client.connection_pool.connection_kwargs.update(host=host, port=port)
        return client

    def _unavailable(self, error: Exception) -> RegistryUnavailable:
        return RegistryUnavailable(f"the registry failed: {str(error) or type(error).__name__}")


def _view(version: str, picture: str, members: Sequence[str], seen: str, settled: str) -> View:
    found = {}
    draining = set()
    held: dict[str, frozenset[int]] = {}
    for member_id, address, incarnation, drains, open_ in zip(*[iter(members)] * 5, strict=True):
        if not incarnation.isdecimal():
            continue  # garbage
        found[member_id] = Member(member_id, address, int(incarnation))
        if numbers := frozenset(int(each) for each in open_.split(",") if each.isdecimal()):
            held[member_id] = numbers
        if drains == "1":
            draining.add(member_id)
    return View(
        found,
        _assignment(int(version), picture),
        frozenset(draining),
        int(seen),
        settled == "1",
        held,
    )


def _text(commit: int) -> str:
    return f"{commit:0{_COMMIT_DIGITS}d}"


def _assignment(version: int, picture: str) -> Assignment:
    """Without holders if the picture is garbage: the next assignment replaces it."""
    try:
        read = json.loads(picture)
        holders = {int(number): str(each) for number, each in read["holders"].items()}
        return Assignment(version, holders, frozenset(map(int, read["pinned"])))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Assignment(version)
