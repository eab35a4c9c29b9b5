"""Exclusive queues under thousands of random histories (E1, E3, E7-E10), each told by its seed.

`make test-histories` runs thousands; `make test-histories ARGS="--seed 17"` repeats one and shows it.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.histories.checker import Rule
from tests.histories.history import Delivered, Disturbed, Owned, Settled
from tests.histories.simulation import simulated_history

HISTORIES, HISTORIES_LONG = 60, 2_000
MUTANT_HISTORIES_MAX = 60
_AGAIN = 'make test-histories ARGS="--seed {seed}"'


def seeds(config: pytest.Config) -> range:
    """The seeds that were asked for, or the first ones."""
    seed: int | None = config.getoption("--seed")
    if seed is not None:
        return range(seed, seed + 1)
    long = config.getoption("--long")
    count = config.getoption("--histories") or (HISTORIES_LONG if long else HISTORIES)
    return range(1, count + 1)


@pytest.mark.timeout(0)
def test_no_history_breaks_a_rule(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """E1, E7, E8, E9, E10."""
    happened: Counter[str] = Counter()
    for seed in seeds(pytestconfig):
        history, violations = simulated_history(seed, tmp_path / str(seed))

        told = "\n".join(map(str, violations))
        again = _AGAIN.format(seed=seed)
        assert not violations, f"seed {seed}: {told}\n\n{history}\n\nrepeat it: {again}"
        if len(seeds(pytestconfig)) == 1:
            print(f"seed {seed}\n{history}")
        happened.update(_what_happened(history.events))
    if len(seeds(pytestconfig)) > 1:
        missing = {"accepted", "refused", "unknown", *By_names(), "delivered", *FAULTS} - set(
            happened
        )
        assert not missing, f"never happened: {missing}"
    print(dict(happened))


FAULTS = {f"{what} fails" for what in ("broker", "storage", "both", "link", "commit")}


def By_names() -> set[str]:
    return {"subscribed", "confirmed"}


def _what_happened(events: Any) -> Counter[str]:
    happened: Counter[str] = Counter()
    for event in events:
        match event:
            case Settled(outcome=outcome):
                happened[outcome.value] += 1
            case Owned(by=by):
                happened[by.value] += 1
            case Disturbed(what=what):
                happened[what] += 1
            case Delivered():
                happened["delivered"] += 1
    return happened


def test_a_seed_is_a_history(tmp_path: Path) -> None:
    """Whoever finds a fault can find it again."""
    first, _ = simulated_history(7, tmp_path / "first")
    second, _ = simulated_history(7, tmp_path / "second")

    assert str(first) == str(second)


# --- what the checker is for: each of these takes one rule out of the services --------------------


def _unchecked(*_: object) -> None:
    return None


def _nothing_revoked(*_: object) -> list[int]:
    return []


async def _always_confirmed(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("where", "instead", "rules"),
    [
        pytest.param(
            "storage_svc.queue_state.QueueState.check_owner",
            _unchecked,
            {Rule.NO_STALE_SETTLE, Rule.NO_STALE_DELIVERY},
            id="epochs are not compared",
        ),
        pytest.param(
            "storage_svc.queue_state.QueueState.revoke",
            _nothing_revoked,
            {Rule.FIRST_MESSAGE_IN_TIME},
            id="what the old owner holds is not revoked",
        ),
        pytest.param(
            "broker_svc.ownership.Ownerships.confirm",
            _always_confirmed,
            {Rule.ONE_OWNER_PER_EPOCH, Rule.EPOCHS_GROW},
            id="a resync takes ownership",
        ),
    ],
)
@pytest.mark.timeout(0)
def test_services_without_a_rule_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    where: str,
    instead: Any,
    rules: set[Rule],
) -> None:
    """The checker can fail: some seed shows what the rule was for."""
    monkeypatch.setattr(where, instead)

    for seed in range(1, MUTANT_HISTORIES_MAX):
        _, violations = simulated_history(seed, tmp_path / str(seed))
        if rules & {violation.rule for violation in violations}:
            return

    pytest.fail(f"{MUTANT_HISTORIES_MAX} histories, and nobody noticed")
