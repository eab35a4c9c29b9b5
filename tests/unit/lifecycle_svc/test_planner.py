"""The planner: nothing early, and nothing that a broker does itself."""

import pytest

from lifecycle_svc.planner import BROKER_DRIVEN, OVERDUE_MS, Fact, FactKind, plan

NOW_MS = 1_000_000


def fact(kind: FactKind, due_ms: int = NOW_MS, action: str = "act") -> Fact[str]:
    return Fact(kind, due_ms, action)


@pytest.mark.parametrize("kind", FactKind)
def test_what_is_due_is_acted_upon_and_what_is_not_yet_is_not(kind: FactKind) -> None:
    """L5: never early."""
    due, early = fact(kind, NOW_MS, "due"), fact(kind, NOW_MS + 1, "early")

    planned = plan([due, early], NOW_MS, has_broker=False)

    assert planned == ["due"]


@pytest.mark.parametrize("kind", [kind for kind in FactKind if kind in BROKER_DRIVEN])
def test_what_a_connected_broker_sees_to_is_left_to_it_unless_it_is_overdue(kind: FactKind) -> None:
    """V1: the broker drives expiry, sweeps do it where it does not."""
    fresh = fact(kind, NOW_MS - OVERDUE_MS + 1, "fresh")
    overdue = fact(kind, NOW_MS - OVERDUE_MS, "overdue")

    with_broker = plan([fresh, overdue], NOW_MS, has_broker=True)
    alone = plan([fresh, overdue], NOW_MS, has_broker=False)

    assert with_broker == ["overdue"]
    assert alone == ["fresh", "overdue"]


def test_schedules_and_deaths_are_planned_with_and_without_a_broker() -> None:
    """L5."""
    kinds = [kind for kind in FactKind if kind not in BROKER_DRIVEN]

    planned = plan([fact(kind, action=kind.value) for kind in kinds], NOW_MS, has_broker=True)

    assert planned == [kind.value for kind in kinds]


def test_nothing_due_is_an_empty_plan() -> None:
    assert plan([], NOW_MS, has_broker=True) == plan([], NOW_MS, has_broker=False) == []
