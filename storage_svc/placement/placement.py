"""Placement of a node among others: asks them, creates its own partitions, and reports lost ones.

Every other node records a creation before it happens, so that a volume that vanishes later is
noticed by the rest of the cluster (C6). Partitions that it holds already are served without asking.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Final, Protocol, TypeVar

from storage_svc.engines.node_record import NodeRecord
from storage_svc.placement.rules import NodeAnswer, Verdict, agreed_count, creator, verdict
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.errors import ClusterMismatch, DataDirectoryInUse, TidemarkError, Unavailable
from tidemark.rpc.channel_pool import ChannelPool

ANSWER_MS_MAX: Final = 5_000
ASK_AGAIN_MS_MIN: Final = 100
ASK_AGAIN_MS_MAX: Final = 5_000

T = TypeVar("T")

_log = logging.getLogger(__name__)


class PartitionHost(Protocol):
    """The partitions of this process."""

    def set_count(self, partitions: int) -> None: ...
    async def create(self, partition: int) -> None: ...
    def report_lost(self, partition: int, detail: str) -> None: ...
    def forget_lost(self, partition: int) -> None: ...


class Placement:
    """One node among others. `run` ends once every partition that it creates is somewhere."""

    def __init__(
        self,
        record: NodeRecord,
        host: PartitionHost,
        address: str,
        addresses: Sequence[str],
        channels: ChannelPool,
        clock: Clock,
        *,
        create_lost: bool = False,
    ) -> None:
        """`address` is that of this node, one of `addresses`."""
        self._record = record
        self._host = host
        self._address = address
        self._addresses = addresses
        self._others = [each for each in addresses if each != address]
        self._own: list[int] = []
        """Partitions that this node creates unless they are found elsewhere."""
        self._channels = channels
        self._clock = clock
        self._create_lost = create_lost
        self._logged: dict[str, str] = {}
        self._recording = asyncio.Lock()

    @property
    def node_id(self) -> str:
        return self._record.node_id

    # --- this node asks ------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises DataDirectoryInUse if another node runs on a copy of the same data."""
        if not self._record.partitions:
            await self._repeat(self._decide_count)
        self._own = [
            number
            for number in range(self._record.partitions)
            if creator(number, self._addresses) == self._address and number not in self._record.held
        ]
        await self._repeat(self._place)
        _log.info("all partitions are placed", extra={"held": len(self._record.held)})

    async def _repeat(self, step: Callable[[], Awaitable[bool]]) -> None:
        """Until it returns true."""
        wait_ms = ASK_AGAIN_MS_MIN
        while not await step():
            await self._clock.sleep_ms(wait_ms)
            wait_ms = min(2 * wait_ms, ASK_AGAIN_MS_MAX)

    async def _decide_count(self) -> bool:
        """Take the number of partitions of the other nodes; returns whether that was possible.

        All of them have to answer: until then this node, without data, has nothing to serve.
        """
        outcomes = await asyncio.gather(
            *(self._ask_count(address) for address in self._others), return_exceptions=True
        )
        self._check(outcomes)
        counts = [each for each in outcomes if isinstance(each, int)]
        if len(counts) < len(self._others):
            return False
        count = agreed_count(counts)
        if not count:
            numbers = dict(zip(self._others, counts, strict=True))
            if self._logged.get("") != str(numbers):
                self._logged[""] = str(numbers)
                _log.error("storage nodes differ in their number of partitions: %s", numbers)
            return False
        try:
            await self._record.decide(count)
        except Exception:  # of any kind: the disk may be full
            _log.exception("the number of partitions cannot be stored")
            return False
        self._host.set_count(count)
        _log.info("the number of partitions is decided", extra={"partitions": count})
        return True

    async def _ask_count(self, address: str) -> int:
        stub = StorageServiceStub(await self._channels.to(address))
        call = stub.DescribeStorage(storage_pb2.DescribeStorageRequest())
        described = await self._answered(address, call)
        if described.cluster_id != self._record.cluster_id:
            raise ClusterMismatch(
                f"{address} belongs to cluster {described.cluster_id!r}, "
                f"not to {self._record.cluster_id!r}"
            )
        return described.partitions

    async def _place(self) -> bool:
        """Ask all others once; returns whether nothing is left to do."""
        answers = await self._ask_all(())
        if answers is None:
            return False
        verdicts = {
            number: verdict(number, self._record.node_id, self._record.placed, answers)
            for number in self._own
        }
        wanted = [number for number, each in verdicts.items() if each is Verdict.CREATE]
        if self._create_lost:
            wanted += [number for number, each in verdicts.items() if each is Verdict.LOST]
        created = await self._create(wanted) if wanted else ()
        for number, each in verdicts.items():
            if number in created or each is Verdict.ELSEWHERE:
                self._host.forget_lost(number)
                self._own.remove(number)
            elif each is Verdict.LOST:
                self._host.report_lost(number, "the node that held it is gone, with its data")
        return not self._own

    async def _create(self, wanted: Collection[int]) -> Collection[int]:
        """Create partitions once every other node has recorded that."""
        answers = await self._ask_all(wanted)
        if answers is None:
            return ()
        node_id = self._record.node_id
        agreed = [
            number for number in wanted if all(each.placed[number] == node_id for each in answers)
        ]
        await self._record.remember(dict.fromkeys(agreed, node_id))
        for number in agreed:
            self._record.held.add(number)
            self._host.forget_lost(number)
            await self._host.create(number)
        return agreed

    async def _ask_all(self, create: Collection[int]) -> list[NodeAnswer] | None:
        """The answers of all other nodes; None if one is missing."""
        outcomes = await asyncio.gather(
            *(self._ask(address, create) for address in self._others), return_exceptions=True
        )
        self._check(outcomes)
        answers = [each for each in outcomes if isinstance(each, NodeAnswer)]
        held = {number: each.node_id for each in answers for number in each.held}
        for number in sorted(held.keys() & self._record.held):
            _log.error("two nodes hold a partition", extra={"partition": number})
        await self._record.remember(
            {number: id_ for number, id_ in held.items() if number not in self._record.held}
        )
        return answers if len(answers) == len(self._others) else None

    async def _ask(self, address: str, create: Collection[int]) -> NodeAnswer:
        stub = StorageServiceStub(await self._channels.to(address))
        request = storage_pb2.PlacePartitionsRequest(
            cluster_id=self._record.cluster_id,
            partitions=self._record.partitions,
            node_id=self._record.node_id,
            create=create,
            replace_lost=self._create_lost,
        )
        answer = await self._answered(address, stub.PlacePartitions(request))
        return NodeAnswer(answer.node_id, frozenset(answer.held), dict(answer.placed))

    async def _answered(self, address: str, call: Awaitable[T]) -> T:
        try:
            answer = await self._clock.wait_for(call, ANSWER_MS_MAX)
        except TimeoutError:
            raise Unavailable(f"{address} did not answer in {ANSWER_MS_MAX} ms") from None
        self._logged.pop(address, None)
        return answer

    def _check(self, outcomes: Sequence[object]) -> None:
        """Log why a node did not answer; raises any other error."""
        for address, outcome in zip(self._others, outcomes, strict=True):
            if isinstance(outcome, TidemarkError) and not isinstance(outcome, DataDirectoryInUse):
                self._log_once(address, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    def _log_once(self, address: str, error: TidemarkError) -> None:
        if self._logged.get(address) != error.reason:
            self._logged[address] = error.reason
            _log.warning(
                "a storage node does not answer: partitions that exist nowhere wait for it",
                extra={"address": address, "reason": error.reason, "why": error.detail},
            )

    # --- another node asks ---------------------------------------------------------------------

    async def answer(
        self, request: storage_pb2.PlacePartitionsRequest
    ) -> storage_pb2.PlacePartitionsResponse:
        """The partitions that this node holds and remembers; records creations of the caller."""
        record = self._record
        if not record.node_id:
            raise Unavailable("this node does not know the number of partitions yet")
        if (request.cluster_id, request.partitions) != (record.cluster_id, record.partitions):
            raise ClusterMismatch(
                f"this is cluster {record.cluster_id} with {record.partitions} partitions",
                cluster=record.cluster_id,
                partitions=str(record.partitions),
            )
        if request.node_id == record.node_id:
            raise DataDirectoryInUse(
                f"the node at another address has the id of this one, {record.node_id}: it runs on "
                "a copy of its data, or TIDEMARK_STORAGE_ADDRESSES names it twice"
            )
        async with self._recording:  # the first to ask gets it
            free = [
                number
                for number in request.create
                if number < record.partitions
                and number not in record.held
                and (request.replace_lost or number not in record.placed)
            ]
            await record.remember(dict.fromkeys(free, request.node_id))
        placed = {**record.placed, **dict.fromkeys(record.held, record.node_id)}
        return storage_pb2.PlacePartitionsResponse(
            node_id=record.node_id, held=sorted(record.held), placed=placed
        )
