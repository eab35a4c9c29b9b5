"""Hand-outs: how much of what a consumer was sent its client may have given to the application.

Pure. Clients report totals in the order of delivery, before they hand anything out. The place of a
delivery in that order thus decides, without a record for each message, what costs an attempt when
the client is gone (K1).
"""


class HandOuts:
    """The hand-outs of one consumer."""

    __slots__ = (
        "_deliveries",
        "_first_attempts",
        "_messages",
        "_sent_deliveries",
        "_sent_messages",
    )

    def __init__(self) -> None:
        self._sent_messages = self._sent_deliveries = 0
        self._messages = self._deliveries = self._first_attempts = 0

    def place(self, messages: int, attempt_count: int, *, last_attempt: bool) -> "Place":
        """The place of the next delivery."""
        place = Place(
            self,
            self._sent_messages,
            self._sent_deliveries,
            messages,
            cautious=attempt_count > 0 or last_attempt,
        )
        self._sent_messages += messages
        self._sent_deliveries += 1
        return place

    def report(self, messages: int, deliveries: int, first_attempts: int) -> None:
        """Note the totals of a client; it may take back what it did not use."""
        self._messages = messages
        self._deliveries = deliveries
        self._first_attempts = first_attempts

    def given_of(self, place: "Place") -> int:
        if place.delivery < self._deliveries:
            return place.messages
        total = self._messages
        if not place.cautious:
            total = max(total, self._first_attempts)
        return min(max(total - place.message, 0), place.messages)


class Place:
    """Where a delivery stands in the order of its consumer."""

    __slots__ = ("cautious", "delivery", "hand_outs", "message", "messages")

    def __init__(
        self, hand_outs: HandOuts, message: int, delivery: int, messages: int, *, cautious: bool
    ) -> None:
        self.hand_outs = hand_outs
        self.message = message
        """How many messages were sent before it."""
        self.delivery = delivery
        """How many deliveries were sent before it."""
        self.messages = messages
        self.cautious = cautious
        """Whether clients hand it out only after they reported it: it has failed before, or would
        be lost by one attempt too many."""

    @property
    def given(self) -> int:
        """How many of its messages, from the first, the application was or may have been given."""
        return self.hand_outs.given_of(self)
