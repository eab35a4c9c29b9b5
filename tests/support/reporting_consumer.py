"""A consumer that reports what it hands out, over a plain session: the protocol without the SDK."""

import asyncio
from typing import Any

from tests.support.local_broker import QUEUE, LocalBroker, in_time, reason_of, run_of, take
from tests.support.session import Consumer, Session
from tidemark.api.broker.v1 import broker_pb2
from tidemark.api.broker.v1.message_pb2 import Delivery
from tidemark.clock import ManualClock
from tidemark.rpc import from_status

MESSAGES = 10
VISIBILITY_MS = 60_000
PATIENT: dict[str, Any] = {
    "client_timeout_ms": 3_600_000,
    "topic": {"visibility_timeout_ms": VISIBILITY_MS},
}


class ReportingConsumer(Consumer):
    """A consumer like any other, which reports hand-outs when the test asks for it."""

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


async def hold(session: Session, *runs: int) -> ReportingConsumer:
    """A consumer without credit that holds runs of these lengths, each as one delivery."""
    consumer = ReportingConsumer(session, credit=sum(runs))
    await consumer.subscribe(QUEUE)
    for messages in runs:
        await session.publish(QUEUE, [b"%d" % number for number in range(messages)])
        await take(consumer, messages)
    return consumer


def attempts_of(deliveries: list[Delivery]) -> list[int]:
    """The attempts of each message, in the order of the queue."""
    ordered = sorted(deliveries, key=lambda each: each.first_offset)
    return [each.attempt_count for each in ordered for _ in range(each.count)]


async def pull_all(local: LocalBroker, messages: int = MESSAGES, **fields: Any) -> list[Delivery]:
    pulled: list[Delivery] = []
    while sum(each.count for each in pulled) < messages:
        request = local.pull(QUEUE, client_id="other", max_messages=100, wait_ms=30_000, **fields)
        pulled += await in_time(request)
    return pulled


async def run_out(local: LocalBroker, clock: ManualClock) -> None:
    """Let every reservation run out, with time for the notes that the broker makes before.

    Operations of a partition keep their order: once a publish is answered, earlier notes are made.
    """
    for _ in range(16):
        await clock.advance_ms(VISIBILITY_MS // 8)
        (result,) = await local.publish(run_of("orders/other", b"x"))
        assert reason_of(result) == ""


async def renew(session: Session, **fields: Any) -> list[str]:
    """Renew reservations; returns the reasons of refused ones."""
    answer = session.submit_renewal(broker_pb2.Renewal(**fields))
    session.wake()
    result = await in_time(answer)
    return [from_status(each.error).reason for each in result.refused]
