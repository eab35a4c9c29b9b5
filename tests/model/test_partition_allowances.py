"""What the model of a partition allows: alarms that it once raised about what storage may do.

Each is the shortest way to the alarm, with the bounds of the model.
"""

from collections.abc import Iterator

import pytest

from storage_svc.operations.expire import ExpireDue
from storage_svc.operations.groups import PlaceGroup, RemoveGroup, Start, StartAt
from storage_svc.operations.loading import Materialize, Unmaterialize
from storage_svc.operations.operation import Operation
from storage_svc.operations.ownership import DropOwnership, TakeOwnership
from storage_svc.operations.queues import Purge, RemoveQueue
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.queue.record import USE_NOTED_MS
from storage_svc.queue.reservation import Ending
from tests.model.test_partition_model import DAY_MS, PartitionMachine

PASSED_MAX = 2
"""Of the model."""


@pytest.fixture
def machine() -> Iterator[PartitionMachine]:
    machine = PartitionMachine()
    machine.names = {"first": "jobs"}
    yield machine
    machine.teardown()


def test_the_model_expects_no_notice_after_an_answer_that_promised_more(
    machine: PartitionMachine,
) -> None:
    """V2: the second request is filled and ends the interest of the first."""
    machine.add([machine.append(1)])
    machine.add([Reserve("jobs", "g", 10)])

    machine.add([machine.append(2), Reserve("jobs", "g", 1)])


def test_the_model_allows_a_row_for_each_time_of_a_first_delivery(
    machine: PartitionMachine,
) -> None:
    """V2: neighbours with the same history, handed out more than a second apart."""
    machine.add([machine.append(4)])
    for _ in range(2):
        machine.add([Reserve("jobs", "g", 2, visibility_ms=60_000)])
        machine.run(machine.clock.advance_ms(2000))

    machine.add([Settle(each.receipt, Ending.RELEASE) for each in machine.held])


@pytest.mark.parametrize("remove", [Purge("jobs"), RemoveQueue("jobs")])
def test_the_model_counts_settled_runs_of_a_large_queue_until_they_are_erased(
    machine: PartitionMachine, remove: Operation[object]
) -> None:
    """R2: they are erased after the commit in which the only group moves on."""
    machine.add([machine.append(1) for _ in range(5)])

    machine.add([PlaceGroup("jobs", "g", Start(StartAt.LATEST)), remove])


@pytest.mark.parametrize(
    "end",
    [
        RemoveGroup("jobs", "g"),
        TakeOwnership("jobs", "g", "A"),
        DropOwnership("jobs", "g", "", 0),
        Unmaterialize("jobs"),
    ],
)
def test_the_model_lets_no_reserve_take_over_one_that_the_commit_has_ended(
    machine: PartitionMachine, end: Operation[object]
) -> None:
    """V2: its last result is on the way."""
    machine.add([Materialize("jobs", create=True)])
    standing = Reserve("jobs", "g", 1, standing_id=1, standing_messages=1, standing_bytes=4096)
    machine.add([standing])

    epoch = 1 if isinstance(end, (TakeOwnership, DropOwnership)) else 0
    machine.add([end, standing._replace(standing_id=2, replaces=1, owner_epoch=epoch)])


def test_the_model_does_not_unload_a_queue_of_which_the_commit_notes_a_use(
    machine: PartitionMachine,
) -> None:
    """I4, R14: the last use of a group is noted once in a while."""
    machine.add([PlaceGroup("jobs", "g")])
    machine.run(machine.clock.advance_ms(USE_NOTED_MS))

    machine.add([PlaceGroup("jobs", "g"), Unmaterialize("jobs")])


def test_the_model_lets_a_reserve_that_stands_hand_out_what_it_left_behind(
    machine: PartitionMachine,
) -> None:
    """V2: it meets so much that is past its time that it hands out nothing at first."""
    late = [machine.append(1)._replace(ttl_ms=10) for _ in range(PASSED_MAX)]
    machine.add([*late, machine.append(1)])
    machine.run(machine.clock.advance_ms(10))

    machine.add([Reserve("jobs", "g", 2, standing_id=1, standing_messages=2, standing_bytes=4096)])

    assert [each.messages for each in machine.held] == [1]


def test_the_model_expects_one_notice_where_a_reserve_that_stands_has_left_messages(
    machine: PartitionMachine,
) -> None:
    """V2: its broker asks again, and nothing that happens before needs another notice."""
    late = [machine.append(1)._replace(ttl_ms=10) for _ in range(2 * PASSED_MAX)]
    machine.add([*late, machine.append(1)])
    machine.run(machine.clock.advance_ms(10))
    machine.add([Reserve("jobs", "g", 2, standing_id=1, standing_messages=2, standing_bytes=4096)])

    machine.add([PlaceGroup("jobs", "h")])

    assert machine.held == []


def test_the_model_takes_no_commit_that_ends_an_erasure_for_one_of_a_later_time(
    machine: PartitionMachine,
) -> None:
    """S2: it may still be written when everything is erased."""
    machine.add([machine.append(4)])
    for _ in range(3):  # so many that the queue is large, with little to erase
        machine.add([Reserve("jobs", "g", 1)])
    machine.add([Settle(each.receipt, Ending.ACK) for each in machine.held])
    machine.clock.set_wall_ms(machine.clock.wall_ms() - DAY_MS)
    machine.add([Purge("jobs")])

    machine.run(machine.clock.advance_ms(300))
    machine.add([ExpireDue()])  # nothing is due, and nothing is written
    machine.reopen(dies=False)


@pytest.mark.parametrize(
    "revoke", [PlaceGroup("jobs", "g", Start(StartAt.EARLIEST)), TakeOwnership("jobs", "g", "A")]
)
def test_the_model_allows_any_order_of_what_is_revoked(
    machine: PartitionMachine, revoke: Operation[object]
) -> None:
    """E8: after a reopening those in the row of the queue come first, not the oldest."""
    machine.add([machine.append(5)])
    machine.add([Reserve("jobs", "g", 1) for _ in range(3)])
    machine.add([Settle(each.receipt, Ending.ACK) for each in machine.held[:2]])
    machine.add([Reserve("jobs", "g", 1) for _ in range(2)])
    machine.reopen(dies=False)

    machine.add([revoke])
