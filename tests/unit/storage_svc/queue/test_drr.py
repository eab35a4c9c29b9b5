"""Every fairness key gets its share of the bytes, and none waits longer than a round."""

from hypothesis import given
from hypothesis import strategies as st

from storage_svc.queue.drr import QUANTUM_BYTES, Ring

QUANTUM = 100
KEYS = ("a", "b", "c", "d")


def ring(*keys: str, weights: dict[str, int] | None = None) -> Ring:
    made = Ring(weights, QUANTUM)
    for key in keys:
        made.activate(key)
    return made


def serve(ring: Ring, message_bytes: dict[str, int], messages: int) -> list[str]:
    """Serve single messages of keys that never run out; the keys in the order of service."""
    served: list[str] = []
    while len(served) < messages:
        key = ring.current()
        assert key is not None
        if ring.alone or ring.allowance_bytes() >= message_bytes[key]:
            ring.spend(message_bytes[key])
            served.append(key)
        else:
            ring.rotate()
    return served


def test_an_empty_ring_has_no_key_to_serve() -> None:
    empty = ring()

    assert empty.current() is None
    assert len(empty) == 0
    assert not empty.alone


def test_keys_are_served_in_the_order_in_which_they_became_active() -> None:
    """V7."""
    three = ring("b", "a", "c")

    assert serve(three, dict.fromkeys("abc", QUANTUM), 6) == ["b", "a", "c", "b", "a", "c"]


def test_activating_an_active_key_changes_nothing() -> None:
    two = ring("a", "b")
    two.current()
    two.spend(30)

    two.activate("a")

    assert len(two) == 2
    assert two.current() == "a"
    assert two.allowance_bytes() == QUANTUM - 30


def test_asking_whose_turn_it_is_earns_nothing_twice() -> None:
    two = ring("a", "b")

    assert (two.current(), two.current()) == ("a", "a")

    assert two.allowance_bytes() == QUANTUM


def test_a_weight_multiplies_the_quantum_and_a_key_without_one_weighs_one() -> None:
    """V7, S7."""
    two = ring("a", "b", weights={"a": 3})

    assert serve(two, {"a": QUANTUM, "b": QUANTUM}, 8) == ["a", "a", "a", "b"] * 2


def test_a_weight_that_changes_holds_from_the_next_visit_on() -> None:
    two = ring("a", "b")
    serve(two, {"a": QUANTUM, "b": QUANTUM}, 2)

    two.weights = {"b": 2}

    assert serve(two, {"a": QUANTUM, "b": QUANTUM}, 3) == ["a", "b", "b"]


def test_what_a_visit_leaves_over_counts_in_the_next() -> None:
    two = ring("a", "b")

    assert serve(two, {"a": 60, "b": 100}, 5) == ["a", "b", "a", "a", "b"]


def test_a_message_larger_than_the_quantum_is_served_after_enough_visits() -> None:
    two = ring("a", "b")

    assert serve(two, {"a": 3 * QUANTUM, "b": QUANTUM}, 4) == ["b", "b", "a", "b"]


def test_a_key_that_leaves_loses_what_it_had_earned() -> None:
    two = ring("a", "b")
    two.current()
    two.retire()
    assert "a" not in two
    assert two.alone

    two.activate("a")
    assert two.current() == "b"
    two.rotate()

    assert two.current() == "a"
    assert two.allowance_bytes() == QUANTUM


def test_a_key_alone_owes_nothing_for_what_it_sent() -> None:
    one = ring("a")
    serve(one, {"a": QUANTUM}, 50)

    one.activate("b")

    assert serve(one, {"a": QUANTUM, "b": QUANTUM}, 4) == ["b", "a", "b", "a"]


def test_the_quantum_is_at_least_as_large_as_small_messages_need() -> None:
    default = Ring()
    default.activate("a")
    default.activate("b")

    default.current()

    assert default.allowance_bytes() == QUANTUM_BYTES


@given(
    weights=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 5)),
    message_bytes=st.fixed_dictionaries({key: st.integers(1, 3 * QUANTUM) for key in KEYS}),
    messages=st.integers(1, 300),
)
def test_no_key_strays_from_its_share_by_more_than_a_quantum_and_a_message(
    weights: dict[str, int], message_bytes: dict[str, int], messages: int
) -> None:
    """V7: bytes per weight of keys with a backlog stay together, at any moment."""
    backlog = ring(*KEYS, weights=weights)

    served = serve(backlog, message_bytes, messages)

    sent = {key: served.count(key) * message_bytes[key] for key in KEYS}
    per_weight = {key: sent[key] / weights.get(key, 1) for key in KEYS}
    for one in KEYS:
        for other in KEYS:
            largest = max(message_bytes[key] / weights.get(key, 1) for key in (one, other))
            assert per_weight[one] - per_weight[other] <= QUANTUM + largest


@given(
    before=st.integers(0, 40),
    weights=st.dictionaries(st.sampled_from(KEYS), st.integers(1, 5)),
    active=st.integers(1, 3),
)
def test_a_key_that_becomes_active_is_served_within_one_round(
    before: int, weights: dict[str, int], active: int
) -> None:
    """V7: in the middle of a backlog, whichever key has its visit."""
    message_bytes = dict.fromkeys(KEYS, 10)
    backlog = ring(*KEYS[:active], weights=weights)
    serve(backlog, message_bytes, before)

    backlog.activate("d")
    served = serve(backlog, message_bytes, 1_000)

    others = served[: served.index("d")]
    for key in set(others):
        assert others.count(key) * 10 <= QUANTUM * weights.get(key, 1)
