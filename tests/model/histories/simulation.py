"""One simulated history by its seed: real broker, real storage, real RocksDB, no real time."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.model.histories.checker import Violation, check
from tests.model.histories.claims import Claim
from tests.model.histories.history import History
from tests.model.histories.scenario import QUEUES, Pace, record
from tests.model.histories.simulated_brokers import SPREAD_QUEUES, SimulatedBrokers
from tests.model.histories.simulated_cluster import CLIENT_TIMEOUT_MS, SimulatedCluster
from tests.model.histories.simulated_time import SimulatedClock, simulate
from tests.model.histories.stores import Broken, check_store

PACE: Final = Pace(
    steps=60,
    gap_ms_max=40,
    visibility_ms=300,
    bound_ms=150,
    calm_ms=3_000,
    drain_ms=12_000,
    calm_takeovers=0.05,
)


@dataclass(frozen=True, slots=True)
class Simulated:
    """What happened, what of it must not, and what the broker kept of it in the end."""

    history: History
    violations: list[Violation]
    remembered: dict[str, int]
    broken: Sequence[Broken] = ()
    """What a shared store has confirmed, or its nodes have answered, and must not."""
    claims: Sequence[Claim] = ()
    """Of several brokers."""


def simulated(
    seed: int, directory: Path, *, shared: bool = False, several_brokers: bool = False
) -> Simulated:
    """The history of a seed. The directory is used and removed; a shared store is in memory."""

    async def happen(clock: SimulatedClock) -> Simulated:
        chance = random.Random(seed)
        cluster = SimulatedCluster(directory, clock, chance, shared=shared)
        if several_brokers:
            cluster = SimulatedBrokers(directory, clock, chance)
        await cluster.start()
        try:
            queues = SPREAD_QUEUES if several_brokers else QUEUES
            history = await record(cluster, chance, PACE, queues)
            await clock.sleep_ms(2 * CLIENT_TIMEOUT_MS)
            return Simulated(
                history,
                check(history.events, PACE.bound_ms),
                cluster.remembered(),
                [] if cluster.store is None else check_store(cluster.store.log, cluster.answers),
                cluster.claims if isinstance(cluster, SimulatedBrokers) else [],
            )
        finally:
            await cluster.stop()

    try:
        return simulate(happen, seed)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
