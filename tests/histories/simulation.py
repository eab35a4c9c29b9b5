"""One simulated history by its seed: real broker, real storage, real RocksDB, no real time."""

import random
import shutil
from pathlib import Path
from typing import Final

from tests.histories.checker import Violation, check
from tests.histories.history import History
from tests.histories.scenario import Pace, record
from tests.histories.simulated_cluster import SimulatedCluster
from tests.histories.simulated_time import SimulatedClock, simulate

PACE: Final = Pace(steps=60, gap_ms_max=40, visibility_ms=300, bound_ms=150, calm_ms=3_000)


def simulated_history(seed: int, directory: Path) -> tuple[History, list[Violation]]:
    """What happens under a seed, and what of it must not. The directory is used and removed."""

    async def happen(clock: SimulatedClock) -> History:
        chance = random.Random(seed)
        cluster = SimulatedCluster(directory, clock, chance)
        await cluster.start()
        try:
            return await record(cluster, chance, PACE)
        finally:
            await cluster.stop()

    try:
        history = simulate(happen, seed)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return history, check(history.events, PACE.bound_ms)
