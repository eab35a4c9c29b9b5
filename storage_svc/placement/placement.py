"""Placement of a node among others: asks them, creates what is its own, and reports what is lost.

Every other node records a creation before it happens, so that a volume that vanishes later is
noticed by the rest of the cluster (C6). What is held already is served without asking.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from storage_svc.engines.node_record import NodeRecord
from storage_svc.placement.rules import NodeAnswer, Verdict, creator, verdict
from tidemark.api.storage.v1 import storage_pb2
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.errors import ClusterMismatch, DataDirectoryInUse, TidemarkError, Unavailable
from tidemark.rpc.channel_pool import ChannelPool

ANSWER_MS_MAX: Final = 5_000
ASK_AGAIN_MS_MIN: Final = 100
ASK_AGAIN_MS_MAX: Final = 5_000

_log = logging.getLogger(__name__)


class PartitionHost(Protocol):
    """The partitions of this process."""

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
        self._others = [each for each in addresses if each != address]
        self._own = [
            number
            for number in range(record.partitions)
            if creator(number, addresses) == address and number not in record.held
        ]
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
        wait_ms = ASK_AGAIN_MS_MIN
        while not await self.run_once():
            await self._clock.sleep_ms(wait_ms)
            wait_ms = min(2 * wait_ms, ASK_AGAIN_MS_MAX)
        _log.info("all partitions are placed", extra={"held": len(self._record.held)})

    async def run_once(self) -> bool:
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
        answers = [each for each in outcomes if isinstance(each, NodeAnswer)]
        for address, outcome in zip(self._others, outcomes, strict=True):
            if isinstance(outcome, DataDirectoryInUse):
                raise outcome
            if isinstance(outcome, TidemarkError):
                self._log_once(address, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
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
        try:
            answer = await self._clock.wait_for(stub.PlacePartitions(request), ANSWER_MS_MAX)
        except TimeoutError:
            raise Unavailable(f"{address} did not answer in {ANSWER_MS_MAX} ms") from None
        self._logged.pop(address, None)
        return NodeAnswer(answer.node_id, frozenset(answer.held), dict(answer.placed))

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
        """What this node holds and remembers, with the creations of the caller recorded."""
        record = self._record
        if not record.node_id:
            raise Unavailable("the data of this node is not open")
        if (request.cluster_id, request.partitions) != (record.cluster_id, record.partitions):
            raise ClusterMismatch(
                f"this is cluster {record.cluster_id} with {record.partitions} partitions",
                cluster=record.cluster_id,
                partitions=str(record.partitions),
            )
        if request.node_id == record.node_id:
            raise DataDirectoryInUse(
                f"another node runs on the data of node {record.node_id}: one is a copy"
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
