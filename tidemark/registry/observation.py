"""The members of another kind, as seen by a process that is not one of them.

It follows their view, reports those that do not answer it, and carries out orders of an operator.
It never beats, and members judge and assign without it. While the registry is away, the last view
stays.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Final

from tidemark.clock import Clock
from tidemark.errors import RegistryUnavailable
from tidemark.registry.changes import wake_on_changes
from tidemark.registry.orders import drainable, gone, moved
from tidemark.registry.protocol import Assignment, Registry, Timers, View

_TRIES: Final = 3
"""Proposals for one order: each that fails has lost against a member."""

_log = logging.getLogger(__name__)


class Observation:
    """The members of one kind. `run` follows them until cancelled."""

    def __init__(self, registry: Registry, clock: Clock, *, timers: Timers | None = None) -> None:
        self.view = View()
        """The last view known. The version of its assignment never goes back."""
        self.changed = asyncio.Event()
        """Set whenever `view` has changed. For one reader, which clears it."""
        self._registry = registry
        self._clock = clock
        self._timers = timers or Timers()
        self._wake = asyncio.Event()
        self._suspects: dict[str, int] = {}
        """Member ids and incarnations that are to be reported."""

    async def run(self) -> None:
        listening = asyncio.create_task(
            wake_on_changes(self._registry, self._wake, self._clock, self._timers.beat_ms)
        )
        try:
            while True:
                with suppress(TimeoutError):
                    # Every change is published: this is for one that got lost.
                    await self._clock.wait_for(self._wake.wait(), self._timers.time_to_live_ms)
                await self.run_once()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def run_once(self) -> None:
        """Report suspicions, and read the view. Never fails."""
        self._wake.clear()
        try:
            while self._suspects:
                member_id, incarnation = self._suspects.popitem()
                _log.info("member suspected", extra={"member_id": member_id})
                await self._registry.suspect(member_id, incarnation)
            self._follow(await self._registry.look())
        except RegistryUnavailable as error:
            _log.debug("registry away: %s", error.detail)

    def suspect(self, address: str) -> None:
        """The member at this address does not answer: it is gone soon, unless it beats."""
        for member in self.view.members.values():
            if member.address == address:
                self._suspects[member.member_id] = member.incarnation
                self._wake.set()

    async def move(self, partition: int, member_id: str) -> Assignment:
        """Assign one partition to a member, and keep it there while that one is alive."""
        for _ in range(_TRIES):
            self._follow(seen := await self._registry.look())
            version = max(seen.seen_version, self.view.assignment.version) + 1
            proposal = moved(self.view, partition, member_id, version)
            if proposal is None:
                return self.view.assignment
            if await self._registry.assign(proposal, seen.assignment.version):
                return proposal
        raise RegistryUnavailable("members changed the assignment at the same time")

    async def drain(self, member_id: str) -> None:
        """Let members assign the partitions of a member to others, until it starts again."""
        self._follow(await self._registry.look())
        member = drainable(self.view, member_id)
        if not await self._registry.drain(member_id, member.incarnation):
            raise gone(member_id)

    def _follow(self, seen: View) -> None:
        if not seen.settled:  # members may be late to report to a registry that was flushed
            seen = replace(seen, members={**self.view.members, **seen.members})
        if seen.assignment.version < self.view.assignment.version:
            seen = replace(seen, assignment=self.view.assignment)
        if (seen.members, seen.assignment) != (self.view.members, self.view.assignment):
            self.changed.set()
        self.view = seen
