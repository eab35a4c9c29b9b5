"""Runs of an array are read from its columns, which must have an entry for each, and are gathered
into operations."""

from unittest.mock import Mock

import pytest

from broker_svc.publish.run_arrays import RunArrays, runs_of
from tidemark.api.broker.v1.message_pb2 import RunArray
from tidemark.bodies import body_of
from tidemark.errors import InvalidArgument
from tidemark.rpc.statuses import from_status
from tidemark.topics import Topic


def an_array() -> RunArray:
    return RunArray(
        lmq_names=["orders/a", "orders/b"],
        bodies=[b"x", b"y"],
        runs=[*(7, 1, 3, 0), *(8, 2, 4, 1)],
    )


def test_each_run_has_its_own_of_every_column() -> None:
    assert runs_of(an_array()) == [
        ("orders/a", b"x", (7, 1, 3, 0)),
        ("orders/b", b"y", (8, 2, 4, 1)),
    ]


@pytest.mark.parametrize(
    ("column", "entries"), [("lmq_names", 1), ("bodies", 1), ("runs", 1), ("runs", 4)]
)
def test_columns_that_do_not_belong_together_are_refused(column: str, entries: int) -> None:
    """S3."""
    array = an_array()
    del getattr(array, column)[-entries:]

    with pytest.raises(InvalidArgument) as refused:
        runs_of(array)

    assert refused.value.metadata["field"] == "run_arrays"


def test_runs_that_are_all_refused_ask_nothing_of_storage() -> None:
    """S3: runs for a partition in which their queues do not live."""
    link, topics, results, cache = Mock(partition=1), Mock(), Mock(), Mock(opening=())
    topics.known.return_value = Topic("orders")
    cache.find.return_value = Mock(partitions=(0,))
    cache.find.return_value.lease.failed = False
    arrays = RunArrays(Mock(), {1: link}, topics, Mock())
    body = body_of([b"x"])

    runs = [("orders/a", body, (7, 1, 0, 1)), ("orders/b", body, (8, 1, 0, 1))]
    arrays.submit(runs, cache, "till-7", results, 0, 0)

    refused = [call.args[0] for call in results.published.call_args_list]
    assert [each.request_id for each in refused] == [7, 8]
    assert {type(from_status(each.error)) for each in refused} == {InvalidArgument}
    link.ask_plain.assert_not_called()
