"""Exclusive queues under thousands of random histories (E1, E3, E7-E10), each told by its seed.

`make test-histories` runs thousands; with `ARGS="--seed 17"` it repeats one, and shows it.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from broker_svc.links.link_state import Holding
from storage_svc.operations.claim import Claimed, ClaimPartition
from storage_svc.partition.commit import CommitContext
from storage_svc.partition.commit_numbers import CommitNumbers
from tests.model.histories.checker import Rule
from tests.model.histories.claims import ClaimRule, check_claims
from tests.model.histories.history import LOST, By, Disturbed, History, Outcome, Owned, Settled
from tests.model.histories.simulated_brokers import FAULTS as BROKER_FAULTS
from tests.model.histories.simulated_cluster import SHARED_FAULTS
from tests.model.histories.simulated_time import Stuck
from tests.model.histories.simulation import simulated
from tests.model.histories.stores import StoreRule
from tidemark.api.storage.v1.exchange_pb2 import OwnershipResult

HISTORIES, HISTORIES_LONG = 40, 2_000
SHARED_HISTORIES = 12
BROKER_HISTORIES = 24
MUTANT_HISTORIES_MAX = 40

FAULTS: Final = {f"{what} fails" for what in ("broker", "storage", "both", "link", "commit")}
EVERYTHING: Final = {*FAULTS, *(each.value for each in By), *(each.value for each in Outcome)}

pytestmark = pytest.mark.timeout(0)


@pytest.fixture
def directory() -> Iterator[Path]:
    """In memory where the system has such a place: a killed process loses nothing there, either."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)


def seeds(config: pytest.Config, short: int = HISTORIES) -> range:
    """The seed that was asked for, or the first ones."""
    seed: int | None = config.getoption("--seed")
    if seed is not None:
        return range(seed, seed + 1)
    usual = HISTORIES_LONG if config.getoption("--long") else short
    return range(1, 1 + (config.getoption("--histories") or usual))


def what_happened(history: History) -> Iterator[str]:
    for event in history.events:
        match event:
            case Settled(outcome=outcome):
                yield outcome.value
            case Owned(by=by):
                yield by.value
            case Disturbed(what=what):
                yield what


def test_no_history_breaks_a_rule(pytestconfig: pytest.Config, directory: Path) -> None:
    """E1, E7, E8, E9, E10; and E6, I9: in the end the broker has forgotten all clients."""
    happened: Counter[str] = Counter()
    for seed in seeds(pytestconfig):
        run = simulated(seed, directory / str(seed))

        happened.update(what_happened(run.history))
        if run.violations or run.remembered or pytestconfig.getoption("--seed") is not None:
            print(f"seed {seed}\n{run.history}", *run.violations, run.remembered, sep="\n")
        again = f'repeat it: make test-histories ARGS="--seed {seed}"'
        assert not run.violations, again
        assert not run.remembered, again

    print(dict(happened))
    if len(seeds(pytestconfig)) >= HISTORIES:
        assert not (missing := EVERYTHING - set(happened)), f"never happened: {missing}"


def test_no_history_with_two_storage_nodes_breaks_a_rule(
    pytestconfig: pytest.Config, directory: Path
) -> None:
    """S9, E7: both nodes believe that they hold the partition, and serve a broker and clients. The
    lower epoch writes nothing and confirms nothing. What the store loses is reported, and nothing
    else that was answered is lost."""
    happened: Counter[str] = Counter()
    wanted = seeds(pytestconfig, SHARED_HISTORIES)
    for seed in wanted:
        run = simulated(seed, directory / str(seed), shared=True)

        happened.update(what_happened(run.history))
        broken = [*run.violations, *run.broken]
        if broken or run.remembered or pytestconfig.getoption("--seed") is not None:
            print(f"seed {seed}\n{run.history}", *broken, run.remembered, sep="\n")
        assert not broken, f"seed {seed}"
        assert not run.remembered, f"seed {seed}"

    print(dict(happened))
    if len(wanted) >= HISTORIES:
        faults = {f"{what} fails" for what in SHARED_FAULTS}
        missing = {*EVERYTHING, *faults, LOST} - set(happened)
        assert not missing, f"never happened: {missing}"


def test_no_history_with_three_brokers_and_three_storage_nodes_breaks_a_rule(
    pytestconfig: pytest.Config, directory: Path
) -> None:
    """S8, C1, C5, E7, E8: partitions move between brokers whose views of the registry are late,
    stale or in conflict, while clients hold their messages. A node that ends, is slow or is cut off
    delays its own queues only."""
    happened: Counter[str] = Counter()
    wanted = seeds(pytestconfig, BROKER_HISTORIES)
    for seed in wanted:
        run = simulated(seed, directory / str(seed), several_brokers=True)

        happened.update(what_happened(run.history))
        happened["claims refused"] += sum(1 for each in run.claims if each.epoch is None)
        broken = [*run.violations, *check_claims(run.claims)]
        if broken or run.remembered:
            print(f"seed {seed}\n{run.history}", *broken, run.remembered, sep="\n")
        assert not broken, f"seed {seed}"
        assert not run.remembered, f"seed {seed}"

    print(dict(happened))
    if len(wanted) >= HISTORIES:
        faults = {f"{what} fails" for what in BROKER_FAULTS}
        assert not (missing := faults - set(happened)), f"never happened: {missing}"
        assert happened["claims refused"]


def test_a_seed_is_a_history(directory: Path) -> None:
    """A fault that was found can be found again."""
    first, second = (simulated(7, directory / name) for name in ("first", "second"))

    assert str(first.history) == str(second.history)


# --- what the checker is for: each of these takes a rule out of the services ----------------------


def _unchecked(*_: object) -> None:
    return None


def _nothing_revoked(*_: object) -> list[int]:
    return []


async def _always_confirmed(*_: object) -> OwnershipResult:
    return OwnershipResult(matched=True)


Mutant = dict[str, Callable[..., Any]]


@pytest.mark.parametrize(
    ("mutant", "rules", "first_seed"),
    [
        pytest.param(
            {
                "storage_svc.queue.group.Group.check_owner": _unchecked,
                "storage_svc.queue.queue.QueueState.revoke": _nothing_revoked,
            },
            {Rule.NO_STALE_SETTLE},
            1,
            id="storage does not compare epochs",
        ),
        pytest.param(
            {"storage_svc.queue.queue.QueueState.revoke": _nothing_revoked},
            {Rule.FIRST_MESSAGE_IN_TIME},
            45,
            id="what the old owner holds is not revoked",
        ),
        pytest.param(
            {"broker_svc.exclusive.ownership.Ownerships.confirm": _always_confirmed},
            {Rule.ONE_OWNER_PER_EPOCH, Rule.EPOCHS_GROW},
            1,
            id="a resync takes ownership",
        ),
    ],
)
def test_services_without_a_rule_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    mutant: Mutant,
    rules: set[Rule],
    first_seed: int,
) -> None:
    """The checker can fail: some seed shows what the rule was for. It begins near one."""
    for name, instead in mutant.items():
        monkeypatch.setattr(name, instead)

    for seed in range(first_seed, first_seed + MUTANT_HISTORIES_MAX):
        run = simulated(seed, directory / str(seed))
        if rules & {violation.rule for violation in run.violations}:
            return

    pytest.fail(f"{MUTANT_HISTORIES_MAX} histories, and no rule was broken")


async def _claim_under_any_version(claim: ClaimPartition, commit: CommitContext) -> Claimed:
    commit.state.claim = replace(commit.state.claim, assignment_version=0)
    return await _claim(claim, commit)


_claim = ClaimPartition.apply


def test_storage_that_ignores_the_versions_of_claims_is_found_out(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    """C5: a broker with an old view takes a partition back."""
    monkeypatch.setattr(ClaimPartition, "apply", _claim_under_any_version)

    for seed in range(1, 1 + MUTANT_HISTORIES_MAX):
        run = simulated(seed, directory / str(seed), several_brokers=True)
        if ClaimRule.VERSIONS_GROW in {rule for rule, _ in check_claims(run.claims)}:
            return

    pytest.fail(f"{MUTANT_HISTORIES_MAX} histories, and no rule was broken")


def test_brokers_that_repeat_refused_claims_are_found_out(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    """C5: the rules of claims can fail as well."""
    monkeypatch.setattr(Holding, "may_claim", Holding.is_assigned)

    for seed in range(1, 1 + MUTANT_HISTORIES_MAX):
        run = simulated(seed, directory / str(seed), several_brokers=True)
        if ClaimRule.REFUSED_ONCE in {rule for rule, _ in check_claims(run.claims)}:
            return

    pytest.fail(f"{MUTANT_HISTORIES_MAX} histories, and no rule was broken")


# --- the same for storage nodes that share a store ------------------------------------------------


async def _verify_nothing(*_: object) -> None:
    return None


def _has_all(*_: object) -> bool:
    return True


def _no_gap(numbers: CommitNumbers, row: bytes | None, found: int, floor: int) -> None:
    _begin_numbers(numbers, row, found, 0)


_begin_numbers = CommitNumbers.__init__


@pytest.mark.parametrize(
    ("mutant", "rules", "first_seed"),
    [
        pytest.param(
            {"tests.support.shared_engine.SharedEngine.verify": _verify_nothing},
            {StoreRule.NO_STALE_ANSWER},
            200,
            id="what is not written is answered without asking the store",
        ),
        pytest.param(
            {"storage_svc.partition.commit_numbers.CommitNumbers.has": _has_all},
            {Rule.NOTHING_SKIPPED, Rule.SETTLED_STAYS_SETTLED},
            1,
            id="witnesses are not compared",
        ),
        pytest.param(
            {"storage_svc.partition.commit_numbers.CommitNumbers.__init__": _no_gap},
            {StoreRule.ONE_COMMIT_PER_NUMBER},
            17,
            id="an opening goes on with the numbers that it finds",
        ),
        pytest.param(
            {"storage_svc.partition.counters.Counters.skip_to": _unchecked},
            {Rule.ONE_OWNER_PER_EPOCH},
            1,
            id="an opening names things as lost commits did",
        ),
    ],
)
def test_storage_nodes_without_a_rule_are_found_out(
    monkeypatch: pytest.MonkeyPatch,
    directory: Path,
    mutant: Mutant,
    rules: set[Rule | StoreRule],
    first_seed: int,
) -> None:
    """S9: the rules of stores can fail as well."""
    for name, instead in mutant.items():
        monkeypatch.setattr(name, instead)

    for seed in range(first_seed, first_seed + MUTANT_HISTORIES_MAX):
        try:
            run = simulated(seed, directory / str(seed), shared=True)
        except Stuck:  # without the rule, what was lost may be waited for without an end
            continue
        broken = {each.rule for each in run.violations} | {rule for rule, _ in run.broken}
        if rules & broken:
            return

    pytest.fail(f"{MUTANT_HISTORIES_MAX} histories, and no rule was broken")
