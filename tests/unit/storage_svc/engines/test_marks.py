"""What became of a commit whose answer was lost, from the mark of the store."""

import pytest

from storage_svc.engines.marks import Fate, Mark, fate_of

BEFORE = Mark(5, b"opening", 9, b"before")
COMMIT = Mark(5, b"opening", 10, b"mine")


@pytest.mark.parametrize(
    ("stored", "fate"),
    [
        pytest.param(COMMIT, Fate.DONE, id="it is the last one"),
        pytest.param(Mark(6, b"other", 10, b"mine"), Fate.DONE, id="done before a takeover"),
        pytest.param(BEFORE, Fate.NOT_DONE, id="the one before is the last"),
        pytest.param(Mark(6, b"other", 9, b"before"), Fate.FENCED, id="taken over before it came"),
        pytest.param(Mark(6, b"other", 10, b"other"), Fate.FENCED, id="another has its number"),
        pytest.param(Mark(6, b"other", 11, b"other"), Fate.UNKNOWN, id="others came since"),
        pytest.param(Mark(5, b"opening", 8, b"older"), Fate.LOST, id="confirmed ones are gone"),
        pytest.param(Mark(4, b"older", 9, b"before"), Fate.LOST, id="the epoch itself is gone"),
        pytest.param(Mark(5, b"other", 9, b"before"), Fate.LOST, id="its epoch was given again"),
        pytest.param(Mark(5, b"opening", 9, b"fork"), Fate.LOST, id="another commit in its place"),
        pytest.param(None, Fate.LOST, id="everything is gone"),
    ],
)
def test_the_mark_of_the_store_decides(stored: Mark | None, fate: Fate) -> None:
    """S9: a lost answer is resolved by asking, and never guessed."""
    assert fate_of(BEFORE, COMMIT, stored) is fate
