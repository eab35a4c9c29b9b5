"""Credit: how many more messages the broker may send to a consumer.

Pure. A number from the user is the most that may be here unsettled. Without one, the credit follows
the handlers: tasks that wait are always provided for, and some messages wait here ahead of them.
Their number starts small, grows while tasks have to wait although they are quick enough for more,
and halves while messages wait for long: messages that a slow handler cannot take soon are left to
other consumers.
"""

from typing import Final

START: Final = 16
_GROWTH: Final = 8
"""A quick handler has enough after two steps."""

UNSETTLED_MAX: Final = 500
"""Without a number from the user: enough for the quickest handlers, and an end for those that take
messages without settling any."""

WAIT_MS: Final = 2_000
"""How long messages may wait here for their turn before there are too many of them."""


class Credit:
    """The credit of one consumer."""

    __slots__ = ("_fixed", "_outstanding", "_received", "ahead")

    def __init__(self, fixed: int | None) -> None:
        self.ahead = START
        """How many messages may wait here for a task. Has no effect on a number from the user."""
        self._fixed = fixed
        self._outstanding = 0
        """Granted to the broker and not used yet."""
        self._received = 0
        """Messages that have arrived since `ahead` was changed."""

    def reset(self) -> None:
        """The consumer is a new one: nothing is granted to it yet."""
        self._outstanding = 0

    def grant(self, unsettled: int, buffered: int, waiting: int) -> int:
        """How many more messages the broker may send.

        `buffered` of the unsettled messages wait for a task, `waiting` tasks wait for a message.
        It is gathered while the broker has more than that left, and enough for the tasks: messages
        that are granted together arrive together, and those that do not cost a frame and a
        reservation each time around.
        """
        if self._fixed is None:
            missing = min(self.ahead + waiting - buffered, UNSETTLED_MAX - unsettled)
        else:
            missing = self._fixed - unsettled
        granted = missing - self._outstanding
        if granted <= 0 or waiting <= self._outstanding > granted:
            return 0
        self._outstanding += granted
        return granted

    def used(self, messages: int) -> None:
        """Messages have arrived."""
        self._outstanding -= messages
        self._received += messages

    def starved(self, busy_ms: int, messages: int) -> None:
        """A task waits and no message is here; the last ones were taken together `busy_ms` ago."""
        if self._received < self.ahead // 2:
            return  # the queue is empty, or its messages come one by one
        in_time = WAIT_MS * messages // max(busy_ms, 1)  # it would get to so many within that time
        grown = min(_GROWTH * self.ahead, in_time, UNSETTLED_MAX)
        if grown > self.ahead:
            self.ahead = grown
            self._received = 0

    def waited(self, waited_ms: int) -> None:
        """The first of the messages that wait here has waited for `waited_ms`."""
        if waited_ms > WAIT_MS:
            self.ahead = max(1, self.ahead // 2)
            self._received = 0

    def excess(self, buffered: int) -> int:
        """How many of the messages that wait here are too many."""
        return max(0, buffered - self.ahead) if self._fixed is None else 0
