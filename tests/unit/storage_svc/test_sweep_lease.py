"""The lease of a sweeper: one replica at a time, handed over when it ends or is given up."""

from storage_svc.lifecycle.sweep_lease import SweepLease


def test_one_replica_at_a_time_may_sweep() -> None:
    lease = SweepLease(0)

    first = lease.ask("a", "a:1", 1_000, now_ms=0)
    second = lease.ask("b", "b:1", 1_000, now_ms=999)

    assert (first, second) == (True, False)
    holder = lease.holder(999)
    assert holder is not None
    assert holder.address == "a:1"


def test_the_holder_renews_and_others_wait_for_the_end() -> None:
    lease = SweepLease(0)
    lease.ask("a", "a:1", 1_000, now_ms=0)

    renewed = lease.ask("a", "a:1", 1_000, now_ms=500)
    too_early = lease.ask("b", "b:1", 1_000, now_ms=1_499)
    in_time = lease.ask("b", "b:1", 1_000, now_ms=1_500)

    assert (renewed, too_early, in_time) == (True, False, True)


def test_a_lease_that_is_given_up_is_free_at_once() -> None:
    lease = SweepLease(0)
    lease.ask("a", "a:1", 1_000, now_ms=0)

    given_up = lease.ask("a", "a:1", 0, now_ms=1)

    assert not given_up
    assert lease.holder(1) is None
    assert lease.ask("b", "b:1", 1_000, now_ms=1)


def test_a_replica_cannot_give_up_the_lease_of_another() -> None:
    lease = SweepLease(0)
    lease.ask("a", "a:1", 1_000, now_ms=0)

    lease.ask("b", "b:1", 0, now_ms=1)

    assert lease.holder(1) is not None


def test_every_request_counts_as_a_sign_of_life() -> None:
    """L4: silence is measured from the last question."""
    lease = SweepLease(100)
    before_ms = lease.asked_ms

    lease.ask("a", "a:1", 1_000, now_ms=700)
    lease.ask("b", "b:1", 1_000, now_ms=800)

    assert (before_ms, lease.asked_ms) == (100, 800)
