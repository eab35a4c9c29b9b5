"""The figures that sweepers keep anyway, offered as metrics.

Names them and reads them; counts nothing itself.
"""

from collections.abc import Iterator

from lifecycle_svc.sweeper import SweeperState
from lifecycle_svc.sweepers import Sweepers
from tidemark.telemetry import observe
from tidemark.telemetry.metrics import Reading


def offer(sweepers: Sweepers) -> None:
    """Offer the figures of these sweepers, for as long as the process lives."""

    def states() -> Iterator[Reading]:
        now = [sweeper.state for sweeper in sweepers]
        for state in SweeperState:
            yield now.count(state), {"state": state.value}

    observe("gauge", "tidemark.lifecycle.sweepers", "Sweepers by what they do", states)
