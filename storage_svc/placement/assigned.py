"""Partitions of a store that nodes share: opened and closed as the registry assigns them.

An assignment is a hint. Opening raises the storage epoch, so that a node which acts on an old view
writes nothing. A partition that moves is closed by the node that has it open before the next one
opens it; the next one does not wait for a node that is gone, and not for long for one that hangs. A
node whose partition another one has taken opens it again only if a newer assignment names it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

from storage_svc.engines.engine import REFUSALS
from storage_svc.placement.clock_check import ClockCheck
from tidemark.clock import Clock
from tidemark.errors import InvalidArgument, RegistryUnavailable
from tidemark.registry.membership import Membership
from tidemark.registry.protocol import View

MEMBERS: Final = "storages"
"""The kind of members in the registry."""
HANDOVER_MS_MAX: Final = 2_000
"""How long a node waits until the one before it has closed a partition."""
_OPEN_AGAIN_MS: Final = 1_000

_log = logging.getLogger(__name__)


class PartitionHost(Protocol):
    """The partitions of this process."""

    async def open(
        self, numbers: Collection[int], on_taken_over: Callable[[int], None]
    ) -> None: ...
    async def leave(self, partition: int) -> None: ...


class AssignedPartitions:
    """The partitions that are assigned to this node. `run` opens and closes them."""

    def __init__(
        self,
        membership: Membership,
        host: PartitionHost,
        held: Mapping[int, object],
        clock: Clock,
    ) -> None:
        """`held` are the partitions that `host` has, as it opens and closes them."""
        self.membership = membership
        self._host = host
        self._held = held
        self._clock = clock
        self._wakeup = membership.changed
        self._changing: dict[int, asyncio.Task[None]] = {}
        """Partitions that are being opened or closed."""
        self._waiting_ms: dict[int, int] = {}
        """Since when partitions wait for the node before this one to close them."""
        self._taken_over: dict[int, int] = {}
        """The version under which another node has taken a partition from this one."""
        self._takes_partitions = True
        self._has_joined = False
        self._has_opened = False
        self._refusal: Exception | None = None
        self._released = asyncio.Event()

    @property
    def node_id(self) -> str:
        return self.membership.member.member_id

    @property
    def view(self) -> View:
        return self.membership.view

    async def run(self, clock_check: ClockCheck) -> None:
        """Join once the clock of this node is right, and follow assignments until cancelled.

        Raises MemberReplaced, and errors caused by a setting before any partition was open.
        """
        await clock_check.until_right()
        self._has_joined = True
        tasks = [
            asyncio.create_task(self._follow()),
            asyncio.create_task(self.membership.run()),
            asyncio.create_task(clock_check.watch(self._stop_taking)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def hand_over(self) -> None:
        """Give all partitions to other nodes, if there are any, and leave the cluster."""
        if self._has_joined:
            await self.membership.leave(self._released.wait)

    # --- inside --------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            while self._refusal is None:
                self._wakeup.clear()
                wait_ms = self._change()
                self.membership.hold({*self._held, *self._changing})
                if self._held or self._changing:
                    self._released.clear()
                else:
                    self._released.set()
                with suppress(TimeoutError):
                    await self._clock.wait_for(self._wakeup.wait(), wait_ms)
            raise self._refusal
        finally:
            changing = list(self._changing.values())
            for task in changing:
                task.cancel()
            await asyncio.gather(*changing, return_exceptions=True)

    async def _stop_taking(self) -> None:
        """Stop opening partitions, and give the open ones to other nodes, if there are any."""
        self._takes_partitions = False
        with suppress(InvalidArgument, RegistryUnavailable):  # there is no other node
            await self.membership.drain(self.node_id)

    def _change(self) -> int | None:
        """Start openings and closings that are due; returns when to look again at the latest."""
        view, wait_ms = self.view, None
        assigned = view.partitions_of(self.node_id)
        for number in (*self._held, *assigned):
            if number in self._changing:
                continue
            if number in self._held and not self._may_hold(number):
                self._start(number, self._close(number))
            elif number not in self._held and self._may_hold(number) and self._takes_partitions:
                left_ms = self._handover_left_ms(number)
                if left_ms > 0:
                    wait_ms = min(left_ms, wait_ms or left_ms)
                else:
                    self._start(number, self._open(number))
        self._waiting_ms = {k: v for k, v in self._waiting_ms.items() if k in assigned}
        return wait_ms

    def _may_hold(self, number: int) -> bool:
        assignment = self.view.assignment
        refused_version = self._taken_over.get(number, -1)
        return (
            assignment.holders.get(number) == self.node_id and assignment.version > refused_version
        )

    def _handover_left_ms(self, number: int) -> int:
        """How much longer the node before this one has to close the partition."""
        if not self.view.is_held_by_others(number, self.node_id):
            self._waiting_ms.pop(number, None)
            return 0
        now_ms = self._clock.monotonic_ms()
        return self._waiting_ms.setdefault(number, now_ms) + HANDOVER_MS_MAX - now_ms

    def _start(self, number: int, change: Coroutine[Any, Any, None]) -> None:
        self._changing[number] = asyncio.create_task(self._finish(number, change))

    async def _finish(self, number: int, change: Coroutine[Any, Any, None]) -> None:
        try:
            await change
        finally:
            del self._changing[number]
            self._wakeup.set()

    async def _open(self, number: int) -> None:
        version = self.view.assignment.version
        _log.info("partition opens", extra={"partition": number, "version": version})
        try:
            await self._host.open([number], self._on_taken_over)
            self._has_opened = True
        except REFUSALS as error:
            if not self._has_opened:
                self._refusal = error
                return
            # The store was fit for the others.
            _log.error(
                "partition cannot be opened",
                extra={"partition": number},
                exc_info=error,
            )
            await self._host.leave(number)
            await self._clock.sleep_ms(_OPEN_AGAIN_MS)

    async def _close(self, number: int) -> None:
        _log.info("partition closes", extra={"partition": number})
        await self._host.leave(number)

    def _on_taken_over(self, number: int) -> None:
        """Another node has opened it: this one has an old view, or the registry gave a version
        twice. In that case only a newer version makes this node open it again."""
        version = self.view.assignment.version
        if self._may_hold(number):
            self.membership.saw_version(version + 1)
        self._taken_over[number] = version
        self._wakeup.set()
