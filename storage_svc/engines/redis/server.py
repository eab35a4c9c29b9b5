"""The connection to the server of a partition: one trip at a time, in order.

It finds the server again after every fault. A trip whose answer is lost is not repeated here: only
its caller knows whether that is safe. Commands that a server certainly did not execute (it has
moved the slot, is loading, was demoted, ...) are sent again.

A server that it finds may be another one than before: it is checked before anything is sent to it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from storage_svc.engines.redis.address import FAULTS, MasterFinder
from storage_svc.engines.redis.layout import Argument
from storage_svc.engines.redis.scripts import Script
from tidemark.clock import SystemClock

TRIP_TIMEOUT_S: Final = 5.0
"""After which an answer counts as lost."""
NOT_EXECUTED_RETRY_MS: Final = 50

_NOT_EXECUTED: Final = (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    TryAgainError,
)
_CLOCK = SystemClock()  # waits for a real server, also where a test moves time by hand

Command = Sequence[Argument]


def packed_command(command: Command) -> bytes:
    """A command as it travels. redis-py's own function takes four times as long, and a commit has
    thousands of arguments."""
    arguments = [each if type(each) is bytes else str(each).encode() for each in command]
    parts = [b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments]
    return b"*%d\r\n%b" % (len(parts), b"".join(parts))


def is_moved_away(error: RedisError) -> bool:
    """Whether a slot that moves key by key has lost a key while the script ran."""
    return isinstance(error, ResponseError) and "non local key" in str(error)


def _is_busy(answer: object) -> bool:
    """Whether a script of another user has run for so long that the server refuses everything."""
    return isinstance(answer, ResponseError) and str(answer).startswith("BUSY ")


class AnswerLost(Exception):
    """The connection broke, or could not be made: the commands may have been executed."""


class Connected:
    """A connection that is made."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def converse(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to commands that travel together, errors among them."""
        await self.connection.send_packed_command([packed_command(each) for each in commands])
        return [await self._answer() for _ in commands]

    async def _answer(self) -> Any:
        try:
            return await self.connection.read_response()
        except (ResponseError, BusyLoadingError) as error:
            return error


Check = Callable[[Connected], Awaitable[None]]
"""Raises if a server is not fit."""


async def no_check(_server: Connected) -> None:
    """For servers that are only read: others have checked them."""


class Server:
    """One connection, made when it is needed."""

    def __init__(self, finder: MasterFinder, check: Check = no_check) -> None:
        self._finder = finder
        self._check = check
        self._connection: Connected | None = None
        self._order = asyncio.Lock()

    async def ask(self, *commands: Command, within_ms: int) -> list[Any]:
        """The answers to commands that travel together; errors of the first are raised, those of
        others are among the answers. Raises AnswerLost."""
        deadline_ms = _CLOCK.monotonic_ms() + within_ms
        async with self._order:
            while True:
                answers = await self._trip(commands)
                first = answers[0]
                if isinstance(first, AskError):
                    answers = await self._asking(first, commands)
                    first = answers[0]
                if not isinstance(first, _NOT_EXECUTED) and not _is_busy(first):
                    break
                if isinstance(first, MovedError):
                    self._finder.moved_to(first.host, first.port)
                else:
                    self._finder.doubt()
                await self._disconnect()
                if _CLOCK.monotonic_ms() >= deadline_ms:
                    raise AnswerLost(self._finder.explained(first)) from first
                await _CLOCK.sleep_ms(NOT_EXECUTED_RETRY_MS)
        if isinstance(first, Exception):
            raise first
        return answers

    async def run(
        self,
        script: Script,
        keys: Sequence[bytes],
        *arguments: Argument,
        then: Sequence[Command] = (),
        **how: int,
    ) -> list[Any]:
        """Run a script, then other commands on the same connection."""
        given = (len(keys), *keys, *arguments)
        try:
            return await self.ask((b"EVALSHA", script.digest, *given), *then, **how)
        except NoScriptError:
            return await self.ask((b"EVAL", script.text, *given), *then, **how)

    async def close(self) -> None:
        await self._disconnect()

    async def _trip(self, commands: Sequence[Command]) -> list[Any]:
        is_new = self._connection is None
        try:
            async with asyncio.timeout(TRIP_TIMEOUT_S):
                if self._connection is None:
                    self._connection = Connected(await self._finder.connect())
                    await self._check(self._connection)
                return await self._connection.converse(commands)
        except (BusyLoadingError, ReadOnlyError) as error:  # while it connects: nothing was sent
            await self._disconnect()
            return [error]
        except FAULTS as error:
            await self._disconnect()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The clean-up of the client library failed, and its error took the place of it.
                raise asyncio.CancelledError from error
            if not is_new:
                raise AnswerLost(str(error) or type(error).__name__) from error
            self._finder.doubt()
            raise AnswerLost(self._finder.explained(error)) from error
        except BaseException:
            await self._disconnect()  # half an answer may be left on it
            raise

    async def _asking(self, error: AskError, commands: Sequence[Command]) -> list[Any]:
        """The slot is on its way to another server, which serves it after ASKING."""
        await self._disconnect()
        self._finder.moved_to(error.host, error.port)
        answers = await self._trip([part for each in commands for part in ((b"ASKING",), each)])
        await self._disconnect()
        return answers[1::2] if len(answers) > 1 else answers

    async def reconnect(self) -> None:
        """Find the master again for the next trip."""
        async with self._order:
            await self._disconnect()

    async def _disconnect(self) -> None:
        connected, self._connection = self._connection, None
        if connected is not None:
            with suppress(RedisError, OSError):
                await connected.connection.disconnect(nowait=True)
