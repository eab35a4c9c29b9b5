"""Metrics of the sweepers' own figures. Names and reads them; counts nothing itself."""

from collections.abc import Iterator

from lifecycle_svc.sweeper import SweeperState
from lifecycle_svc.sweepers import Sweepers
from tidemark.telemetry import observe
from tidemark.telemetry.metrics import Reading


def register(sweepers: Sweepers) -> None:
    """Expose the figures of these sweepers for the life of the process."""

    def states() -> Iterator[Reading]:
        now = [sweeper.state for sweeper in sweepers]
        for state in SweeperState:
            yield now.count(state), {"state": state.value}

    observe("gauge", "tidemark.lifecycle.sweepers", "Sweepers by state", states)
