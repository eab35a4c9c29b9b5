"""Benchmark `many-queues-million`: one message to each of 1 000 000 queues, delivered and acked.

Nothing is warm: each queue is opened for a publisher and a consumer, used once and left. The aim is
a minute on two cores. There is no bar: the report shows which process and step takes the time.
"""

import json
from typing import Final

from bench.harness.benchmark import Bench, benchmark, once
from bench.harness.cluster import running_cluster
from bench.harness.usage import cpu_ns
from bench.many_queues import million_client
from bench.many_queues.sides import TOTAL, client_process, line_of

WAVE_QUEUES: Final = 10_000
"""As many as one connection may subscribe to."""

_SERVICES: Final = ("broker", "storage")


@benchmark("many-queues-million", "one message to each of a million queues, used once")
async def million(bench: Bench) -> None:
    queues = bench.queues or bench.size(full=1_000_000, quick=10_000)
    wave = min(queues, bench.size(full=WAVE_QUEUES, quick=WAVE_QUEUES // 4))
    bench.settings |= {"queues": queues, "queues_per_wave": wave}
    async with (
        running_cluster(bench.directory / "million") as cluster,
        client_process(million_client, cluster.address("broker")) as client,
    ):
        pids = {"client": client.pid, **{name: cluster.pid(name) for name in _SERVICES}}
        used_ns = {name: cpu_ns(pid) for name, pid in pids.items()}
        took_s: dict[str, float] = {}
        for done in range(0, queues, wave):
            if done % (10 * wave) == 0:
                bench.progress(f"{done:,} of {queues:,} queues")
            line = await line_of(client, str(min(wave, queues - done)))
            for step, seconds in json.loads(line).items():
                took_s[step] = took_s.get(step, 0.0) + seconds
        used_us = {name: (cpu_ns(pid) - used_ns[name]) / 1000 for name, pid in pids.items()}
    total_s = sum(took_s.values())
    figures = {
        "queues_per_s": queues / total_s,
        "a_million_s": total_s / queues * 1_000_000,
        TOTAL: sum(used_us.values()) / queues,
        **{f"{name}_{TOTAL}": used / queues for name, used in used_us.items()},
        **{f"{step}_s": seconds for step, seconds in took_s.items()},
    }
    bench.tables.append([once(f"{queues:,} queues", figures)])
