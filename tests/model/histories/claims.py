"""The rules of brokers, checked against the answers to their claims of partitions (C5, S8).

Pure. The registry may give assignments late, twice or in conflict; these hold all the same.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple


class Claim(NamedTuple):
    """The answer to a claim, as the broker got it."""

    broker_id: str
    incarnation: int
    version: int
    epoch: int | None
    """None if it was refused."""
    partition: int = 0


class ClaimRule(StrEnum):
    """What must hold for the claims of every history."""

    ONE_BROKER_PER_EPOCH = "at most one broker per broker epoch"
    NO_CIRCLES = "under one assignment, a broker that lost a partition does not get it back"
    VERSIONS_GROW = "a partition is not given to a broker under an older assignment"
    REFUSED_ONCE = "a broker that was refused claims again only under a newer assignment"


def check_claims(claims: Sequence[Claim]) -> list[tuple[ClaimRule, Claim]]:
    """Every claim that breaks a rule."""
    rules = (_one_broker_per_epoch, _no_circles, _versions_grow, _refused_once)
    broken: list[tuple[ClaimRule, Claim]] = []
    for partition in sorted({each.partition for each in claims}):
        of_one = [each for each in claims if each.partition == partition]
        for rule in rules:
            broken += rule(of_one)
    return broken


def _one_broker_per_epoch(claims: Sequence[Claim]) -> Iterator[tuple[ClaimRule, Claim]]:
    holders: dict[int, tuple[str, int]] = {}
    for each in claims:
        if each.epoch is not None:
            broker = (each.broker_id, each.incarnation)
            if holders.setdefault(each.epoch, broker) != broker:
                yield ClaimRule.ONE_BROKER_PER_EPOCH, each


def _no_circles(claims: Sequence[Claim]) -> Iterator[tuple[ClaimRule, Claim]]:
    """In the order of epochs: answers may have come in another one."""
    lost: set[tuple[str, int, int]] = set()
    before: Claim | None = None
    for each in _granted(claims):
        if before is not None and each[:2] != before[:2]:
            lost.add(before[:3])
        if each[:3] in lost:
            yield ClaimRule.NO_CIRCLES, each
        before = each


def _versions_grow(claims: Sequence[Claim]) -> Iterator[tuple[ClaimRule, Claim]]:
    newest = 0
    for each in _granted(claims):
        if each.version < newest:
            yield ClaimRule.VERSIONS_GROW, each
        newest = max(newest, each.version)


def _refused_once(claims: Sequence[Claim]) -> Iterator[tuple[ClaimRule, Claim]]:
    refused: dict[tuple[str, int], int] = {}
    for each in claims:
        broker = (each.broker_id, each.incarnation)
        if each.version <= refused.get(broker, -1):
            yield ClaimRule.REFUSED_ONCE, each
        if each.epoch is None:
            refused[broker] = max(each.version, refused.get(broker, -1))


def _granted(claims: Sequence[Claim]) -> list[Claim]:
    """In the order of epochs."""
    return sorted((each for each in claims if each.epoch is not None), key=lambda it: it.epoch or 0)
