"""Commit numbers: which commits a partition has, and whether a witness has seen one that is gone.

Everything that saw a commit answered is a witness: the broker, this process, the registry. A store
that is restored from an old backup, or fails over to a lagging replica, goes back behind them.

On a shared engine every opening begins with a number far above the last one, partly by chance. So a
number belongs to one opening, and commits that were lost are not confused with those that another
node made in their place, however many. The numbers of earlier openings are kept as spans, in a row
that the first commit of an opening writes. With RocksDB numbers have no gaps, and need no row until
a loss is confirmed.
"""

import random
from struct import Struct
from typing import Final, NamedTuple

from storage_svc.engines.engine import Batch, Engine, EngineDataLost, Table
from storage_svc.engines.keys import read_u64x2, u64x2

SPANS_MAX: Final = 64
"""Openings that are remembered. Commits witnessed before them are compared with the oldest."""

SKIP: Final = 1 << 32
"""Numbers that an opening leaves out."""

ACCEPTED_SKIP: Final = 1 << 40
"""Numbers that are left out when a loss is confirmed: witnesses that report later, of the same
loss, saw lower ones."""

_NUMBERS_KEY: Final = b"commit_numbers"
_LOSS_KEY: Final = b"loss"

Span = tuple[int, int]
"""The first and the last number of the commits of one opening."""


class Loss(NamedTuple):
    """A commit that was answered and is gone, and the last one that is stored."""

    witnessed: int
    found: int | None = None
    """None while the partition was not opened to see."""


class LossWitnessed(EngineDataLost):
    """The partition is behind a witness."""

    def __init__(self, partition: int, loss: Loss) -> None:
        left = "" if loss.found is None else f", the last that is stored is {loss.found}"
        super().__init__(
            f"commit {loss.witnessed} was answered and is not stored{left}: "
            f"tidemark cluster confirm-loss {partition}"
        )
        self.loss = loss


class CommitNumbers:
    """The numbers of the commits that an open partition has."""

    __slots__ = ("_accepted", "_first", "_spans", "is_written", "last")

    def __init__(self, row: bytes | None, found: int, floor: int) -> None:
        """`found` is the last number that is stored, `floor` the first value of counters under the
        storage epoch, 0 where the data is in this process."""
        self.last = found
        """Of the last commit that is durable."""
        self._accepted = 0
        """Witnesses of this number and of lower ones miss nothing."""
        self._spans: list[Span] = [(0, found)]
        if row is not None:
            self._accepted, *bounds, first = _read_numbers(row)
            spans = [*zip(bounds[::2], bounds[1::2], strict=True), (first, found)]
            self._spans = spans[-SPANS_MAX:]
            self._accepted = max(self._accepted, *(last for _, last in spans[:-SPANS_MAX]), 0)
        self.is_written = not floor
        """Whether the row is up to date."""
        if floor and floor <= found:  # a confirmed loss has left numbers out
            floor = found + SKIP + floor % SKIP
        self._first = max(floor, found) + 1

    @property
    def before_first(self) -> int:
        """The number from which the counter of commits continues."""
        return self._first - 1

    def has(self, number: int) -> bool:
        """Whether the partition has the commit that a witness saw, or an operator has confirmed
        that it is lost."""
        return number <= self._accepted or self.is_stored(number)

    def is_stored(self, number: int) -> bool:
        present = (self._first, self.last)
        return any(first <= number <= last for first, last in (present, *self._spans))

    def accept(self, loss: Loss) -> None:
        """Whatever witnesses have seen so far is not missed any more."""
        # By chance: the confirmation may be lost as well, and be made again.
        skip = ACCEPTED_SKIP + random.getrandbits(31)
        self._accepted = max(loss.witnessed, self.before_first) + skip
        self._first = self._accepted + 1
        self.is_written = False

    def write(self, batch: Batch) -> None:
        """Add the row to the first commit of an opening."""
        if not self.is_written:
            self.is_written = True
            bounds = [bound for span in self._spans for bound in span]
            batch.put(Table.META, _NUMBERS_KEY, _numbers(self._accepted, *bounds, self._first))


async def load_commit_numbers(
    engine: Engine, found: int, floor: int
) -> tuple[CommitNumbers, Loss | None]:
    """The numbers of a partition that is being opened, and its loss that no operator confirmed."""
    row, loss = await engine.load(Table.META, [_NUMBERS_KEY, _LOSS_KEY])
    numbers = CommitNumbers(row, found, floor)
    return numbers, None if loss is None else Loss(*read_u64x2(loss))


def put_loss(batch: Batch, loss: Loss) -> None:
    """The partition serves nothing from now on, in whichever process it is opened."""
    batch.put(Table.META, _LOSS_KEY, u64x2(loss.witnessed, loss.found or 0))


def delete_loss(batch: Batch) -> None:
    batch.delete(Table.META, _LOSS_KEY)


def _numbers(*numbers: int) -> bytes:
    return Struct(f">{len(numbers)}Q").pack(*numbers)


def _read_numbers(row: bytes) -> tuple[int, ...]:
    return Struct(f">{len(row) // 8}Q").unpack(row)
