"""A connection to a broker: a session that is opened again whenever it ends.

Owns reconnecting and heartbeats. Its parts (the publish buffer, the feeds of subscriptions) own the
requests: they are notified when a session begins and ends, and add to each frame before it is
written. The connection never repeats a request for them.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

import grpc

from tidemark.api.broker.v1 import broker_pb2, subscription_pb2
from tidemark.client.transport.backoff import Backoff
from tidemark.client.transport.notifier import Notifier
from tidemark.client.transport.session import Session
from tidemark.clock import Clock
from tidemark.errors import (
    ClientError,
    Internal,
    NotOwner,
    QuotaExceeded,
    TidemarkError,
    Unavailable,
)

_HELLO_TIMEOUT_MS: Final = 5_000
_CLOSE_TIMEOUT_MS: Final = 2_000
NAMED_BROKER_MS: Final = 1_000
"""How long a new publisher or subscription waits for a broker that another one named."""
_PROVEN_AFTER_MS: Final = 1_000
"""A session that lasted this long resets the backoff."""

_HEARTBEATS_PER_TIMEOUT: Final = 3
_ADDRESSES_MAX: Final = 64
"""Addresses that home tries: those that the user named, and those that brokers did."""
# Client errors that refuse a session only for now.
_TRANSIENT_REFUSALS: Final = (NotOwner, QuotaExceeded)

_log = logging.getLogger(__name__)

N = TypeVar("N")


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids under which a client connects, and the clock, randomness and credentials it uses."""

    client_id: str
    producer_id: str
    clock: Clock
    random: Random
    credentials: grpc.ChannelCredentials | None = None


class SessionPart:
    """A part of a client that sends over a connection. By default it sends and does nothing."""

    def prepare(self, session: Session) -> bool:
        """Submit requests for the next frame; returns whether some did not fit."""
        return False

    def connected(self, session: Session) -> None:
        """A session has begun."""

    def disconnected(self, error: TidemarkError) -> None:
        """The session has ended; the connection opens another one."""

    def unreachable(self, error: TidemarkError) -> None:
        """The broker that another one named cannot be reached; the connection tries again."""

    def failed(self, error: TidemarkError) -> None:
        """The connection is closed or refused for good: no session follows."""

    def held(self) -> broker_pb2.HeldSubscriptions | None:
        """The exclusive queues that this part believes it owns."""
        return None

    def unsubscribed(self, notice: subscription_pb2.UnsubscribeNotice) -> None:
        """This client no longer owns a queue."""

    def moved(self, go_away: broker_pb2.GoAway) -> None:
        """The broker, or a partition, is going away."""

    def session_error(self, error: broker_pb2.SessionError) -> None:
        """A request that has no result in the protocol failed."""


class Connection:
    """Stays connected to one of its addresses until it is closed or refused for good."""

    def __init__(self, addresses: Sequence[str], identity: Identity, *, home: bool) -> None:
        self.home = home
        """Whether it may use any broker; other connections go to one that a broker named."""
        self.groups: set[str] = set()
        """Groups that consume here: a full resync covers all queues of its group."""
        self.session: Session | None = None
        self.error: TidemarkError = Unavailable("not connected yet")
        """Why there is no session."""
        self.is_unreachable = False
        """Whether the broker that another one named did not answer the last time it was tried."""
        self._addresses = list(addresses)
        self._identity = identity
        self._clock = identity.clock
        self._backoff = Backoff(identity.random, may_move=not home)
        self._parts: list[SessionPart] = []
        self._changed = Notifier()
        self._refused = False
        self._closing = False
        self.draining = False
        """Whether the broker is leaving: no new runs; the session ends once all have results."""
        self._task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The broker that it is connected to, or is trying to reach."""
        return self._addresses[0]

    @property
    def has_consumers(self) -> bool:
        return bool(self.groups)

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"tidemark {self.address}")

    async def ready(self, timeout_ms: int | None) -> Session:
        """The session, once there is one; raises the reason if there is none after the timeout."""
        session = self.session
        if session is not None:
            return session
        try:
            await self._clock.wait_for(self._until_settled(), timeout_ms)
        except TimeoutError:
            raise Unavailable(
                f"no broker at {', '.join(self._addresses)} within {timeout_ms} ms: "
                f"{self.error.detail}"
            ) from None
        if self.session is None:
            raise self.error
        return self.session

    async def close(self) -> None:
        """End the session once pending results have arrived; when cancelled, at once."""
        self._closing = True
        try:
            if self.session is not None:
                with suppress(TimeoutError, TidemarkError):
                    await self._clock.wait_for(self.session.close(), _CLOSE_TIMEOUT_MS)
        finally:
            self.end()
        if self._task is not None:
            await asyncio.wait({self._task})

    def end(self) -> None:
        """End at once, without waiting: the session, its heartbeats and every waiter."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
        if self.session is not None:
            self.session.end()
        self._refuse(Unavailable("the client was closed"))

    def attach(self, part: SessionPart) -> None:
        self._parts.append(part)
        if self.session is not None:
            part.connected(self.session)
        elif self._refused:
            part.failed(self.error)

    def detach(self, part: SessionPart) -> None:
        if part in self._parts:
            self._parts.remove(part)

    def wake(self) -> None:
        """A part has something to send."""
        if self.session is not None:
            self.session.wake()

    def notify_moved(self, go_away: broker_pb2.GoAway) -> None:
        """The broker, or a partition, has moved."""
        for part in list(self._parts):
            part.moved(go_away)

    # --- staying connected ---------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                session = await self._open()
            except ClientError as error:
                if not isinstance(error, _TRANSIENT_REFUSALS):
                    self._refuse(error)
                    return
                self.error = error
            except TidemarkError as error:
                self.error = error
                if not self.home:
                    self.is_unreachable = True
                    for part in list(self._parts):
                        part.unreachable(error)
            else:
                await self._serve(session)
            self._addresses.append(self._addresses.pop(0))
            await self._clock.sleep_ms(self._backoff.next_ms())

    async def _open(self) -> Session:
        opening = Session.open(
            self.address,
            self._identity.client_id,
            producer_id=self._identity.producer_id,
            credentials=self._identity.credentials,
        )
        try:
            return await self._clock.wait_for(opening, _HELLO_TIMEOUT_MS)
        except TimeoutError:
            raise Unavailable(f"{self.address} did not answer") from None

    async def _serve(self, session: Session) -> None:
        """Use a session until it ends."""
        begun_ms = self._clock.monotonic_ms()
        try:
            ended = await self._use(session)
        finally:
            await session.abort()
        self._lost(ended)
        if self._clock.monotonic_ms() - begun_ms >= _PROVEN_AFTER_MS:
            self._backoff.reset()
        _log.info("session lost", extra={"reason": ended.reason, "broker": self.address})

    async def _use(self, session: Session) -> TidemarkError:
        session.prepare = self._prepare
        self.session = session
        self.draining = self.is_unreachable = False
        for part in list(self._parts):
            part.connected(session)
        self._changed.notify_all()
        heartbeats = asyncio.create_task(self._keep_alive(session))
        try:
            while (ended := session.ended) is None:
                await session.notified.wait_for(lambda: _has_notices(session))
                self._forward_notices(session)
            return ended
        finally:
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)

    async def _keep_alive(self, session: Session) -> None:
        every_ms = max(1, session.welcome.client_timeout_ms // _HEARTBEATS_PER_TIMEOUT)
        while session.ended is None:
            await self._clock.sleep_ms(every_ms)
            if not self._closing:
                held = (part.held() for part in self._parts)
                session.heartbeat([each for each in held if each is not None])

    def _forward_notices(self, session: Session) -> None:
        """Pass on notices and errors that the broker sent unasked."""
        session.failed_settlements.clear()
        for notice in _drain(session.unsubscribed):
            for part in list(self._parts):
                part.unsubscribed(notice)
        for go_away in _drain(session.go_aways):
            if not go_away.HasField("partition"):
                self.draining = True
            self._learn(go_away)
            self.notify_moved(go_away)
        for error in _drain(session.errors):
            for part in list(self._parts):
                part.session_error(error)

    def _learn(self, go_away: broker_pb2.GoAway) -> None:
        """Home also tries the other brokers of the cluster once its own is gone."""
        address = go_away.address
        if self.home and address and address not in self._addresses:
            drains = not go_away.HasField("partition")
            if len(self._addresses) < _ADDRESSES_MAX:
                self._addresses.insert(1 if drains else len(self._addresses), address)

    def _prepare(self) -> bool:
        session = self.session
        if session is None or session.ended is not None:
            return False
        more = False
        for part in list(self._parts):
            more |= self._prepared(part, session)
        return more

    def _prepared(self, part: SessionPart, session: Session) -> bool:
        """Let one part submit; a part that raises fails alone, and the session continues."""
        try:
            return part.prepare(session)
        except TidemarkError:
            raise  # the session has ended
        except Exception as error:
            _log.exception("a part could not add to the frame")
            part.failed(Internal(f"a part could not add to the frame: {error!r:.200}"))
            return False

    def _lost(self, error: TidemarkError, *, for_good: bool = False) -> None:
        self.error = error
        was_connected, self.session = self.session is not None, None
        for part in list(self._parts):
            if was_connected:
                part.disconnected(error)
            if for_good:
                part.failed(error)

    def _refuse(self, error: TidemarkError) -> None:
        """The broker refused for good, or the user closed the client: all parts fail."""
        if self._refused:
            return
        self._refused = True
        self._lost(error, for_good=True)
        self._changed.notify_all()

    async def _until_settled(self) -> None:
        await self._changed.wait_for(lambda: self.session is not None or self._refused)


def _has_notices(session: Session) -> bool:
    return bool(session.ended or session.errors or session.unsubscribed or session.go_aways)


def _drain(notices: list[N]) -> Iterable[N]:
    drained = list(notices)
    notices.clear()
    return drained
