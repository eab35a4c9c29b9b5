"""Renewals: reservations stay alive while their messages wait here or are worked on.

All that are due leave in one part of a frame. Messages that the application is handling are
renewed up to a limit; then they go back as a failed attempt, one by one, while others of the same
reservation stay. It never hands anything out.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

from tidemark import limits
from tidemark.api.broker.v1 import broker_pb2
from tidemark.client.consume.delivery import DeliveryBatch
from tidemark.client.transport.backoff import is_transient
from tidemark.client.transport.session import Session
from tidemark.clock import Clock
from tidemark.errors import NotOwner
from tidemark.rpc.statuses import from_status

FINEST_MS: Final = 5


class Renewals:
    """The reservations of one feed."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_lease_ms: int,
        lapsed: Callable[[DeliveryBatch, int], None],
        ended: Callable[[DeliveryBatch], None],
        moved: Callable[[int, str], object],
    ) -> None:
        self._clock = clock
        self._max_lease_ms = max_lease_ms
        self._lapsed = lapsed
        """Called for messages, up to an index, whose lease is over."""
        self._ended = ended
        """Called for a reservation that is gone."""
        self._moved = moved
        """Called for a partition that another broker serves."""
        self._in_hand: dict[DeliveryBatch, list[tuple[int, int]]] = {}
        """How many messages of a batch were handed out at which time, as far as that was seen."""
        self._to_send: list[DeliveryBatch] = []
        self.due_ms: int | None = None
        """When to check the reservations again."""

    def watch(self, batch: DeliveryBatch, now_ms: int) -> bool:
        """A batch has arrived or has another deadline; returns whether it must be checked sooner
        than the others."""
        check_ms = now_ms + self._check_in_ms(batch, now_ms)
        if self.due_ms is not None and self.due_ms <= check_ms:
            return False
        self.due_ms = check_ms
        return True

    def pass_on(self, batch: DeliveryBatch, other: "Renewals", now_ms: int) -> None:
        """Have another feed renew a batch, from now on."""
        if batch in self._in_hand:
            other._in_hand[batch] = self._in_hand.pop(batch)
        other.due_ms = now_ms

    def run_once(self, held: Iterable[DeliveryBatch], now_ms: int) -> bool:
        """Check all reservations; returns whether there is something to send."""
        if self.due_ms is None or now_ms < self.due_ms:
            return False
        self.due_ms = None
        in_hand: dict[DeliveryBatch, list[tuple[int, int]]] = {}
        self._to_send = []
        for batch in list(held):
            if batch.handed_out:
                in_hand[batch] = seen = self._in_hand.get(batch, [])
                if not seen or seen[-1][0] < batch.handed_out:
                    seen.append((batch.handed_out, now_ms))
                if self._max_lease_ms and batch.extended_until_ms <= now_ms:
                    lease_ms = max(self._max_lease_ms, batch.visibility_ms)
                    while seen and seen[0][1] + lease_ms <= now_ms:
                        self._lapsed(batch, seen.pop(0)[0])
            if not batch.open:
                continue
            left_ms = batch.deadline_ms - now_ms
            if self._is_renewed(batch) and 0 < left_ms <= batch.visibility_ms // 2:
                self._to_send.append(batch)
            self.watch(batch, now_ms)
        self._in_hand = in_hand
        return bool(self._to_send)

    def prepare(self, session: Session) -> bool:
        """Submit due renewals; returns whether there is more than fits a frame."""
        due = self._to_send[: limits.RENEWALS_PER_FRAME_MAX]
        self._to_send = self._to_send[limits.RENEWALS_PER_FRAME_MAX :]
        by_visibility: dict[int, list[DeliveryBatch]] = {}
        for batch in due:
            by_visibility.setdefault(batch.visibility_ms, []).append(batch)
        for visibility_ms, batches in by_visibility.items():
            self._send(session, visibility_ms, batches)
        return bool(self._to_send)

    def _send(self, session: Session, visibility_ms: int, batches: list[DeliveryBatch]) -> None:
        # By the time they were reserved for: the topic's may have changed since.
        renewal = broker_pb2.Renewal(visibility_ms=visibility_ms)
        for batch in batches:
            if batch.session_id == session.welcome.session_id:
                renewal.delivery_tags.append(batch.tag)
            else:
                renewal.receipts.add(receipt=batch.receipt, given_messages=batch.handed_out)
        sent_ms = self._clock.monotonic_ms()
        answer = session.submit_renewal(renewal)
        answer.add_done_callback(partial(self._answered, batches, sent_ms))

    def _answered(
        self,
        sent: Sequence[DeliveryBatch],
        sent_ms: int,
        answer: "asyncio.Future[broker_pb2.RenewalResult]",
    ) -> None:
        if answer.exception() is not None:
            return  # the session has ended: the next check renews them
        refused: set[int | bytes] = set()
        gone: set[int | bytes] = set()
        moved: dict[int, str] = {}
        for each in answer.result().refused:
            refused.add(each.delivery_tag or each.receipt)
            error = from_status(each.error)
            if isinstance(error, NotOwner):
                moved[int(error.metadata["partition"])] = error.metadata.get("owner", "")
            elif not is_transient(error):
                gone.add(each.delivery_tag or each.receipt)
        for partition, owner in moved.items():
            self._moved(partition, owner)
        for batch in sent:
            if not refused:
                batch.deadline_ms = max(batch.deadline_ms, sent_ms + batch.visibility_ms)
            elif batch.tag in gone or batch.receipt in gone:
                self._ended(batch)
            elif batch.tag not in refused and batch.receipt not in refused:
                batch.deadline_ms = max(batch.deadline_ms, sent_ms + batch.visibility_ms)

    def _is_renewed(self, batch: DeliveryBatch) -> bool:
        return self._max_lease_ms > 0 or not batch.handed_out

    def _check_in_ms(self, batch: DeliveryBatch, now_ms: int) -> int:
        every_ms = batch.visibility_ms // 4
        left_ms = batch.deadline_ms - now_ms
        if self._is_renewed(batch) and left_ms > 0:
            every_ms = min(every_ms, left_ms // 2)  # `extend` may have left less than usual
        return max(every_ms, FINEST_MS)
