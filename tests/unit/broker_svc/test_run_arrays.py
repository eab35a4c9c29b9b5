"""Runs of an array are read from its columns, which must have an entry for each."""

import pytest

from broker_svc.publish.run_arrays import runs_of
from tidemark.api.broker.v1.message_pb2 import RunArray
from tidemark.errors import InvalidArgument


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
