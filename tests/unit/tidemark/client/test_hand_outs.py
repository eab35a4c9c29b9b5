"""Hand-outs: client and broker agree on what the application was given, whatever is lost (K1)."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from broker_svc.consume.hand_outs import HandOuts as BrokerHandOuts
from broker_svc.consume.hand_outs import Place
from tidemark.api.broker.v1 import message_pb2
from tidemark.client.consume.delivery import DeliveryBatch
from tidemark.client.consume.hand_outs import HandOuts, Report, Totals

Frame = DeliveryBatch | Report


class Settler:
    """Nothing is settled here."""

    ack = settle = None


def batch_of(messages: int, *, attempts: int = 0, last_attempt: bool = False) -> DeliveryBatch:
    delivery = message_pb2.Delivery(
        count=messages, attempt_count=attempts, last_attempt=last_attempt, visibility_ms=1_000
    )
    return DeliveryBatch(delivery, Settler(), session_id=1, now_ms=0)  # type: ignore[arg-type]


def confirmed(hand_outs: HandOuts, waiting_for_one: int = 0, waiting_for_batch: int = 0) -> None:
    """A report goes to the broker and comes back."""
    report = hand_outs.report(waiting_for_one, waiting_for_batch, 0)
    assert report is not None
    hand_outs.confirmed(report.number, report.totals, 0)


def take(hand_outs: HandOuts, batch: DeliveryBatch, messages: int) -> None:
    for _ in range(messages):
        assert hand_outs.allow(batch)
        batch.handed_out += 1


class Killing(RuleBasedStateMachine):
    """A client that may be killed at any moment: everything under way to the broker is lost then.

    Tasks wait for single messages, in half of the lives also for batches, and give up waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.client, self.broker = HandOuts(), BrokerHandOuts()
        self.places: list[tuple[Place, DeliveryBatch]] = []
        self.to_client: deque[Frame] = deque()
        self.to_broker: deque[Report] = deque()
        self.buffer: deque[DeliveryBatch] = deque()
        self.tasks, self.batch_tasks, self.batch_tasks_max = 1, 0, 0
        self.tasks_most = 1
        """The most tasks that waited since totals were taken back."""

    @initialize(batch_tasks_max=st.integers(0, 1))
    def begin(self, batch_tasks_max: int) -> None:
        self.batch_tasks_max = batch_tasks_max

    @rule(tasks=st.integers(0, 3), batch_tasks=st.integers(0, 1))
    def wait(self, tasks: int, batch_tasks: int) -> None:
        self.tasks, self.batch_tasks = tasks, min(batch_tasks, self.batch_tasks_max)
        self.tasks_most = max(tasks, self.tasks_most)

    @rule(
        messages=st.integers(1, 5),
        attempts=st.sampled_from((0, 0, 0, 1)),
        last_attempt=st.sampled_from((False, False, False, True)),
    )
    def deliver(self, messages: int, attempts: int, last_attempt: bool) -> None:
        batch = batch_of(messages, attempts=attempts, last_attempt=last_attempt)
        place = self.broker.place(messages, attempts, last_attempt=last_attempt)
        self.places.append((place, batch))
        self.to_client.append(batch)

    @precondition(lambda self: self.to_client)
    @rule()
    def arrive(self) -> None:
        frame = self.to_client.popleft()
        if isinstance(frame, DeliveryBatch):
            self.client.arrived(frame)
            self.buffer.append(frame)
        else:
            self.client.confirmed(frame.number, frame.totals, 0)

    @precondition(lambda self: self.buffer and self.tasks)
    @rule(messages=st.integers(1, 8), took_ms=st.sampled_from((1, 10, 1_000)))
    def take(self, messages: int, took_ms: int) -> None:
        self.client.resumed(0)
        while self.buffer and messages and self.client.allow(self.buffer[0]):
            self.buffer[0].handed_out += 1
            messages -= 1
            if self.buffer[0].handed_out == self.buffer[0].end:
                self.buffer.popleft()
        self.client.paused(took_ms * 10**6)

    @precondition(lambda self: self.buffer and self.batch_tasks)
    @rule()
    def take_batch(self) -> None:
        if self.client.allow_rest(self.buffer[0]):
            self.buffer[0].handed_out = self.buffer[0].end
            self.buffer.popleft()

    @precondition(lambda self: self.buffer)
    @rule(messages=st.integers(1, 8))
    def give_back_the_last(self, messages: int) -> None:
        batch = self.buffer[-1]
        batch.end = max(batch.handed_out, batch.end - messages)
        if batch.end == batch.handed_out:
            self.buffer.pop()

    @rule()
    def report(self) -> None:
        report = self.client.report(self.tasks, self.batch_tasks, 0)
        if report is not None:
            self.to_broker.append(report)

    @rule()
    def wait_for_long(self) -> None:
        self.client.run_once(self.tasks, self.batch_tasks)
        self.client.run_once(self.tasks, self.batch_tasks)

    @rule()
    def no_task_waits_for_long(self) -> None:
        self.wait(0, 0)
        self.round_trip()
        self.wait_for_long()
        self.round_trip()
        self.tasks_most = 0

        for place, batch in self.places:
            assert place.given <= batch.handed_out + batch.count - batch.end

    @precondition(lambda self: self.to_broker)
    @rule()
    def note(self) -> None:
        report = self.to_broker.popleft()
        self.broker.report(*report.totals)
        self.to_client.append(report)

    @rule()
    def round_trip(self) -> None:
        self.report()
        while self.to_broker:
            self.note()
        while self.to_client:
            self.arrive()

    @invariant()
    def what_was_handed_out_is_charged(self) -> None:
        for place, batch in self.places:
            assert place.given >= batch.handed_out, "killed now, it would not be charged"

    @invariant()
    def what_could_die_of_it_is_charged_for_tasks_that_wait_alone(self) -> None:
        if not self.batch_tasks_max:
            beyond = sum(p.given - b.handed_out for p, b in self.places if b.cautious)
            assert beyond <= self.tasks_most + sum(b.count - b.end for _, b in self.places)


TestKilling = Killing.TestCase


def test_a_task_that_waits_is_reported_before_anything_arrives() -> None:
    """K1: a message that finds it waiting is handed out without a round trip."""
    hand_outs = HandOuts()
    confirmed(hand_outs, waiting_for_one=2)
    batch = batch_of(10)

    hand_outs.arrived(batch)

    take(hand_outs, batch, 2)
    assert not hand_outs.allow(batch)


def test_a_slow_handler_is_reported_message_by_message() -> None:
    """K1: a second a message; killed, it has been given what it works on and nothing else."""
    hand_outs, batch = HandOuts(), batch_of(10)
    hand_outs.arrived(batch)
    for second in range(5):
        assert not hand_outs.allow(batch)
        hand_outs.paused((second + 1) * 10**9)
        report = hand_outs.report(1, 0, 0)
        assert report is not None
        hand_outs.confirmed(report.number, report.totals, 0)
        hand_outs.resumed((second + 1) * 10**9)
        take(hand_outs, batch, 1)

        assert report.urgent
        assert report.totals == Totals(second + 1, 0, 0)


def test_a_quick_handler_is_reported_ahead_but_not_of_what_has_failed_before() -> None:
    """K1."""
    hand_outs, fresh, failed = HandOuts(), batch_of(4), batch_of(4, attempts=1)
    hand_outs.arrived(fresh)
    hand_outs.arrived(failed)
    hand_outs.allow(fresh)
    confirmed(hand_outs, waiting_for_one=1)
    hand_outs.resumed(0)
    take(hand_outs, fresh, 1)
    hand_outs.paused(1_000)
    confirmed(hand_outs, waiting_for_one=1)

    take(hand_outs, fresh, 3)
    assert not hand_outs.allow(failed)
    confirmed(hand_outs, waiting_for_one=1)
    take(hand_outs, failed, 1)
    assert not hand_outs.allow(failed)


def test_a_quick_handler_is_reported_further_ahead_where_confirmations_take_long() -> None:
    """K1: it gets as far as two confirmations take, and does not wait for them."""
    hand_outs, batch = HandOuts(), batch_of(1_000)
    hand_outs.arrived(batch)
    assert not hand_outs.allow(batch)
    report = hand_outs.report(1, 0, 0)
    assert report is not None
    hand_outs.confirmed(report.number, report.totals, 50 * 10**6)
    hand_outs.resumed(0)
    take(hand_outs, batch, 1)
    hand_outs.paused(10**6)

    ahead = hand_outs.report(1, 0, 0)

    assert ahead is not None
    assert ahead.totals.first_attempts == 1 + 2 * 50


def quick(hand_outs: HandOuts, first: DeliveryBatch) -> None:
    """A batch of 100 is taken whole within a millisecond, and a window is confirmed."""
    hand_outs.arrived(first)
    confirmed(hand_outs, waiting_for_batch=1)
    hand_outs.resumed(0)
    assert hand_outs.allow_rest(first)
    first.handed_out = 100
    hand_outs.paused(10**6)
    confirmed(hand_outs, waiting_for_batch=1)


def test_a_task_that_waits_within_the_window_is_not_reported_again() -> None:
    """K1: quick handlers of batches wait often, and the window has reported what they get."""
    hand_outs, second = HandOuts(), batch_of(100)
    quick(hand_outs, batch_of(100))

    hand_outs.arrived(second)
    assert hand_outs.allow_rest(second)
    second.handed_out = 100

    assert hand_outs.report(0, 1, 0) is None


def test_a_task_that_waits_among_failed_messages_is_reported_ahead() -> None:
    """K1: the window is not for them, and a round trip for each would be slow."""
    hand_outs, failed = HandOuts(), batch_of(100, attempts=1)
    quick(hand_outs, batch_of(100))
    hand_outs.arrived(failed)
    assert hand_outs.allow_rest(failed)
    failed.handed_out = 100

    report = hand_outs.report(0, 1, 0)

    assert report is not None
    assert report.totals.deliveries == 3
    assert not report.urgent


def test_a_batch_beyond_the_window_is_reported_when_a_task_takes_it() -> None:
    """K1."""
    hand_outs, second, large = HandOuts(), batch_of(100), batch_of(100_000)
    quick(hand_outs, batch_of(100))
    hand_outs.arrived(second)
    hand_outs.arrived(large)
    assert hand_outs.allow_rest(second)
    second.handed_out = 100

    assert not hand_outs.allow_rest(large)
    report = hand_outs.report(0, 1, 0)

    assert report is not None
    assert report.totals.deliveries == 3
    assert report.urgent


def test_a_batch_is_reported_whole() -> None:
    """K1: a task that waits for a batch gets all of whatever arrives first."""
    hand_outs, first, second = HandOuts(), batch_of(100, attempts=1), batch_of(100)
    confirmed(hand_outs, waiting_for_batch=1)

    hand_outs.arrived(first)
    hand_outs.arrived(second)

    assert hand_outs.allow_rest(first)
    first.handed_out = 100
    assert not hand_outs.allow_rest(second)


def test_a_handler_that_has_become_slow_is_no_longer_reported_ahead() -> None:
    """K1: the window is taken back, and what comes back of earlier reports is ignored."""
    hand_outs, batch = HandOuts(), batch_of(10)
    hand_outs.arrived(batch)
    hand_outs.allow(batch)
    confirmed(hand_outs, waiting_for_one=1)
    hand_outs.resumed(0)
    take(hand_outs, batch, 1)
    hand_outs.paused(1_000)
    ahead = hand_outs.report(0, 0, 0)
    assert ahead is not None

    hand_outs.run_once(0, 0)
    taken_back = hand_outs.run_once(0, 0)
    smaller = hand_outs.report(0, 0, 0)
    hand_outs.confirmed(ahead.number, ahead.totals, 0)

    assert taken_back
    assert smaller is not None
    assert smaller.totals == Totals(messages=1, first_attempts=1)
    assert not hand_outs.allow(batch)


def test_a_task_that_gave_up_waiting_is_no_longer_reported_ahead() -> None:
    """K1: a message that arrives later waits in the buffer, and costs no attempt."""
    hand_outs, broker = HandOuts(), BrokerHandOuts()
    ahead = hand_outs.report(1, 0, 0)
    assert ahead is not None
    broker.report(*ahead.totals)
    hand_outs.confirmed(ahead.number, ahead.totals, 0)

    hand_outs.run_once(0, 0)
    hand_outs.run_once(0, 0)
    smaller = hand_outs.report(0, 0, 0)
    assert smaller is not None
    broker.report(*smaller.totals)

    assert broker.place(1, 1, last_attempt=False).given == 0


def test_a_task_that_waits_for_a_batch_is_reported_that_one_and_not_the_next() -> None:
    """K1."""
    hand_outs, first, second = HandOuts(), batch_of(100), batch_of(100)
    hand_outs.arrived(first)
    hand_outs.arrived(second)
    assert not hand_outs.allow_rest(first)

    report = hand_outs.report(0, 1, 0)

    assert report is not None
    assert report.totals.deliveries == 1


@given(st.integers(1, 100), st.integers(0, 100))
def test_a_place_counts_as_given_as_far_as_the_totals_reach(messages: int, total: int) -> None:
    hand_outs = BrokerHandOuts()
    first = hand_outs.place(10, 0, last_attempt=False)
    second = hand_outs.place(messages, 1, last_attempt=False)

    hand_outs.report(total, 0, 0)

    assert first.given + second.given == min(total, 10 + messages)
    assert first.given == min(total, 10)
