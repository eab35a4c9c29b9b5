"""The checker itself: a history that is right passes, and one broken rule at a time is seen."""

import pytest

from tests.model.histories.checker import LOST_WITHIN_MS, Rule, check
from tests.model.histories.history import (
    ASKS,
    LOST,
    By,
    Delivered,
    Disturbed,
    Event,
    Outcome,
    Owned,
    Published,
    Settled,
)

QUEUE = "own/a"
BOUND_MS = 100


def owned(
    client: str,
    epoch: int,
    began: int,
    *,
    at_ms: int = 0,
    by: By = By.SUBSCRIBED,
    waits: bool = True,
) -> Owned:
    return Owned(at_ms, began, client, QUEUE, epoch, by, waits)


def delivered(
    client: str,
    message: int,
    epoch: int,
    count: int = 1,
    *,
    at_ms: int = 0,
    stream: int = 0,
    began: int | None = None,
    since: int = 0,
) -> Delivered:
    stream = stream or ord(client[0])
    return Delivered(at_ms, client, stream, QUEUE, message, message, epoch, count, began, since)


def acked(
    client: str,
    message: int,
    epoch: int,
    began: int,
    count: int = 1,
    outcome: Outcome = Outcome.ACCEPTED,
) -> Settled:
    return Settled(0, began, client, QUEUE, message, epoch, count, True, outcome)


def broken(*events: Event) -> set[Rule]:
    return {violation.rule for violation in check(events, BOUND_MS)}


TAKEOVER = (
    owned("ada", 1, 0),
    Published(0, QUEUE, 1),
    delivered("ada", 1, 1),
    owned("bob", 2, 3),
    delivered("bob", 1, 2, 2),
)
"""Ada owns and stalls, Bob takes the queue and what Ada holds."""


def test_a_takeover_as_it_should_be_breaks_nothing() -> None:
    fenced = acked("ada", 1, 1, 5, outcome=Outcome.REFUSED)

    assert broken(*TAKEOVER, fenced, acked("bob", 1, 2, 6, 2)) == set()


@pytest.mark.parametrize(
    "second",
    [owned("bob", 1, 1), owned("bob", 1, 1, by=By.CONFIRMED), delivered("bob", 1, 1)],
    ids=["subscribed", "confirmed", "served"],
)
def test_two_owners_under_one_epoch_are_rejected(second: Event) -> None:
    """E1."""
    assert Rule.ONE_OWNER_PER_EPOCH in broken(owned("ada", 1, 0), second)


@pytest.mark.parametrize("by", By)
def test_an_epoch_below_one_that_was_known_before_is_rejected(by: By) -> None:
    """E7, E10: a stale resync that is confirmed, or a counter that was lost."""
    history = (owned("ada", 5, 0, waits=False), owned("bob", 4, 1, by=by, waits=False))

    assert broken(*history) == {Rule.EPOCHS_GROW}


def test_an_epoch_that_was_asked_for_before_a_higher_one_was_known_is_not() -> None:
    assert broken(owned("ada", 5, 0, waits=False), owned("bob", 4, 0, waits=False)) == set()


def test_a_pull_that_began_after_the_takeover_and_brings_something_is_rejected() -> None:
    """E3."""
    stale = delivered("ada", 1, 1, 1, stream=9, began=4)

    assert broken(*TAKEOVER, stale, acked("bob", 1, 2, 6, 2)) == {Rule.NO_STALE_DELIVERY}


def test_a_session_that_falls_back_to_a_lower_epoch_is_rejected() -> None:
    """E9."""
    history = (
        Published(0, QUEUE, 1),
        delivered("ada", 1, 3),
        delivered("ada", 1, 1, 2),
        acked("ada", 1, 3, 3, 2),
    )

    assert broken(*history) == {Rule.NO_STALE_DELIVERY}


def test_a_stale_settle_that_is_accepted_is_rejected() -> None:
    """E8."""
    assert broken(*TAKEOVER, acked("ada", 1, 1, 4, 2)) == {Rule.NO_STALE_SETTLE}


def test_a_settle_that_was_asked_before_the_takeover_was_known_is_not() -> None:
    history = (*TAKEOVER[:4], acked("ada", 1, 1, 3))

    assert broken(*history) == set()


def test_a_message_that_comes_again_after_its_ack_is_rejected() -> None:
    """V6."""
    history = (
        owned("ada", 1, 0),
        Published(0, QUEUE, 1),
        delivered("ada", 1, 1),
        acked("ada", 1, 1, 3),
        delivered("ada", 1, 1, 2),
    )

    assert broken(*history) == {Rule.SETTLED_STAYS_SETTLED}


def test_an_acknowledged_message_on_a_later_connection_is_rejected_whatever_its_count() -> None:
    """V6, S8: acknowledged stays acknowledged over moves. What a connection of before the
    acknowledgement still carries is excused."""
    history = (
        owned("ada", 1, 0),
        Published(0, QUEUE, 1),
        delivered("ada", 1, 1),
        acked("ada", 1, 1, 3),
    )

    assert broken(*history, delivered("ada", 1, 1, stream=9, since=3)) == set()
    later = delivered("ada", 1, 1, stream=9, since=4)
    assert broken(*history, later) == {Rule.SETTLED_STAYS_SETTLED}


@pytest.mark.parametrize("outcome", [None, Outcome.REFUSED])
def test_a_published_message_that_no_client_acknowledged_is_rejected(
    outcome: Outcome | None,
) -> None:
    """E10: it was lost, or progress went past it."""
    refused = () if outcome is None else (acked("bob", 1, 2, 5, 2, outcome),)

    assert broken(*TAKEOVER, *refused) == {Rule.NOTHING_SKIPPED}


def test_an_ack_of_which_nothing_was_heard_may_have_counted() -> None:
    assert broken(*TAKEOVER, acked("bob", 1, 2, 5, 2, Outcome.UNKNOWN)) == set()


def test_a_message_that_comes_for_the_first_time_after_a_later_one_is_rejected() -> None:
    """S2, E10."""
    history = (
        Published(0, QUEUE, 1),
        Published(0, QUEUE, 2),
        delivered("ada", 2, 1),
        delivered("ada", 1, 1),
        acked("ada", 1, 1, 4),
        acked("ada", 2, 1, 4),
    )

    assert broken(*history) == {Rule.NOTHING_SKIPPED}


def late(*between: Event) -> tuple[Event, ...]:
    """Bob takes a queue with a message at 500 ms, and gets it too late."""
    return (
        Published(0, QUEUE, 1),
        owned("bob", 2, 1, at_ms=500),
        *between,
        delivered("bob", 1, 2, at_ms=501 + BOUND_MS),
        acked("bob", 1, 2, 3 + len(between)),
    )


def test_a_new_owner_that_waits_too_long_is_rejected() -> None:
    """E9: a lost wake-up."""
    assert broken(*late()) == {Rule.FIRST_MESSAGE_IN_TIME}
    assert broken(*late(Disturbed(399, "fault"))) == {Rule.FIRST_MESSAGE_IN_TIME}
    assert broken(*late(Disturbed(500, "leaves", "ada"))) == {Rule.FIRST_MESSAGE_IN_TIME}
    assert broken(*late(Disturbed(500, ASKS, "bob", QUEUE))) == {Rule.FIRST_MESSAGE_IN_TIME}
    assert broken(*late(Disturbed(500, ASKS, "ada", "own/b"))) == {Rule.FIRST_MESSAGE_IN_TIME}


@pytest.mark.parametrize(
    "disturbed",
    [
        Disturbed(450, "fault"),
        Disturbed(550, "leaves", "bob"),
        Disturbed(550, ASKS, "ada", QUEUE),
    ],
    ids=lambda disturbed: disturbed.what,
)
def test_a_new_owner_that_was_disturbed_may_wait(disturbed: Disturbed) -> None:
    assert broken(*late(disturbed)) == set()


def test_a_new_owner_that_never_gets_what_it_waits_for_is_rejected() -> None:
    """E9: its message may have been acknowledged, but not before it owned."""
    history = (
        Published(0, QUEUE, 1),
        owned("bob", 2, 1),
        acked("eve", 1, 3, 2, outcome=Outcome.UNKNOWN),
    )

    assert broken(*history) == {Rule.FIRST_MESSAGE_IN_TIME}


def test_a_new_owner_of_a_queue_whose_messages_were_acknowledged_may_wait() -> None:
    history = (
        Published(0, QUEUE, 1),
        delivered("ada", 1, 1),
        acked("ada", 1, 1, 2),
        owned("bob", 2, 3),
    )

    assert broken(*history) == set()


def after_loss(*events: Event) -> tuple[Event, ...]:
    """Ada owned, published, acknowledged one of two messages; then it is reported as lost."""
    return (
        owned("ada", 2, 0, waits=False),
        Published(0, QUEUE, 1),
        Published(0, QUEUE, 2),
        delivered("ada", 1, 2),
        delivered("ada", 2, 2),
        acked("ada", 2, 2, 5),
        Disturbed(10, LOST),
        *events,
    )


def test_what_was_answered_before_a_reported_loss_may_be_undone() -> None:
    """S9: messages are gone, come again, have offsets of others, and an earlier owner is back."""
    again = LOST_WITHIN_MS + 20
    history = after_loss(
        owned("bob", 1, 7, at_ms=again, by=By.CONFIRMED, waits=False),
        delivered("ada", 2, 2, 2, at_ms=again),
        delivered("ada", 1, 2, at_ms=again),
    )

    assert broken(*history) == set()


def test_a_loss_excuses_nothing_that_is_answered_after_it() -> None:
    """S9."""
    later = LOST_WITHIN_MS + 20
    history = after_loss(
        owned("bob", 5, 7, at_ms=later, waits=False),
        Published(later, QUEUE, 3),
        owned("ada", 4, 9, at_ms=later, waits=False),
    )

    assert broken(*history) == {Rule.NOTHING_SKIPPED, Rule.EPOCHS_GROW}


def test_a_loss_that_is_reported_too_late_excuses_nothing_before() -> None:
    """S9: what came again before it was reported was served quietly."""
    history = (
        Published(0, QUEUE, 1),
        delivered("ada", 1, 1),
        acked("ada", 1, 1, 2),
        delivered("ada", 1, 1, 2),
        Disturbed(10, LOST),
    )

    assert broken(*history) == {Rule.SETTLED_STAYS_SETTLED}
