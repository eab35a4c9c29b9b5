"""Brokers that share the partitions of a cluster, and fail one after the other."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Mapping
from typing import Final

from bench.failover.publishing import Publishing, until
from tidemark.local.cluster import LocalCluster, ServiceName

BROKERS: Final = 3


class Brokers:
    """The brokers of a cluster, and a client that publishes to it."""

    def __init__(self, cluster: LocalCluster, publishing: Publishing) -> None:
        self._cluster = cluster
        self._publishing = publishing
        self._admin = publishing.client.admin
        self._names = cluster.services_of("broker")
        self._turn = 0

    async def fail(self, fault: str) -> float:
        """Let the next broker fail and come back; the longest wait of a publish, in ms."""
        name = self._names[self._turn % BROKERS]
        broker_id = f"broker-{self._turn % BROKERS}"
        self._turn += 1
        await self.until_held()
        held = await self._held()
        partition = next(number for number, holder in held.items() if holder == broker_id)
        ending: list[asyncio.Future[int]] = []

        async def has_left() -> bool:
            return (await self._held())[partition] != broker_id

        longest_ms = await self._publishing.longest_ms(
            partition, lambda: self._inject(fault, name, ending), has_left
        )
        if fault == "SIGSTOP":
            os.kill(self._cluster.pid(name), signal.SIGCONT)
        else:
            await asyncio.gather(*ending)
            await self._cluster.restart(name)
        return longest_ms

    async def leave_and_join(self) -> Mapping[str, float]:
        """How many partitions move when the next broker leaves, and when it joins again."""
        place = self._turn % BROKERS
        self._turn += 1
        await until(self._is_balanced)
        before = await self._assigned()
        await self._cluster.terminate(self._names[place])
        without = await self._assigned()
        await self._cluster.restart(self._names[place])
        await until(self._is_balanced)
        after = await self._assigned()
        return {
            "own": sum(holder == f"broker-{place}" for holder in before.values()),
            "moved_by_leave": _moves(before, without),
            "moved_by_join": _moves(without, after),
            "loads_differ_by": _difference(after),
        }

    async def until_held(self) -> None:
        """Every partition is held by the broker that it is assigned to, and all are members."""
        await until(self._is_held)

    async def _is_held(self) -> bool:
        members = await self._admin.list_members()
        brokers = [each for each in members if each.kind == "BROKER" and not each.error]
        return len(brokers) == BROKERS and await self._assigned() == await self._held()

    async def _is_balanced(self) -> bool:
        return await self._is_held() and _difference(await self._held()) <= 1

    async def _assigned(self) -> dict[int, str]:
        described = await self._admin.describe_cluster()
        return {number: each.broker_id for number, each in described.assigned.items()}

    async def _held(self) -> dict[int, str]:
        partitions = await self._admin.list_partitions()
        return {each.partition: each.broker_id for each in partitions}

    async def _inject(
        self, fault: str, name: ServiceName, ending: list[asyncio.Future[int]]
    ) -> None:
        """A broker that ends by itself does so in the future that is added."""
        if fault == "SIGTERM":
            ending.append(asyncio.ensure_future(self._cluster.terminate(name)))
        elif fault == "kill -9":
            await self._cluster.kill(name)
        else:
            os.kill(self._cluster.pid(name), signal.SIGSTOP)


def _moves(before: Mapping[int, str], after: Mapping[int, str]) -> int:
    return sum(before[number] != holder for number, holder in after.items())


def _difference(holders: Mapping[int, str]) -> int:
    """Between the most and the least loaded broker."""
    loads = Counter({f"broker-{place}": 0 for place in range(BROKERS)})
    loads.update(holders.values())
    return max(loads.values()) - min(loads.values())
