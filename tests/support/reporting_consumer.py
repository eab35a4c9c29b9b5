"""A consumer that reports what it hands out, over a plain session: the protocol without the SDK."""

import asyncio

from tests.support.local_broker import in_time
from tests.support.session import Consumer, Session
from tidemark.api.broker.v1 import broker_pb2


class ReportingConsumer(Consumer):
    """Iterate over it, or take from it, as from any consumer; it hands out what the test says."""

    def __init__(self, session: Session, *, credit: int, visibility_ms: int = 0) -> None:
        consumer_id = session.open_taker(
            self, "", credit=credit, visibility_ms=visibility_ms, reports_hand_outs=True
        )
        super().__init__(session, consumer_id, "")
        self._plain_session = session
        self._number = 0
        self.confirmed: list[broker_pb2.HandOuts] = []
        self.ended: set[int] = set()
        """Tags of deliveries that the broker has named as ended."""
        self._confirmation = asyncio.Event()

    def report(
        self,
        *,
        messages: int = 0,
        deliveries: int = 0,
        first_attempts: int = 0,
        urgent: bool = True,
    ) -> int:
        """Send a report; returns its number."""
        self._number += 1
        self._plain_session.report_hand_outs(
            broker_pb2.HandOuts(
                consumer_id=self.consumer_id,
                number=self._number,
                messages=messages,
                deliveries=deliveries,
                first_attempts=first_attempts,
                urgent=urgent,
            )
        )
        self._plain_session.wake()
        return self._number

    async def hand_out(
        self, *, messages: int = 0, deliveries: int = 0, first_attempts: int = 0
    ) -> None:
        """Report, and wait until the broker has confirmed it."""
        number = self.report(
            messages=messages, deliveries=deliveries, first_attempts=first_attempts
        )

        async def is_confirmed() -> None:
            while not any(each.number == number for each in self.confirmed):
                self._confirmation.clear()
                await self._confirmation.wait()

        await in_time(is_confirmed())

    def deliveries_ended(self, tags: set[int]) -> None:
        self.ended |= tags

    def hand_outs_noted(self, report: broker_pb2.HandOuts) -> None:
        self.confirmed.append(report)
        self._confirmation.set()
