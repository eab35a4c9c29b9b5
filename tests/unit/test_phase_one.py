"""Phase one: where a sweep goes on reading after a page."""

import pytest

from lifecycle_svc.due_reader import FROM_THE_START, Reading, after
from lifecycle_svc.planner import URGENT, FactKind

CLEARING = [kind for kind in FactKind if kind not in URGENT]


@pytest.mark.parametrize("kind", CLEARING)
def test_what_is_urgent_is_read_anew_beside_every_page_of_what_is_cleared_up(
    kind: FactKind,
) -> None:
    """L5, L7: thousands of dead messages do not make a scheduled one wait for the last of them."""
    tokens = after(Reading(next_tokens={kind: b"token"}))

    assert tokens == {**dict.fromkeys(URGENT, b""), kind: b"token"}


def test_a_sweep_ends_once_everything_to_clear_up_was_seen() -> None:
    """L7: what is urgent and did not fit the page is the next sweep's, which looks at all kinds."""
    assert after(Reading()) == {}
    assert after(Reading(next_tokens=dict.fromkeys(URGENT, b"token"))) == {}
    assert set(FROM_THE_START) == URGENT.union(CLEARING)
