"""The takeover as a table: every state and every event; what is not allowed changes nothing."""

from collections.abc import Callable
from typing import Final

import pytest

from broker_svc.exclusive import takeover
from broker_svc.exclusive.takeover import IllegalEvent, Owned, Owner, State, Transferring, Vacant

VACANT: Final = Vacant(5)
OWNED: Final = Owned(Owner("ada", 5))
FROM_VACANT: Final = Transferring("bob", VACANT)
FROM_ADA: Final = Transferring("bob", OWNED)
UNKNOWN_FROM_VACANT: Final = Transferring("bob", VACANT, must_read=True)
UNKNOWN_FROM_ADA: Final = Transferring("bob", OWNED, must_read=True)

STATES: Final[dict[str, State]] = {
    "vacant": VACANT,
    "owned": OWNED,
    "from vacant": FROM_VACANT,
    "from ada": FROM_ADA,
    "unknown, from vacant": UNKNOWN_FROM_VACANT,
    "unknown, from ada": UNKNOWN_FROM_ADA,
}

Event = Callable[[State], State]

EVENTS: Final[dict[str, Event]] = {
    "transfer_began(bob)": lambda state: takeover.transfer_began(state, "bob"),
    "transfer_began(ada)": lambda state: takeover.transfer_began(state, "ada"),
    "confirmed(ada, 4)": lambda state: takeover.confirmed(state, Owner("ada", 4)),
    "confirmed(ada, 5)": lambda state: takeover.confirmed(state, Owner("ada", 5)),
    "confirmed(bob, 6)": lambda state: takeover.confirmed(state, Owner("bob", 6)),
    "transferred(4)": lambda state: takeover.transferred(state, 4),
    "transferred(5)": lambda state: takeover.transferred(state, 5),
    "transferred(6)": lambda state: takeover.transferred(state, 6),
    "refused": takeover.refused,
    "outcome_unknown": takeover.outcome_unknown,
    "read(ada, 4)": lambda state: takeover.read(state, "ada", 4),
    "read(ada, 5)": lambda state: takeover.read(state, "ada", 5),
    "read(bob, 6)": lambda state: takeover.read(state, "bob", 6),
    "read(vacant, 4)": lambda state: takeover.read(state, "", 4),
    "read(vacant, 6)": lambda state: takeover.read(state, "", 6),
}

BOB_AT_5: Final = Owned(Owner("bob", 5))
BOB_AT_6: Final = Owned(Owner("bob", 6))

EVERY_TRANSFER: Final[dict[str, State]] = {
    "transferred(5)": BOB_AT_5,
    "transferred(6)": BOB_AT_6,
}

EVERY_STATE: Final[dict[str, State]] = {
    "read(ada, 5)": OWNED,
    "read(bob, 6)": BOB_AT_6,
    "read(vacant, 6)": Vacant(6),
}

ALLOWED: Final[dict[tuple[str, str], State]] = {
    ("vacant", "transfer_began(bob)"): FROM_VACANT,
    ("vacant", "transfer_began(ada)"): Transferring("ada", VACANT),
    ("vacant", "confirmed(ada, 5)"): OWNED,
    ("vacant", "confirmed(bob, 6)"): BOB_AT_6,
    ("owned", "transfer_began(bob)"): FROM_ADA,
    ("owned", "transfer_began(ada)"): Transferring("ada", OWNED),
    ("owned", "confirmed(ada, 5)"): OWNED,
    ("owned", "confirmed(bob, 6)"): BOB_AT_6,
    **{(state, event): after for state in STATES for event, after in EVERY_STATE.items()},
    **{
        (state, event): after
        for state in ("from vacant", "from ada", "unknown, from vacant", "unknown, from ada")
        for event, after in EVERY_TRANSFER.items()
    },
    ("from vacant", "refused"): VACANT,
    ("from ada", "refused"): OWNED,
    ("from vacant", "outcome_unknown"): UNKNOWN_FROM_VACANT,
    ("from ada", "outcome_unknown"): UNKNOWN_FROM_ADA,
    ("unknown, from vacant", "outcome_unknown"): UNKNOWN_FROM_VACANT,
    ("unknown, from ada", "outcome_unknown"): UNKNOWN_FROM_ADA,
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", STATES)
def test_the_table(state: str, event: str) -> None:
    """E9: what is not in the table raises."""
    before = STATES[state]
    allowed = ALLOWED.get((state, event))

    if allowed is None:
        with pytest.raises(IllegalEvent):
            EVENTS[event](before)
    else:
        assert EVENTS[event](before) == allowed


@pytest.mark.parametrize(("state", "event"), ALLOWED)
def test_epochs_never_go_down(state: str, event: str) -> None:
    """E10."""
    before = STATES[state]

    assert takeover.epoch_of(ALLOWED[state, event]) >= takeover.epoch_of(before)
    assert takeover.epoch_of(EVENTS[event](before)) >= takeover.epoch_of(before)


@pytest.mark.parametrize("state", STATES)
def test_states_are_values_that_no_event_changes(state: str) -> None:
    before = STATES[state]
    copy = type(before)(*before)

    for event in EVENTS.values():
        try:
            event(before)
        except IllegalEvent:
            continue

    assert before == copy


def test_no_client_owns_during_a_transfer_whose_outcome_is_unknown() -> None:
    """E9: a claim whose answer was lost ends only with an answer of storage."""
    unknown = takeover.outcome_unknown(takeover.transfer_began(OWNED, "bob"))

    with pytest.raises(IllegalEvent):
        takeover.refused(unknown)
    with pytest.raises(IllegalEvent):
        takeover.transfer_began(unknown, "cy")

    assert takeover.read(unknown, "ada", 5) == OWNED
    assert takeover.read(unknown, "bob", 6) == BOB_AT_6
