"""Losses: a partition that is behind a witness serves nothing until an operator confirms that.

A loss is stored with the partition, so that it stays known where it is opened next. Once it
is confirmed, the partition serves the rest, and gives no number that a lost commit may have given.
"""

import asyncio
from collections.abc import Awaitable, Callable

from storage_svc.engines.engine import Batch, Engine
from storage_svc.partition.commit_numbers import (
    SKIP,
    Loss,
    LossWitnessed,
    delete_loss,
    put_loss,
)
from storage_svc.partition.counters import NO_CLAIM, put_claim, put_counters
from storage_svc.partition.state import PartitionState
from tidemark.errors import InvalidArgument, TidemarkError

Witness = Callable[[int], Awaitable[int]]
"""The highest commit number of a partition that is known outside of this process; 0 if none is."""


async def no_witness(_partition: int) -> int:
    """There is no registry."""
    return 0


class Losses:
    """The loss of one partition, from its discovery to its confirmation."""

    def __init__(
        self, partition: int, witness: Witness = no_witness, *, confirmed: bool = False
    ) -> None:
        """`confirmed` if an operator has confirmed a loss before the partition is opened."""
        self._partition = partition
        self._witness = witness
        self._known: Loss | None = None
        self._must_store = False
        """Whether the partition is opened again to store it."""
        self._accepted: Loss | None = None
        """The last one that was confirmed."""
        self._wakeup = asyncio.Event()
        self._is_confirmed = confirmed
        self._answer: asyncio.Future[Loss] | None = None
        """To the operator whose confirmation is carried out."""

    async def check(self, state: PartitionState, last_commit: int) -> None:
        """Compare an opened partition with the commits that this process and others witnessed.

        Raises LossWitnessed, unless an operator has confirmed the loss.
        """
        loss = await self._find(state, last_commit)
        if self._is_confirmed:
            loss = loss or self._known or Loss(0, state.numbers.last)
            await _accept(state, loss)
            self._is_confirmed, self._accepted = False, loss
            self._wakeup.clear()
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(loss)
        elif loss is not None:
            self.found(loss)
            if state.loss is None:
                await self.store(state.engine, loss)
            self._must_store = False
            raise LossWitnessed(self._partition, loss)
        self._known = self._answer = None
        self._must_store = False

    def found(self, loss: Loss) -> None:
        """Keep the partition from being opened here until an operator has confirmed the loss."""
        self._known = loss

    async def store(self, engine: Engine, loss: Loss) -> None:
        """Keep it from serving wherever it is opened next, as well.

        If that fails, the partition is opened again to do it, unless the engine itself has noticed
        the loss: then the same engine is asked again.
        """
        self.found(loss)
        batch = Batch()
        put_loss(batch, loss)
        if loss.found is None:  # the engine commits nothing any more
            await engine.store_after_loss(batch)
        else:
            self._must_store = True
            await engine.commit(batch)
            self._must_store = False

    async def confirm(self) -> Loss:
        """An operator confirms the loss; returns it once the partition is open again.

        Raises why it is not opened. Repeated, it returns the same.
        """
        if self._known is None:
            if self._accepted is not None:
                return self._accepted
            raise InvalidArgument(
                f"partition {self._partition} has lost nothing", field="partition"
            )
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        self._is_confirmed = True
        self._wakeup.set()
        return await asyncio.shield(self._answer)

    async def until_none_or_confirmed(self) -> None:
        """Return at once if nothing is known to be lost, or if that is still to be stored; else
        when an operator has confirmed it, or at `give_up`."""
        if self._known is not None and not self._must_store:
            await self._wakeup.wait()

    def give_up(self, error: TidemarkError) -> None:
        """The partition is not opened here any more."""
        self._is_confirmed = False
        self._wakeup.set()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)
            answer.exception()  # marked as seen: the operator may be gone

    async def _find(self, state: PartitionState, last_commit: int) -> Loss | None:
        """The highest commit that is missing, of those that are known; None if none is."""
        seen = [last_commit, await self._witness(self._partition)]
        seen += [each.witnessed for each in (self._known, state.loss) if each is not None]
        missing = [number for number in seen if not state.numbers.has(number)]
        if state.loss is not None:  # of which the confirmation may be lost as well
            missing.append(state.loss.witnessed)
        return Loss(max(missing), state.numbers.last) if missing else None


async def _accept(state: PartitionState, loss: Loss) -> None:
    """Go on without the lost commits, under numbers that none of them has given."""
    counters, numbers = state.counters, state.numbers
    numbers.accept(loss)
    counters.commit = numbers.before_first + 1
    counters.topic_version += SKIP  # other partitions may have versions that were lost
    if not state.engine.storage_epoch:  # which does it otherwise
        counters.skip_by(SKIP)
        state.first_broker_epoch = counters.broker_epoch + SKIP
    # No broker holds the partition: one that is connected claims, and gets the loss in the answer.
    counters.broker_epoch = max(state.first_broker_epoch, counters.broker_epoch + 1)
    # It may be older than that of the present holder, which could not claim again.
    state.claim = NO_CLAIM
    batch = Batch()
    delete_loss(batch)
    put_claim(batch, NO_CLAIM)
    put_counters(batch, counters)
    numbers.write(batch)
    await state.engine.commit(batch)
    numbers.last = counters.commit
