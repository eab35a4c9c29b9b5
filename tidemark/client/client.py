"""The client that `tidemark.connect` returns.

Assembles the parts of the client and checks arguments. One client serves a whole program:
publishers and subscriptions share its connection.
"""

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from random import Random
from typing import Any, Final, Self

import grpc

from tidemark import limits
from tidemark.api.broker.v1.message_pb2 import Ack, Nack, PublishResult, PublishRun
from tidemark.client.admin.admin import Admin
from tidemark.client.arguments import (
    Duration,
    check_addresses,
    check_bool,
    check_callback,
    check_clock,
    check_delay_ms,
    check_group,
    check_instance,
    check_int,
    check_lmq_name,
    check_lmq_names,
    check_ms,
    check_settings,
    check_str,
    check_timeout_ms,
    check_visibility_ms,
)
from tidemark.client.consume.delivery import Delivery, DeliveryBatch
from tidemark.client.consume.eviction import OnEvicted
from tidemark.client.consume.failed_acks import SettleFailed
from tidemark.client.consume.pull import PulledBatch, Puller
from tidemark.client.consume.subscription import Subscription
from tidemark.client.home_loop import HomeLoop
from tidemark.client.publish.publish_buffer import PublishBuffer
from tidemark.client.publish.publisher import BrokerPublishers, Publisher
from tidemark.client.transport.backoff import Backoff, is_transient
from tidemark.client.transport.connection import NAMED_BROKER_MS, Connection, Identity
from tidemark.client.transport.repeater import Repeater
from tidemark.client.transport.routes import Routes
from tidemark.client.transport.unary import UnaryClient
from tidemark.clock import Clock, SystemClock
from tidemark.errors import ClientClosed, InvalidArgument, NotOwner, TidemarkError
from tidemark.names import LmqName, partition_of, validate_client_id, validate_producer_id
from tidemark.rpc.channel import open_channel
from tidemark.topics import Topic, TopicSettings, partitions_of

DEFAULT_GROUP: Final = "default"
MAX_LEASE_MS: Final = 3_600_000
"""How long a handler may work on a message unless a subscription sets another time."""

_FLUSH_TIMEOUT_MS: Final = 5_000
_DESTROY_TIMEOUT_MS: Final = 5_000
_FORWARD_TIMEOUT_MS: Final = 5_000
"""Of a forwarded publish, which is repeated."""


def connect(
    addresses: str | Iterable[str],
    *,
    client_id: str | None = None,
    producer_id: str | None = None,
    publish_timeout_ms: Duration = 30_000,
    connect_timeout_ms: Duration = 10_000,
    call_timeout_ms: Duration = 30_000,
    buffer_bytes_max: int = 16 * 1024 * 1024,
    credentials: grpc.ChannelCredentials | None = None,
    clock: Clock | None = None,
    random: Random | None = None,
) -> "Client":
    """A client of the cluster at `host:port`, or at any of several; use it in `async with`.

    >>> async with tidemark.connect("127.0.0.1:7400", client_id=f"web-{os.getpid()}") as client:
    ...     publisher = await client.publisher("sessions/alice")
    ...     await publisher.publish(b"hello")

    `client_id` names one process: of two that share one, only the last to subscribe to an exclusive
    queue is served. Without it, the client picks a random id.
    `producer_id` is for programs that number their publishes themselves, with `sequence`, so that
    they can repeat them after their own restart; without it the client numbers them, and repeats
    only publishes that it sent itself. `publish_timeout_ms` bounds how long a publish is retried,
    `buffer_bytes_max` how much may be in flight before `publish` waits, `connect_timeout_ms` how
    long the first connection, and a subscription, may take, `call_timeout_ms` how long any other
    call may take, including retries where those are safe.

    Here and in every call: durations are whole milliseconds or a `timedelta`, and a wrong argument
    raises InvalidArgument, whose `field` names it, before anything is sent.
    """
    if client_id is None:
        client_id = f"client-{secrets.token_hex(8)}"
    validate_client_id(check_str("client_id", client_id))
    if producer_id is not None:
        validate_producer_id(check_str("producer_id", producer_id))
    if credentials is not None:
        check_instance("credentials", credentials, grpc.ChannelCredentials)
    return Client(
        check_addresses(addresses),
        client_id=client_id,
        producer_id=producer_id,
        publish_timeout_ms=check_timeout_ms("publish_timeout_ms", publish_timeout_ms),
        connect_timeout_ms=check_timeout_ms("connect_timeout_ms", connect_timeout_ms),
        call_timeout_ms=check_timeout_ms("call_timeout_ms", call_timeout_ms),
        buffer_bytes_max=check_int("buffer_bytes_max", buffer_bytes_max, 1),
        credentials=credentials,
        clock=SystemClock() if clock is None else check_clock(clock),
        random=Random() if random is None else check_instance("random", random, Random),
    )


class Client:
    """A connection to a cluster that reconnects by itself. Made by `tidemark.connect`."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        client_id: str,
        producer_id: str | None,
        publish_timeout_ms: int,
        connect_timeout_ms: int,
        call_timeout_ms: int,
        buffer_bytes_max: int,
        credentials: grpc.ChannelCredentials | None,
        clock: Clock,
        random: Random,
    ) -> None:
        self.client_id = client_id
        self._numbered = producer_id is not None
        # Sequences start at 1 in each client, so each client is a separate producer.
        own_producer = f"{client_id[:64]}-{secrets.token_hex(8)}"
        self._identity = Identity(
            client_id, producer_id or own_producer, clock, random, credentials
        )
        self._connect_timeout_ms = connect_timeout_ms
        self._publish_timeout_ms = publish_timeout_ms
        self._buffer_bytes_max = buffer_bytes_max
        self._repeater = Repeater(
            call_timeout_ms, while_unreachable=True, clock=clock, random=random
        )
        self._addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._subscriptions: set[Subscription] = set()
        self._publishers: dict[str, BrokerPublishers] = {}
        self._state = "new"
        self._ended = asyncio.Event()
        self._home_loop: HomeLoop
        self._routes: Routes
        self._publish_buffer: PublishBuffer

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ClientClosed("a client is entered once; connect again")
        self._state = "open"
        self._home_loop = HomeLoop()
        self._routes = Routes(self._addresses, self._identity)
        self._publish_buffer = PublishBuffer(
            self._routes,
            self._identity,
            self._publish_runs,
            timeout_ms=self._publish_timeout_ms,
            buffer_bytes_max=self._buffer_bytes_max,
        )
        self._routes.carry(self._publish_buffer.lane_part)
        self._routes.start()
        try:
            await self._routes.home.ready(self._connect_timeout_ms)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for pending results, release deliveries, and end the connection.

        When cancelled, everything ends at once. A second call waits for the first.
        """
        if self._state == "new":
            return
        self._home_loop.check()
        if self._state == "closed":
            await self._ended.wait()
            return
        self._state = "closed"
        try:
            if self._routes.home.session is not None:
                with suppress(TimeoutError):
                    clock = self._identity.clock
                    await clock.wait_for(self._publish_buffer.flush(), _FLUSH_TIMEOUT_MS)
            await asyncio.gather(*(each.close() for each in list(self._subscriptions)))
            self._publish_buffer.close(ClientClosed("the client was closed"))
            await self._routes.close()
        finally:
            # Nothing is awaited before every part has ended, so a cancellation cannot skip one.
            for subscription in list(self._subscriptions):
                subscription.end()
            self._publish_buffer.close(ClientClosed("the client was closed"))
            self._routes.end()
            self._ended.set()
            for channel in self._channels.values():
                await channel.close()  # without a grace period: it waits for nothing

    # --- publishing ----------------------------------------------------------------------------

    async def publisher(self, lmq_name: str) -> Publisher:
        """A publisher of one queue, which is created if missing; raises if its topic is missing."""
        self._check_here()
        check_lmq_name(lmq_name)
        clock, backoff = self._identity.clock, Backoff(self._identity.random, may_move=True)
        deadline_ms = clock.monotonic_ms() + self._publish_timeout_ms
        while True:
            left_ms = deadline_ms - clock.monotonic_ms()
            home = await self._routes.home.ready(left_ms)
            first = partition_of(lmq_name, home.welcome.partitions)
            if self._routes.forwards(first):  # the queue is opened by the first run
                topic = await self.admin.get_topic(LmqName.parse(lmq_name).topic)
                spanned = partitions_of(lmq_name, topic, home.welcome.partitions)
                return self._publisher_of(lmq_name, [first] if self._numbered else spanned)
            route = self._routes.to_partition(first)
            try:
                session = await route.ready(left_ms if route.home else NAMED_BROKER_MS)
                opened = await session.open_publisher(lmq_name)
            except TidemarkError as error:
                self._check_open()
                if not is_transient(error) or left_ms <= 0:
                    raise
                learns = isinstance(error, NotOwner) or not route.home
                if learns and not self._routes.forwards(first):
                    self._routes.follow(first, error.metadata.get("owner", ""))
                await clock.sleep_ms(backoff.next_ms(error.retry_after_ms or 0))
                continue
            # Sequences count per partition; and where no partition serves now, the first will.
            healthy = [] if self._numbered else list(opened.partitions)
            publisher = self._publisher_of(lmq_name, healthy or [first])
            self._publishers[lmq_name].ids[first] = opened.publisher_id
            return publisher

    def _publisher_of(self, lmq_name: str, partitions: Sequence[int]) -> Publisher:
        return Publisher(
            lmq_name,
            partitions,
            self._publish_buffer,
            self._publishers.setdefault(lmq_name, BrokerPublishers()),
            self._destroy_publishers,
            numbered=self._numbered,
        )

    async def _destroy_publishers(self, lmq_name: str) -> None:
        """Destroy the broker-side publishers of a queue; an unreachable one ends by timeout."""
        shared = self._publishers.pop(lmq_name, None)
        if shared is None or self._state != "open":
            return
        for publisher_id, partition in {each: at for at, each in shared.ids.items()}.items():
            client = self._unary_client(_DESTROY_TIMEOUT_MS, self._routes.to_calls(partition))
            with suppress(TidemarkError):
                await client.destroy_publisher(publisher_id)

    # --- consuming -----------------------------------------------------------------------------

    def subscribe(
        self,
        lmq_names: Iterable[str],
        *,
        group: str = DEFAULT_GROUP,
        credit: int | None = None,
        visibility_ms: Duration = 0,
        max_lease_ms: Duration = MAX_LEASE_MS,
        on_evicted: OnEvicted | None = None,
        on_settle_failed: SettleFailed | None = None,
    ) -> Subscription:
        """Subscribe to queues; use it in `async with`, and iterate over its deliveries.

        `credit` bounds the unsettled messages in this client; by default it follows the speed of
        the handlers, up to 500. `visibility_ms` is how long messages stay reserved once this
        client is gone; 0 means the topic's setting. While the client works, it renews reservations,
        those in the hands of the application for `max_lease_ms` (default one hour; 0: never).
        `on_evicted` is called when another client, or another process with this `client_id`, takes
        over an exclusive queue, and `on_settle_failed` with a batch and an error when an ack
        failed; without it, failed acks are logged.
        """
        self._check_open()
        names = check_lmq_names(lmq_names)
        check_group(group)
        check_callback("on_evicted", on_evicted)
        check_callback("on_settle_failed", on_settle_failed)
        for other in self._subscriptions:
            twice = set(names) & set(other.lmq_names) if other.group == group else set()
            if twice:
                raise InvalidArgument(
                    f"this client already consumes {', '.join(sorted(twice))} in group {group}",
                    field="lmq_names",
                )
        subscription = Subscription(
            self._routes,
            self._identity,
            names,
            home_loop=self._home_loop,
            group=group,
            credit=None if credit is None else check_int("credit", credit, 1, limits.CREDIT_MAX),
            visibility_ms=check_visibility_ms(visibility_ms, optional=True),
            max_lease_ms=check_ms("max_lease_ms", max_lease_ms, 0, limits.MAX_LEASE_MS_MAX),
            timeout_ms=self._connect_timeout_ms,
            on_evicted=on_evicted,
            on_settle_failed=on_settle_failed,
            on_closed=self._subscriptions.discard,
        )
        self._subscriptions.add(subscription)
        return subscription

    async def pull(
        self,
        lmq_name: str,
        *,
        group: str = DEFAULT_GROUP,
        max_messages: int = 100,
        wait_ms: Duration = 0,
        visibility_ms: Duration = 0,
    ) -> PulledBatch:
        """Reserve messages that are ready, or become ready within `wait_ms`; possibly none."""
        self._check_here()
        return await self._puller().pull(
            check_lmq_name(lmq_name),
            check_group(group),
            check_int("max_messages", max_messages, 1, limits.PULL_MESSAGES_MAX),
            check_ms("wait_ms", wait_ms, 0, limits.PULL_WAIT_MS_MAX),
            check_visibility_ms(visibility_ms, optional=True),
        )

    async def settle(
        self,
        pulled: PulledBatch | DeliveryBatch | Delivery,
        *,
        ack: bool = True,
        delay_ms: Duration = 0,
    ) -> None:
        """Ack pulled messages, or with `ack=False` nack them with a delay; raises if that fails."""
        self._check_here()
        check_instance("pulled", pulled, PulledBatch, DeliveryBatch, Delivery)
        delay_ms = check_delay_ms(delay_ms, limits.NACK_DELAY_MS_MAX)
        if check_bool("ack", ack) and delay_ms:
            raise InvalidArgument("an ack has no delay; pass ack=False", field="delay_ms")
        if isinstance(pulled, PulledBatch):
            action = Ack() if ack else Nack(delay_ms=delay_ms)
            await self._puller().settle_all(pulled.batches, action)
        elif ack:
            await pulled.ack(wait=True)
        else:
            await pulled.nack(delay_ms)

    # --- topics --------------------------------------------------------------------------------

    async def create_topic(self, name: str, **settings: Any) -> Topic:
        """Create a topic; settings that are not given take their defaults.

        >>> await client.create_topic("jobs", max_attempts=5, dead_letter_topic="jobs.dead")

        The broker creates a dead-letter topic that does not exist, or refuses it, as it is set up.
        """
        return await self.admin.create_topic(name, TopicSettings(**check_settings(settings)))

    @property
    def admin(self) -> Admin:
        """Topics, queues, groups and partitions, as an operator sees them.

        >>> async for queue in client.admin.list_queues("sessions"):
        ...     print(queue.lmq_name, queue.messages)
        """
        self._check_open()
        return Admin(self._home_channel, self._repeater)

    # --- inside --------------------------------------------------------------------------------

    def _puller(self) -> Puller:
        return Puller(self._unary_client, self._repeater, self._identity.clock)

    def _unary_client(
        self, timeout_ms: int | None, connection: Connection | None = None
    ) -> UnaryClient:
        channel = self._channel_along(connection or self._routes.home)
        return UnaryClient(channel, self.client_id, timeout_ms=timeout_ms)

    def _home_channel(self) -> grpc.aio.Channel:
        """A channel to the broker that the client is connected to, or is trying to reach."""
        self._check_here()
        return self._channel_along(self._routes.home)

    def _channel_along(self, connection: Connection) -> grpc.aio.Channel:
        """A channel to the broker at the other end of a connection."""
        self._check_open()
        return self._channel_to(connection.address)

    async def _publish_runs(self, runs: Sequence[PublishRun]) -> Sequence[PublishResult]:
        """One unary call at home, which forwards the runs; also while the client is closed."""
        channel = self._channel_to(self._routes.home.address)
        client = UnaryClient(channel, self.client_id, timeout_ms=_FORWARD_TIMEOUT_MS)
        return await client.publish_runs(runs, self._identity.producer_id)

    def _channel_to(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = open_channel(address, credentials=self._identity.credentials)
            self._channels[address] = channel
        return channel

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClientClosed(
                "the client is closed" if self._state == "closed" else "use it in `async with`"
            )

    def _check_here(self) -> None:
        """Of coroutines, which may be made in another thread than the one that runs them."""
        self._check_open()
        self._home_loop.check()
