"""Credit: how many messages may be here unsettled, fitted to the speed of the handler.

Pure. Without a number from the user it begins small, doubles while tasks have to wait although they
are quick enough for more, and halves while messages wait here for long: what a slow handler cannot
take soon is left for other consumers.
"""

from typing import Final

START: Final = 16
MOST: Final = 500
"""Enough for the quickest handlers: more only makes frames larger."""

WAIT_MS: Final = 2_000
"""How long messages may wait here for their turn before there are too many of them."""


class Credit:
    """The credit of one consumer."""

    __slots__ = ("_came", "_fixed", "_outstanding", "limit")

    def __init__(self, fixed: int | None) -> None:
        self.limit = START if fixed is None else fixed
        self._fixed = fixed is not None
        self._outstanding = 0
        """What the broker was given and has not used."""
        self._came = 0
        """Messages that have come since the limit was changed."""

    def reset(self) -> None:
        """There is another consumer: the broker has been given nothing."""
        self._outstanding = 0

    def grant(self, held: int) -> int:
        """What the broker is given now, if so many messages are here unsettled."""
        missing = max(0, self.limit - held - self._outstanding)
        self._outstanding += missing
        return missing

    def used(self, messages: int) -> None:
        """Messages have come."""
        self._outstanding -= messages
        self._came += messages

    def starved(self, busy_ms: int) -> None:
        """A task waits and nothing is here; the message before was handed out so long ago."""
        quick = self.limit * busy_ms < WAIT_MS  # it would get to as many within that time
        if not self._fixed and quick and self._came >= self.limit // 2:
            self.limit = min(2 * self.limit, MOST)
            self._came = 0

    def waited(self, waited_ms: int) -> None:
        """The first of those that wait has waited for so long."""
        if not self._fixed and waited_ms > WAIT_MS:
            self.limit = max(1, self.limit // 2)
            self._came = 0
