"""Unary calls at a broker that does not hold their partitions: forwarded one hop (S8).

A call is split by holder and its results keep their order; if a holder does not answer, only its
part fails, where results are one by one. A session is never forwarded: its client follows
NOT_OWNER. Without other brokers the broker API is served without this module.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc

from broker_svc.api.broker_service import BrokerService
from broker_svc.api.session_consumers import DEFAULT_GROUP
from broker_svc.components import BrokerComponents
from broker_svc.links.holders import FORWARDED, Holders, is_forwarded
from tidemark.api.broker.v1 import broker_pb2, broker_pb2_grpc, message_pb2, subscription_pb2
from tidemark.errors import PublisherNotFound, TidemarkError
from tidemark.names import LmqName
from tidemark.receipts import Receipt
from tidemark.rpc.deadline import remaining_ms
from tidemark.rpc.statuses import to_status
from tidemark.topics import partitions_of

Context = grpc.aio.ServicerContext[Any, Any]

_HERE: Final = ""
_PULL_ROUND_MS: Final = 1_000
"""How long one round of a pull waits at all holders of a queue."""
_RELEASE_TIMEOUT_S: Final = 10.0
_COMPLETE: Final = (
    subscription_pb2.SYNC_MODE_COMPLETE_ADD,
    subscription_pb2.SYNC_MODE_COMPLETE_REMOVE,
)

R = TypeVar("R")


class ForwardingService(broker_pb2_grpc.BrokerServiceServicer):
    """The broker API in front of that of this broker and of the others."""

    def __init__(
        self, local: BrokerService, components: BrokerComponents, holders: Holders
    ) -> None:
        self._local = local
        self._components = components
        self._holders = holders
        self._releasing: set[asyncio.Task[None]] = set()

    async def Session(
        self, request_iterator: AsyncIterator[broker_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[broker_pb2.SessionResponse]:
        async for frame in self._local.Session(request_iterator, context):
            yield frame

    # --- publish and settle --------------------------------------------------------------------

    async def Publish(
        self, request: broker_pb2.PublishRequest, context: Context
    ) -> broker_pb2.PublishResponse:
        if is_forwarded(context):
            return await self._local.Publish(request, context)
        holders = [await self._holder_of_run(run) for run in request.runs]
        if not any(holders):
            return await self._local.Publish(request, context)

        async def publish(holder: str, at: Sequence[int]) -> Sequence[message_pb2.PublishResult]:
            runs = [request.runs[place] for place in at]
            part = broker_pb2.PublishRequest(
                client_id=request.client_id, producer_id=request.producer_id, runs=runs
            )
            try:
                if holder == _HERE:
                    return (await self._local.Publish(part, context)).results
                stub = await self._holders.broker(holder)
                publishing = stub.Publish(part, metadata=FORWARDED, timeout=_left_s(context))
                answer = await self._holders.answer(holder, publishing)
            except TidemarkError as error:
                status = to_status(error)
                return [
                    message_pb2.PublishResult(request_id=run.request_id, error=status)
                    for run in runs
                ]
            return answer.results

        parts = _by_holder(holders)
        answers = await asyncio.gather(*(publish(*each) for each in parts.items()))
        return broker_pb2.PublishResponse(results=_in_order(parts, answers))

    async def Settle(
        self, request: broker_pb2.SettleRequest, context: Context
    ) -> broker_pb2.SettleResponse:
        if is_forwarded(context):
            return await self._local.Settle(request, context)
        if not any(self._holder_of_settlement(each) for each in request.settlements):
            return await self._local.Settle(request, context)
        results = await self._settle_parts(
            request.client_id, request.settlements, _left_s(context), context
        )
        return broker_pb2.SettleResponse(results=results)

    async def _settle_parts(
        self,
        client_id: str,
        settlements: Sequence[message_pb2.Settlement],
        timeout_s: float | None,
        context: Context,
    ) -> Sequence[message_pb2.SettleResult]:
        async def settle(holder: str, at: Sequence[int]) -> Sequence[message_pb2.SettleResult]:
            asked = [settlements[place] for place in at]
            part = broker_pb2.SettleRequest(client_id=client_id, settlements=asked)
            try:
                if holder == _HERE:
                    return (await self._local.Settle(part, context)).results
                stub = await self._holders.broker(holder)
                settling = stub.Settle(part, metadata=FORWARDED, timeout=timeout_s)
                return (await self._holders.answer(holder, settling)).results
            except TidemarkError as error:
                status = to_status(error)
                return [
                    message_pb2.SettleResult(request_id=each.request_id, error=status)
                    for each in asked
                ]

        parts = _by_holder(map(self._holder_of_settlement, settlements))
        answers = await asyncio.gather(*(settle(*each) for each in parts.items()))
        return _in_order(parts, answers)

    # --- pull ----------------------------------------------------------------------------------

    async def Pull(
        self, request: broker_pb2.PullRequest, context: Context
    ) -> broker_pb2.PullResponse:
        if is_forwarded(context):
            return await self._local.Pull(request, context)
        holders = await self._holders_of_queue(request.lmq_name)
        if len(holders) == 1:
            return await self._pull(holders[0], request, context)
        clock = self._components.clock
        ends_ms = clock.monotonic_ms() + request.wait_ms
        while True:
            wait_ms = max(0, ends_ms - clock.monotonic_ms())
            part = broker_pb2.PullRequest()
            part.CopyFrom(request)
            part.wait_ms = min(wait_ms, _PULL_ROUND_MS)
            answer = await self._pull_once(holders, part, context)
            if answer.deliveries or wait_ms <= _PULL_ROUND_MS:
                return answer

    async def _pull_once(
        self, holders: Sequence[str], request: broker_pb2.PullRequest, context: Context
    ) -> broker_pb2.PullResponse:
        """The first answer with messages; an empty answer requires every holder to reply.

        The other pulls end by themselves, and their messages are released: a pull that is cancelled
        just after it was answered would leave its messages reserved until they expire.
        """
        pulls = {asyncio.create_task(self._pull(each, request, context)) for each in holders}
        waiting = set(pulls)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for pull in done:
                    if pull.exception() is None and pull.result().deliveries:
                        pulls.discard(pull)
                        return pull.result()
            answers = [pull.result() for pull in pulls]  # raises the first error
            return answers[0]
        finally:
            releasing = asyncio.create_task(self._release(pulls, request.client_id, context))
            self._releasing.add(releasing)
            releasing.add_done_callback(self._releasing.discard)

    async def _pull(
        self, holder: str, request: broker_pb2.PullRequest, context: Context
    ) -> broker_pb2.PullResponse:
        if holder == _HERE:
            return await self._local.Pull(request, context)
        stub = await self._holders.broker(holder)
        pulling = stub.Pull(request, metadata=FORWARDED, timeout=_left_s(context))
        return await self._holders.answer(holder, pulling)

    async def _release(
        self,
        pulls: "Iterable[asyncio.Task[broker_pb2.PullResponse]]",
        client_id: str,
        context: Context,
    ) -> None:
        """Give back the messages of pulls with an answer that is not used."""
        outcomes = await asyncio.gather(*pulls, return_exceptions=True)
        settlements: list[message_pb2.Settlement] = []
        for outcome in outcomes:
            if isinstance(outcome, broker_pb2.PullResponse):
                for delivery in outcome.deliveries:
                    released = message_pb2.Settlement(receipt=delivery.receipt)
                    released.release.SetInParent()
                    settlements.append(released)
        await self._settle_parts(client_id, settlements, _RELEASE_TIMEOUT_S, context)

    # --- subscriptions -------------------------------------------------------------------------

    async def SyncSubscriptions(
        self, request: broker_pb2.SyncSubscriptionsRequest, context: Context
    ) -> broker_pb2.SyncSubscriptionsResponse:
        if is_forwarded(context):
            return await self._local.SyncSubscriptions(request, context)
        sync = request.sync
        holders = [(await self._holders_or_here(entry.lmq_name))[0] for entry in sync.entries]
        parts = _by_holder(holders)
        if sync.mode in _COMPLETE:  # it also ends subscriptions that are not in it, at every broker
            for holder in (_HERE, *self._holders.others):
                parts.setdefault(holder, [])

        async def synchronize(
            holder: str, at: Sequence[int]
        ) -> Sequence[subscription_pb2.SubscriptionResult]:
            part = broker_pb2.SyncSubscriptionsRequest()
            part.CopyFrom(request)
            del part.sync.entries[:]
            part.sync.entries.extend(sync.entries[place] for place in at)
            if holder == _HERE:
                answer = await self._local.SyncSubscriptions(part, context)
            else:
                stub = await self._holders.broker(holder)
                synchronizing = stub.SyncSubscriptions(
                    part, metadata=FORWARDED, timeout=_left_s(context)
                )
                answer = await self._holders.answer(holder, synchronizing)
            return answer.result.results

        if not parts:
            return await self._local.SyncSubscriptions(request, context)
        answers = await asyncio.gather(*(synchronize(*each) for each in parts.items()))
        result = subscription_pb2.SubscriptionSyncResult(
            request_id=sync.request_id, results=_in_order(parts, answers)
        )
        return broker_pb2.SyncSubscriptionsResponse(result=result)

    async def Heartbeat(
        self, request: broker_pb2.HeartbeatRequest, context: Context
    ) -> broker_pb2.HeartbeatResponse:
        """Forwarded to every broker, because the client may hold messages of each."""
        if is_forwarded(context):
            return await self._local.Heartbeat(request, context)
        parts = {
            holder: broker_pb2.HeartbeatRequest(client_id=request.client_id)
            for holder in (_HERE, *self._holders.others)
        }
        for held in request.held:
            for entry in held.entries:
                holder = (await self._holders_or_here(entry.lmq_name))[0]
                part = parts.setdefault(
                    holder, broker_pb2.HeartbeatRequest(client_id=request.client_id)
                )
                group = held.group or DEFAULT_GROUP
                if not part.held or part.held[-1].group != group:
                    part.held.add(group=group)
                part.held[-1].entries.append(entry)

        async def beat(
            holder: str, part: broker_pb2.HeartbeatRequest
        ) -> broker_pb2.HeartbeatResponse:
            stub = await self._holders.broker(holder)
            beating = stub.Heartbeat(part, metadata=FORWARDED, timeout=_left_s(context))
            return await self._holders.answer(holder, beating)

        response = await self._local.Heartbeat(parts.pop(_HERE), context)
        answers = await asyncio.gather(
            *(beat(*each) for each in parts.items()), return_exceptions=True
        )
        for part, answer in zip(parts.values(), answers, strict=True):
            if isinstance(answer, broker_pb2.HeartbeatResponse):
                response.unsubscribed.extend(answer.unsubscribed)
            elif part.held or not isinstance(answer, TidemarkError):
                raise answer
        return response

    async def DestroyPublisher(
        self, request: broker_pb2.DestroyPublisherRequest, context: Context
    ) -> broker_pb2.DestroyPublisherResponse:
        try:
            return await self._local.DestroyPublisher(request, context)
        except PublisherNotFound:
            if is_forwarded(context):
                raise
            for holder in self._holders.others:
                stub = await self._holders.broker(holder)
                with suppress(PublisherNotFound):
                    return await stub.DestroyPublisher(
                        request, metadata=FORWARDED, timeout=_left_s(context)
                    )
            raise

    # --- holders -------------------------------------------------------------------------------

    async def _holder_of_run(self, run: message_pb2.PublishRun) -> str:
        if run.HasField("partition"):
            return self._holders.address(run.partition)
        holders = await self._holders_or_here(run.lmq_name)
        return _HERE if _HERE in holders else holders[0]

    def _holder_of_settlement(self, settlement: message_pb2.Settlement) -> str:
        with suppress(TidemarkError):  # refused by this broker
            return self._holders.address(Receipt.decode(settlement.receipt).partition)
        return _HERE

    async def _holders_or_here(self, lmq_name: str) -> Sequence[str]:
        """The holders of a queue; this broker if the name or topic is wrong."""
        try:
            return await self._holders_of_queue(lmq_name)
        except TidemarkError:
            return [_HERE]

    async def _holders_of_queue(self, lmq_name: str) -> Sequence[str]:
        """The brokers that hold the partitions of a queue, in the order of its partitions."""
        topic = await self._components.topics.get(LmqName.parse(lmq_name).topic)
        partitions = partitions_of(lmq_name, topic, self._components.settings.partitions)
        return list(dict.fromkeys(self._holders.address(each) for each in partitions))


def _by_holder(holders: Iterable[str]) -> dict[str, list[int]]:
    """The places of each holder."""
    places: dict[str, list[int]] = {}
    for place, holder in enumerate(holders):
        places.setdefault(holder, []).append(place)
    return places


def _in_order(parts: Mapping[str, Sequence[int]], answers: Iterable[Iterable[R]]) -> list[R]:
    """The results of all parts, each at the place of its request."""
    results: dict[int, R] = {}
    for places, answer in zip(parts.values(), answers, strict=True):
        results.update(zip(places, answer, strict=True))
    return [results[place] for place in sorted(results)]


def _left_s(context: Context) -> float | None:
    left_ms = remaining_ms(context)
    return None if left_ms is None else left_ms / 1000
