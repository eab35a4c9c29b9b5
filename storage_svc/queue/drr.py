"""Deficit round robin: which fairness key is served next, and how much of it (V7).

Pure. Owns the order of the active keys and the bytes each may still send in its present visit; the
messages of a key are the caller's. A visit earns the key `quantum x weight` bytes; unused bytes are
kept for its next visit, but only for as long as the key stays active.
"""

from collections.abc import Mapping

QUANTUM_BYTES = 64 * 1024


class Ring:
    """The active keys, in turn. A key that becomes active waits for at most one round.

    A list and an index: most queues have one key, and an empty deque weighs ten times as much.
    """

    __slots__ = ("_at", "_deficits", "_order", "_quantum_bytes", "_visiting", "weights")

    def __init__(
        self, weights: Mapping[str, int] | None = None, quantum_bytes: int = QUANTUM_BYTES
    ) -> None:
        self.weights: Mapping[str, int] = weights or {}
        self._quantum_bytes = quantum_bytes
        self._order: list[str] = []
        self._at = 0
        """The place of the key whose turn it is."""
        self._deficits: dict[str, int] = {}
        self._visiting = False

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: str) -> bool:
        return key in self._deficits

    @property
    def alone(self) -> bool:
        """Whether only one key is active."""
        return len(self._order) == 1

    @property
    def only(self) -> str | None:
        """The key that is active, if no other is."""
        return self._order[0] if len(self._order) == 1 else None

    def activate(self, key: str) -> None:
        """Add a key that has messages; one that is active already keeps its place."""
        if key not in self._deficits:
            self._deficits[key] = 0
            if self._at:  # behind all others is before the one whose turn it is
                self._order.insert(self._at, key)
                self._at += 1
            else:
                self._order.append(key)

    def current(self) -> str | None:
        """The key whose turn it is; the first call of a visit earns the key its quantum.

        The methods below act on this key.
        """
        if not self._order:
            return None
        key = self._order[self._at]
        if not self._visiting:
            self._visiting = True
            self._deficits[key] += self._quantum_bytes * self.weights.get(key, 1)
        return key

    def allowance_bytes(self) -> int:
        """The bytes that the current key may still send in this visit."""
        return self._deficits[self._order[self._at]]

    def spend(self, sent_bytes: int) -> None:
        """Charge the current key.

        A key that is alone has no other to share with: it keeps neither debt nor unused bytes,
        which would delay or favour it once another key becomes active.
        """
        key = self._order[self._at]
        self._deficits[key] = 0 if self.alone else self._deficits[key] - sent_bytes

    def rotate(self) -> None:
        """End the visit: the next key takes its turn."""
        self._at = (self._at + 1) % len(self._order)
        self._visiting = False

    def retire(self) -> None:
        """Remove the current key, which has nothing left; it loses the bytes it had earned."""
        del self._deficits[self._order.pop(self._at)]
        if self._at == len(self._order):
            self._at = 0
        self._visiting = False
