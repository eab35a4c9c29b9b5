"""Which storage services a reader asks for partitions (S9, C1)."""

import asyncio

import pytest

from pyspark_tidemark.storage import Described, StorageError, describe_all, find_partitions
from tests.support.echo_service import serving

NODES = ["a:1", "b:1"]


class Cluster:
    """Storage services by address; one that is missing does not answer."""

    def __init__(self, *services: Described) -> None:
        self._services = {each.address: each for each in services}
        self.asked: list[str] = []

    def describe(self, address: str) -> Described:
        self.asked.append(address)
        if address not in self._services:
            raise StorageError(f"{address} does not answer")
        return self._services[address]


def held(cluster: Cluster, *asked: str) -> dict[str, list[int]]:
    found = describe_all(asked, cluster.describe, StorageError)
    return {each.address: each.held for each in found}


def test_nodes_that_share_a_store_are_found_through_one_of_them() -> None:
    cluster = Cluster(Described("a:1", 2, [0], NODES), Described("b:1", 2, [1], NODES))

    assert held(cluster, "a:1") == {"a:1": [0], "b:1": [1]}
    assert cluster.asked == NODES


def test_the_answer_through_a_load_balancer_is_that_of_a_node_with_its_own_address() -> None:
    balanced = Described("service:1", 2, [0], NODES)
    cluster = Cluster(balanced, Described("a:1", 2, [0], NODES), Described("b:1", 2, [1], NODES))

    assert held(cluster, "service:1") == {"a:1": [0], "b:1": [1]}


def test_a_node_that_is_away_matters_only_if_partitions_are_missing_without_it() -> None:
    taken_over = Cluster(Described("a:1", 2, [0, 1], ["a:1"]))
    assert held(taken_over, "a:1", "b:1") == {"a:1": [0, 1]}

    with_data_of_their_own = Cluster(Described("a:1", 2, [0]))
    with pytest.raises(StorageError, match="b:1 does not answer"):
        held(with_data_of_their_own, "a:1", "b:1")


async def test_the_address_of_another_service_is_refused_as_such() -> None:
    """S3."""
    async with serving({}) as broker:
        with pytest.raises(StorageError, match="Is this the address of a storage service"):
            await asyncio.to_thread(find_partitions, f"127.0.0.1:{broker.server.port}")
