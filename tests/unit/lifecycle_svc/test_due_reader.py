"""Phase one: where a sweep resumes after a page."""

import pytest

from lifecycle_svc.due_reader import FROM_THE_START, DuePage, tokens_after
from lifecycle_svc.planner import URGENT, FactKind

HOUSEKEEPING = [kind for kind in FactKind if kind not in URGENT]


@pytest.mark.parametrize("kind", HOUSEKEEPING)
def test_urgent_work_is_read_again_with_every_page_of_housekeeping(
    kind: FactKind,
) -> None:
    """L5, L7: thousands of dead messages do not delay a scheduled one."""
    tokens = tokens_after(DuePage(next_tokens={kind: b"token"}))

    assert tokens == {**dict.fromkeys(URGENT, b""), kind: b"token"}


def test_a_sweep_ends_once_all_housekeeping_has_been_read() -> None:
    """L7: urgent work beyond the page is left to the next sweep, which reads all kinds."""
    assert tokens_after(DuePage()) == {}
    assert tokens_after(DuePage(next_tokens=dict.fromkeys(URGENT, b"token"))) == {}
    assert set(FROM_THE_START) == URGENT.union(HOUSEKEEPING)
