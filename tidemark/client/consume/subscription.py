"""A subscription: deliveries of some queues to this client, for as long as it is open.

Owns the messages that were not handed out yet, also when the connection is lost or another client
takes a queue. It has one feed for each broker that serves some of the queues, usually one.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final, Self

from tidemark.api.broker.v1.message_pb2 import Nack, Release
from tidemark.client.consume.buffer import Buffer
from tidemark.client.consume.delivery import Delivery, DeliveryBatch
from tidemark.client.consume.eviction import Eviction, EvictionReason, OnEvicted
from tidemark.client.consume.failed_acks import FailedAcks, SettleFailed, call_back
from tidemark.client.consume.feed import Feed
from tidemark.client.home_loop import HomeLoop
from tidemark.client.transport.backoff import Backoff, is_transient
from tidemark.client.transport.connection import NAMED_BROKER_MS, Identity
from tidemark.client.transport.routes import Routes
from tidemark.errors import ClientClosed, NotOwner, TidemarkError, Unavailable

_FAILED: Final = Nack()
_NOT_TRIED: Final = Release()
_TICK_MS: Final = 500
_WAIT_MS_MAX: Final = 60_000
"""How long a message may wait here, whatever the credit: then it is left to other consumers."""

_LEAVE_TIMEOUT_MS: Final = 5_000

_log = logging.getLogger(__name__)


class Subscription:
    """The result of `client.subscribe`: use it in `async with`, and iterate over it.

    >>> async with client.subscribe(["jobs/a", "jobs/b"], group="web", credit=500) as deliveries:
    ...     async for delivery in deliveries:
    ...         handle(delivery.payload)
    ...         await delivery.ack()

    Any number of tasks may iterate over it: each message goes to one of them, in turn. Iteration
    ends when every queue was taken by other clients. Leaving the block gives back unsettled
    messages: untouched ones as they were, those in hand as a failed attempt.
    """

    def __init__(
        self,
        routes: Routes,
        identity: Identity,
        lmq_names: Sequence[str],
        *,
        home_loop: HomeLoop,
        group: str,
        credit: int | None,
        visibility_ms: int,
        max_lease_ms: int,
        timeout_ms: int,
        on_evicted: OnEvicted | None,
        on_settle_failed: SettleFailed | None,
        on_closed: Callable[["Subscription"], None],
    ) -> None:
        self.group = group
        self._routes = routes
        self._identity = identity
        self._clock = identity.clock
        self._wanted = list(dict.fromkeys(lmq_names))
        self._credit = credit
        self._visibility_ms = visibility_ms
        self._max_lease_ms = max_lease_ms
        self._timeout_ms = timeout_ms
        self._on_evicted = on_evicted
        self._failed_acks = FailedAcks(self._clock, on_settle_failed)
        self._on_closed = on_closed
        self._feeds: dict[str, Feed] = {}
        """By the address of the broker; "" is the one that the client is connected to."""
        self._home_loop = home_loop
        self.buffer = Buffer(self._clock, self)
        self._sooner = asyncio.Event()
        self._error: TidemarkError | None = None
        self._opened = self._closed = False
        self._ticking: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Future[None]] = set()

    @property
    def lmq_names(self) -> list[str]:
        """The queues it draws from now: without those that other clients took."""
        if self._ticking is None:  # not subscribed yet: it is asking for all of them
            return self._wanted
        return [name for feed in self._feeds.values() for name in feed.queues.epochs]

    @property
    def _has_queues(self) -> bool:
        """Whether `lmq_names` has any, without listing them: asked whenever a task waits."""
        if self._ticking is None:
            return bool(self._wanted)
        return any(feed.queues.epochs for feed in self._feeds.values())

    @property
    def closed(self) -> bool:
        """Whether it was left, or ended with its client: iteration over it has ended."""
        return self._closed

    @property
    def has_one_feed(self) -> bool:
        """Whether all of its queues are served by one broker."""
        return sum(1 for feed in self._feeds.values() if feed.queues.epochs) == 1

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._home_loop.check()
        if self._opened or self._closed:
            raise ClientClosed("a subscription is entered once; ask the client for another")
        self._opened = True
        try:
            await self._clock.wait_for(self._subscribe(), self._timeout_ms)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    f"not subscribed within {self._timeout_ms} ms: {self._routes.home.error.detail}"
                ) from None
            raise
        if self._closed:
            raise ClientClosed("the subscription was closed")
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the queues; unsettled messages go back at once."""
        self._home_loop.check()
        if self._closed:
            return
        self._stop()
        feeds = list(self._feeds.values())
        try:
            for feed in feeds:
                feed.stop()
            for feed in feeds:
                self._give_back_untouched(feed)
                for batch in feed.batches:
                    feed.give_back(batch, _FAILED)
            with suppress(TimeoutError):
                await self._clock.wait_for(_leave(feeds), _LEAVE_TIMEOUT_MS)
        finally:
            for feed in feeds:
                feed.close()  # before anything waits: the caller may be cancelled
            self._failed_acks.close()
            async with AsyncExitStack() as leaving:
                for feed in feeds:
                    leaving.push_async_callback(
                        self._routes.leave_group, feed.connection, self.group
                    )

    def end(self) -> None:
        """End at once, without waiting: the broker gives back unsettled messages."""
        self._stop()
        for feed in self._feeds.values():
            feed.close()
        self._failed_acks.close()

    def _stop(self) -> None:
        self._closed = True
        self._on_closed(self)
        self.buffer.wake_up()
        if self._ticking is not None:
            self._ticking.cancel()

    async def flush(self) -> None:
        """Return once every ack, and every other settlement, has its answer.

        Raises the first ack that has failed since the last flush; `error.metadata["failed"]` is the
        number of messages whose acks failed. An ack that was waited for is not among them.
        """
        self._home_loop.check()
        while busy := [each for each in self._feeds.values() if not each.settlements.quiet]:
            await busy[0].settlements.flush()  # it may pass some on to another
        self._failed_acks.raise_first()

    async def _subscribe(self) -> None:
        """Repeat until every queue is subscribed; raises the first refusal that will not pass."""
        backoff = Backoff(self._identity.random, may_move=True)
        wanted = {"": self._wanted}
        while True:
            refusals: list[tuple[str, str, TidemarkError]] = []
            for owner, lmq_names in wanted.items():
                feed = self._feed(owner)
                if feed.connection.home:
                    await feed.connection.ready(None)
                try:
                    session = await feed.connection.ready(NAMED_BROKER_MS)
                    refused = await feed.queues.subscribe(lmq_names, session)
                except TidemarkError as lost:
                    # A named broker that is gone is not asked again, unless home names it again.
                    refused, owner = dict.fromkeys(lmq_names, lost), ""
                refusals += [(owner, lmq_name, error) for lmq_name, error in refused.items()]
            if not refusals:
                return
            wanted = {}
            for owner, lmq_name, error in refusals:
                if not is_transient(error):
                    raise error
                if isinstance(error, NotOwner):
                    owner = error.metadata.get("owner", "")
                wanted.setdefault(owner, []).append(lmq_name)
            await self._clock.sleep_ms(backoff.next_ms())

    def _feed(self, owner: str) -> Feed:
        """The feed of a named broker, or of home."""
        feed = self._at_home(owner) or self._feeds.get(owner)
        if feed is None:
            feed = self._feeds[owner] = Feed(
                self,
                self._routes.for_group(self.group, owner),
                self._identity,
                group=self.group,
                credit=self._credit,
                visibility_ms=self._visibility_ms,
                max_lease_ms=self._max_lease_ms,
                failed_acks=self._failed_acks,
            )
            feed.connection.attach(feed)
        return feed

    def _at_home(self, owner: str) -> Feed | None:
        """The feed of home, if it is connected to the broker that was named."""
        home = self._feeds.get("")
        here = home is not None and home.is_connected and home.connection.address == owner
        return home if here else None

    async def _tick(self) -> None:
        tick_ms = self._clock.monotonic_ms() + _TICK_MS
        while True:
            due = [feed.renewals.due_ms for feed in self._feeds.values()]
            next_ms = min([tick_ms, *(each for each in due if each is not None)])
            self._sooner.clear()
            with suppress(TimeoutError):
                wait_ms = next_ms - self._clock.monotonic_ms()
                await self._clock.wait_for(self._sooner.wait(), max(wait_ms, 1))
                continue
            now_ms = self._clock.monotonic_ms()
            for feed in self._feeds.values():
                feed.renew(now_ms)
            if now_ms >= tick_ms:
                tick_ms = now_ms + _TICK_MS
                self._run_once(now_ms)

    def _run_once(self, now_ms: int) -> None:
        for feed in self._feeds.values():
            feed.expire(now_ms)
            feed.check_hand_outs()
        self._failed_acks.log()
        first = self.buffer.first
        if first is not None:
            self._leave_to_others(now_ms - first.arrived_ms)

    def _leave_to_others(self, waited_ms: int) -> None:
        """Release messages that wait for a slow handler, the last first, to keep the order."""
        for feed in self._feeds.values():
            feed.credit.waited(waited_ms)
        buffered = self.buffer.messages
        if waited_ms > _WAIT_MS_MAX:
            too_many = buffered
            for feed in self._feeds.values():
                feed.paused = True
        else:
            too_many = min(feed.credit.excess(buffered) for feed in self._feeds.values())
        for batch, start in self.buffer.remove_last(too_many):
            for feed in self._feeds.values():
                feed.give_back(batch, _NOT_TRIED, start)

    # --- handing out ---------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        self._home_loop.check()
        return await self.buffer.next_delivery()

    async def batches(self) -> AsyncGenerator[DeliveryBatch, None]:
        """Deliveries as they arrive: a whole run, or a slice of one, at a time."""
        with suppress(StopAsyncIteration):
            while True:
                self._home_loop.check()
                yield await self.buffer.next_batch()

    def wanted(self) -> None:
        """A task waits: for a message, or for the confirmation of its hand-out."""
        starving = self.buffer.first is None
        now_ns = self._clock.monotonic_ns()
        for feed in self._feeds.values():
            feed.paused = False
            feed.hand_outs.paused(now_ns)
            if starving:
                busy_ms = self._clock.monotonic_ms() - self.buffer.last_taken_ms
                feed.credit.starved(busy_ms, self.buffer.last_taken)
            feed.connection.wake()

    def served(self) -> None:
        """A task that waited has its message."""
        now_ns = self._clock.monotonic_ns()
        for feed in self._feeds.values():
            feed.hand_outs.resumed(now_ns)

    def renew_sooner(self) -> None:
        """A reservation has arrived that must be renewed sooner than the others."""
        self._sooner.set()

    def check_open(self) -> None:
        """Raise once nothing more will arrive: the error, or the end of the iteration."""
        if self._error is not None:
            raise self._error
        if self._closed or not self._has_queues:
            raise StopAsyncIteration

    # --- events of feeds -----------------------------------------------------------------------

    def arrived(self, feed: Feed, batches: Sequence[DeliveryBatch]) -> None:
        if not self._closed:
            self.buffer.add(batches)
            return
        for batch in batches:
            feed.give_back(batch, _NOT_TRIED)

    def interrupted(self, feed: Feed) -> None:
        """The session is gone: messages not handed out are delivered again on the next one."""
        self._give_back_untouched(feed)
        if not feed.connection.home and not self._closed:
            # The named broker is gone: home knows which one serves its queues now.
            home = self._feed("")
            feed.pass_on(None, home)
            epochs, feed.queues.epochs = feed.queues.epochs, {}
            for lmq_name, epoch in epochs.items():
                home.queues.take_over(lmq_name, epoch)

    def unreachable(self, feed: Feed) -> None:
        """The broker that was named cannot be reached: home knows which one serves its queues."""
        self.interrupted(feed)
        for owner, each in list(self._feeds.items()):
            if each is feed and not self._closed:
                del self._feeds[owner]
                feed.close()
                leaving = asyncio.ensure_future(
                    self._routes.leave_group(feed.connection, self.group)
                )
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    def lost(self, feed: Feed, eviction: Eviction) -> None:
        """Another client has the queue: its messages in the buffer are fenced."""
        lmq_name = eviction.lmq_name
        self.buffer.remove(lambda batch: batch.lmq_name == lmq_name)
        for batch in feed.batches:
            if batch.lmq_name == lmq_name:
                feed.returned(batch, batch.count)
        self.buffer.wake_up()
        if eviction.reason is EvictionReason.REPLACED:
            # Two processes would take it from each other endlessly, so neither tries again.
            _log.warning(
                "another process with this client_id has taken the queue; give each its own",
                extra={"queue": lmq_name, "client_id": self._identity.client_id},
            )
        if self._on_evicted is not None:
            call_back(self._on_evicted, eviction)

    def moved(self, lmq_name: str, epoch: int, owner: str) -> None:
        self._feed(owner).queues.take_over(lmq_name, epoch)

    def also_held(self, lmq_name: str, owners: Iterable[str]) -> None:
        """Other brokers hold partitions of the queue: each has a separate feed."""
        for owner in owners:
            home = self._feeds.get("")
            at_home = home is not None and home.connection.address == owner
            if not self._closed and not (at_home and home and lmq_name in home.queues.epochs):
                feed = self._feed(owner)
                if lmq_name not in feed.queues.epochs:
                    feed.queues.take_over(lmq_name, 0)

    def feed_of(self, owner: str) -> Feed | None:
        """The feed of a broker that serves a partition now; None if it cannot be reached."""
        feed = self._at_home(owner) or self._feeds.get(owner)
        if feed is None:
            return None if self._closed else self._feed(owner)
        return feed if feed.is_connected else None

    def failed(self, error: TidemarkError) -> None:
        self._error = self._error or error
        self.buffer.wake_up()

    def _give_back_untouched(self, feed: Feed) -> None:
        """Release messages not handed out, also the rest of the batch that is being iterated."""
        for batch in self.buffer.remove(feed.holds):
            feed.give_back(batch, _NOT_TRIED, batch.handed_out)
        self.buffer.wake_up()  # the first batch may be one of another broker now


async def _leave(feeds: Sequence[Feed]) -> None:
    await asyncio.gather(*(feed.leave() for feed in feeds))
