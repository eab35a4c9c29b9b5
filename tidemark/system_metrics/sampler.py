"""The sampler: samples key figures every second and stores aggregates every minute (R12).

The service supplies the figures. While storage cannot be reached, samples keep accumulating and are
stored later as one longer interval.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from tidemark.api.storage.v1.retention_pb2 import MetricRow, RecordMetricsRequest
from tidemark.clock import Clock
from tidemark.errors import TidemarkError
from tidemark.system_metrics.aggregates import Aggregate, Aggregates

SAMPLE_EVERY_MS: Final = 1_000
STORE_EVERY_MS: Final = 60_000

Store = Callable[[Sequence[Aggregate]], Awaitable[None]]

_log = logging.getLogger(__name__)


class Sampler:
    """Samples figures and stores their aggregates."""

    def __init__(self, figures: Callable[[], Mapping[str, float]], store: Store) -> None:
        self._figures = figures
        self._store = store
        self._aggregates = Aggregates()

    async def run(self, clock: Clock) -> None:
        """Sample and store until cancelled."""
        store_at_ms = clock.monotonic_ms() + STORE_EVERY_MS
        while True:
            await clock.sleep_ms(SAMPLE_EVERY_MS)
            self.sample()
            if clock.monotonic_ms() >= store_at_ms:
                store_at_ms += STORE_EVERY_MS
                try:
                    await self.store()
                except TidemarkError as error:
                    _log.warning("metrics were not stored", extra={"why": error.detail})

    def sample(self) -> None:
        self._aggregates.add(self._figures())

    async def store(self) -> int:
        """Store the aggregates since the last store; returns the number of figures."""
        aggregates = self._aggregates.read()
        if aggregates:
            await self._store(aggregates)
            self._aggregates.clear()
        return len(aggregates)


def recorder(retention: Any, instance: str) -> Store:
    """A store that calls storage's RetentionService."""

    async def record(aggregates: Sequence[Aggregate]) -> None:
        rows = [
            MetricRow(
                instance=instance,
                name=each.name,
                samples=each.samples,
                min=each.least,
                max=each.most,
                mean=each.mean,
                last=each.last,
            )
            for each in aggregates
        ]
        await retention.RecordMetrics(RecordMetricsRequest(rows=rows))

    return record
