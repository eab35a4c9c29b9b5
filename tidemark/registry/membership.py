"""One member's part in its cluster: it beats, follows the view, and proposes assignments.

There is no leader: any member that sees an unbalanced picture computes the next assignment, and the
registry takes the first. While the registry is away the last view stays, and every member keeps
serving. Versions only grow here, whatever the registry answers.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace
from typing import Final

from tidemark.clock import Clock
from tidemark.errors import (
    InvalidArgument,
    MemberReplaced,
    MembershipStatic,
    RegistryUnavailable,
)
from tidemark.registry.changes import wake_on_changes
from tidemark.registry.orders import drainable, gone, moved
from tidemark.registry.protocol import VERSION_MAX, Assignment, Member, Registry, Timers, View
from tidemark.registry.spread import Move, next_balancing_move, place

_TRIES: Final = 3
"""Proposals after one beat: each that fails has lost against another member."""
_SUSPICION_BEATS: Final = 5
"""A member that suspects another looks so many times as often, to see its end at once."""
_REST_MS_MIN: Final = 20
"""Between two beats, unless another member has changed something."""
_JITTER: Final = 0.1
"""The share by which a wait is shortened at random, so that members do not act at one moment."""

_log = logging.getLogger(__name__)


class Membership:
    """The cluster as one member sees it. `run` follows it until cancelled, or until `leave`."""

    def __init__(
        self,
        registry: Registry,
        member: Member,
        partitions: int,
        clock: Clock,
        *,
        timers: Timers | None = None,
        randomness: random.Random | None = None,
    ) -> None:
        self.view = View()
        """The last view known. Its version never goes back."""
        self.changed = asyncio.Event()
        """Set whenever `view` has changed. For one reader, which clears it."""
        self.problem = "has not answered yet"
        """Why the registry cannot be used now; "" while it answers."""
        self.member = member
        self._registry = registry
        self._partitions = partitions
        self._clock = clock
        self._timers = timers or Timers()
        self._randomness = randomness or random.Random()
        self._seen_version = 0
        self._held: frozenset[int] = frozenset()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()
        self._suspects: set[tuple[str, int]] = set()
        self._suspected_ms: dict[tuple[str, int], int] = {}
        """When each suspicion was reported."""
        self._first_beat_ms: int | None = None
        self._members_since_ms = clock.monotonic_ms()
        self._assigned_ms = clock.monotonic_ms()
        self._has_left = False

    # --- following -----------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled, or until this member has left; raises MemberReplaced."""
        listening = asyncio.create_task(
            wake_on_changes(self._registry, self._wake, self._clock, self._timers.beat_ms)
        )
        try:
            while not self._has_left:
                await self.run_once()
                with suppress(TimeoutError):
                    await self._clock.wait_for(self._wake.wait(), self._rest_ms())
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def run_once(self) -> None:
        """Beat, and propose the next assignment if one is needed."""
        async with self._turn:
            if self._has_left:
                return
            self._wake.clear()
            try:
                await self._report_suspects()
                for _ in range(_TRIES):
                    seen = await self._beat()
                    proposal = self._next_assignment(seen)
                    if proposal is None or await self._propose(proposal, seen):
                        break
            except RegistryUnavailable as error:
                self._lost(error)

    def saw_version(self, version: int) -> None:
        """Storage has seen an assignment of this version: the next one must be newer."""
        if self._seen_version < version <= VERSION_MAX:
            self._seen_version = version
            self._wake.set()

    def hold(self, partitions: Collection[int]) -> None:
        """This member has these open. Others wait until it has closed those that move to them."""
        if self._held != (held := frozenset(partitions)):
            self._held = held
            self._wake.set()

    def suspect(self, member_id: str) -> None:
        """The member does not answer: it is gone soon, unless it beats. Never blocks."""
        member = self.view.members.get(member_id)
        if member is None or member_id == self.member.member_id:
            return
        suspicion = member_id, member.incarnation
        last_ms = self._suspected_ms.get(suspicion)
        if last_ms is None or self._clock.monotonic_ms() - last_ms >= self._timers.suspect_ms:
            self._suspected_ms[suspicion] = self._clock.monotonic_ms()
            self._suspects.add(suspicion)
            self._wake.set()

    # --- operators and shutdown ----------------------------------------------------------------

    async def leave(self, released: Callable[[], Awaitable[object]] | None = None) -> None:
        """Hand all partitions to the others, wait until `released()` ends, and leave.

        The wait is short, and there is none without another member. Never fails: without the
        registry, the others notice by themselves.
        """
        try:
            await self._registry.drain(self.member.member_id, self.member.incarnation)
            await self.run_once()
            if released is not None and not self.view.partitions_of(self.member.member_id):
                with suppress(TimeoutError):
                    await self._clock.wait_for(released(), self._timers.leave_ms)
            async with self._turn:  # a beat that is under way would join again
                self._has_left = True
                await self._registry.leave(self.member)
        except RegistryUnavailable as error:
            self._lost(error)
        except (MemberReplaced, MembershipStatic):
            pass  # there is nothing to hand over
        finally:
            self._has_left = True
            self._wake.set()

    async def move(self, partition: int, member_id: str) -> Assignment:
        """Assign one partition to a member, and keep it there while that one is alive."""
        if not 0 <= partition < self._partitions:
            raise InvalidArgument(f"there is no partition {partition}")
        async with self._turn:
            for _ in range(_TRIES):
                seen = await self._beat()
                proposal = moved(self.view, partition, member_id, self._next_version())
                if proposal is None:
                    return self.view.assignment
                if await self._propose(proposal, seen):
                    return proposal
        raise RegistryUnavailable("other members changed the assignment at the same time")

    async def drain(self, member_id: str) -> None:
        """Assign all partitions of a member to the others; it takes none until it starts again."""
        async with self._turn:
            await self._beat()
            member = drainable(self.view, member_id)
            if not await self._registry.drain(member_id, member.incarnation):
                raise gone(member_id)
        await self.run_once()

    # --- inside --------------------------------------------------------------------------------

    def _rest_ms(self) -> int:
        rest_ms = self._timers.beat_ms * (1 - _JITTER * self._randomness.random())
        if self._suspected_ms:
            rest_ms /= _SUSPICION_BEATS
        if not self.problem and (due_ms := self._due_ms()) is not None:
            rest_ms = min(rest_ms, max(due_ms - self._clock.monotonic_ms(), _REST_MS_MIN))
        return round(rest_ms)

    def _due_ms(self) -> int | None:
        """When this member may propose the next assignment; None if it need not."""
        if not self.view.assignment.holders:
            return self._first_due_ms()
        return None if self._balancing_move() is None else self._balance_due_ms()

    def _first_due_ms(self) -> int:
        return (self._first_beat_ms or 0) + self._timers.first_wait_ms

    async def _report_suspects(self) -> None:
        now_ms = self._clock.monotonic_ms()
        for each, at_ms in list(self._suspected_ms.items()):
            if now_ms - at_ms > self._timers.beat_ms + 2 * self._timers.suspect_ms:
                del self._suspected_ms[each]
        while self._suspects:
            member_id, incarnation = self._suspects.pop()
            _log.info("member suspected", extra={"member_id": member_id})
            await self._registry.suspect(member_id, incarnation)

    async def _beat(self) -> View:
        seen = await self._registry.beat(self.member, self._seen_version, self._held)
        now_ms = self._clock.monotonic_ms()
        if self._first_beat_ms is None:
            self._first_beat_ms = now_ms
        if self.problem:
            _log.info("registry answers", extra={"members": sorted(seen.members)})
            self.problem = ""
            self._members_since_ms = now_ms
            self.changed.set()
        self._follow(seen, now_ms)
        return seen

    def _follow(self, seen: View, now_ms: int) -> None:
        """Update the view from the answer of the registry, but never to an older assignment."""
        own = self.member
        members, held = {**seen.members, own.member_id: own}, seen.held
        if not seen.settled:
            # Others may not have reported yet to a registry that was away or was flushed.
            late = self.view.members.keys() - members.keys()
            held = {**{k: v for k, v in self.view.held.items() if k in late}, **held}
            members = {**self.view.members, **members}
        draining = seen.draining | (self.view.draining - seen.members.keys()) & members.keys()
        if members != self.view.members or draining != self.view.draining:
            self._members_since_ms = now_ms
        known, given = self.view.assignment, self._sound(seen.assignment)
        self._seen_version = max(self._seen_version, given.version, self._sane(seen.seen_version))
        if given.version > known.version:
            self._assigned_ms = now_ms
            known = given
        self._show(View(members, known, draining, self._seen_version, seen.settled, held))

    def _show(self, view: View) -> None:
        before, self.view = self.view, view
        if replace(before, seen_version=view.seen_version, settled=view.settled) != view:
            self.changed.set()

    @staticmethod
    def _sane(version: int) -> int:
        return version if 0 <= version < VERSION_MAX else 0

    def _sound(self, given: Assignment) -> Assignment:
        """The assignment without impossible versions and partitions."""
        version = self._sane(given.version)
        if not version:
            return Assignment()
        holders = {
            number: holder
            for number, holder in given.holders.items()
            if 0 <= number < self._partitions
        }
        return Assignment(version, holders, given.pinned & holders.keys())

    def _next_version(self) -> int:
        return max(self._seen_version, self.view.assignment.version) + 1

    def _next_assignment(self, seen: View) -> Assignment | None:
        """The next assignment to propose; None if the present one is good."""
        known = self.view.assignment
        now_ms = self._clock.monotonic_ms()
        if not known.holders and now_ms < self._first_due_ms():
            return None
        holders = place(self._partitions, self._takers(), known.holders)
        # The registry has lost the assignment, or storage has seen a newer one than the registry.
        went_back = self._sound(seen.assignment) != known or self._seen_version > known.version
        if holders != known.holders or went_back:
            pinned = [each for each in known.pinned if holders[each] == known.holders.get(each)]
            return Assignment(self._next_version(), holders, frozenset(pinned))
        move = self._balancing_move()
        if move is None or now_ms < self._balance_due_ms():
            return None
        holders[move.partition] = move.member_id
        return Assignment(self._next_version(), holders, known.pinned)

    def _takers(self) -> set[str]:
        """Members that may hold partitions: drained ones only if there are no others."""
        takers = set(self.view.members)
        if not self.view.settled:
            takers.update(self.view.assignment.holders.values())
        return takers - self.view.draining or takers

    def _balancing_move(self) -> Move | None:
        known = self.view.assignment
        return next_balancing_move(known.holders, self._takers(), known.pinned)

    def _balance_due_ms(self) -> int:
        return max(
            self._members_since_ms + self._timers.stable_ms,
            self._assigned_ms + self._timers.move_ms,
        )

    async def _propose(self, proposal: Assignment, seen: View) -> bool:
        if not await self._registry.assign(proposal, seen.assignment.version):
            return False
        moves = sum(
            self.view.assignment.holders.get(number) != holder
            for number, holder in proposal.holders.items()
        )
        _log.info("partitions assigned", extra={"version": proposal.version, "moved": moves})
        self._seen_version = proposal.version
        self._assigned_ms = self._clock.monotonic_ms()
        self._show(replace(self.view, assignment=proposal, seen_version=proposal.version))
        return True

    def _lost(self, error: RegistryUnavailable) -> None:
        if self.problem != error.detail:
            _log.warning("registry away: %s", error.detail)
            self.problem = error.detail
            self.changed.set()
