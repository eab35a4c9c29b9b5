"""The credit of a consumer: fitted to how quick its handlers are (K1)."""

from tidemark.client.consume.credit import START, UNSETTLED_MAX, WAIT_MS, Credit


def receive(credit: Credit, messages: int) -> None:
    credit.grant(unsettled=0, buffered=0, waiting=0)
    credit.used(messages)


def test_a_quick_handler_soon_has_all_of_it() -> None:
    credit, rounds = Credit(None), 0

    while credit.ahead < UNSETTLED_MAX:
        receive(credit, credit.ahead)
        credit.starved(busy_ms=0, messages=1)
        rounds += 1

    assert rounds <= 2


def test_a_slow_handler_is_given_little_ahead() -> None:
    """K1: one second a message: what it holds and the next ones."""
    credit = Credit(None)
    for waited_ms in range(0, 10_000, 500):
        credit.waited(waited_ms)
    assert credit.ahead == 1

    for _ in range(10):
        receive(credit, credit.ahead)
        credit.starved(busy_ms=1_000, messages=1)

    assert credit.ahead == 2


def test_a_handler_of_batches_is_measured_by_their_messages() -> None:
    """A hundred messages in 100 ms are 2 000 in the time that messages may wait."""
    credit = Credit(None)
    receive(credit, START)

    credit.starved(busy_ms=100, messages=100)

    assert credit.ahead == 8 * START


def test_a_handler_that_is_neither_quick_nor_slow_gets_what_it_comes_to_in_time() -> None:
    credit = Credit(None)
    receive(credit, START)

    credit.starved(busy_ms=100, messages=1)

    assert credit.ahead == WAIT_MS // 100


def test_tasks_that_wait_are_provided_for_however_slow_they_are() -> None:
    """K1, K2: a pool of a hundred slow tasks works with all of them."""
    credit = Credit(None)
    for _ in range(10):
        credit.waited(10 * WAIT_MS)

    assert credit.grant(unsettled=60, buffered=0, waiting=40) == 41


def test_tasks_that_settle_nothing_come_to_an_end() -> None:
    credit = Credit(None)

    assert credit.grant(unsettled=UNSETTLED_MAX, buffered=0, waiting=1) == 0
    assert credit.grant(unsettled=UNSETTLED_MAX - 1, buffered=0, waiting=1) == 1


def test_an_idle_queue_changes_nothing() -> None:
    credit = Credit(None)

    for _ in range(10):
        credit.starved(busy_ms=0, messages=1)

    assert credit.ahead == START


def test_a_number_from_the_user_stays() -> None:
    credit = Credit(7)
    receive(credit, 7)

    credit.starved(busy_ms=0, messages=1)
    credit.waited(10 * WAIT_MS)

    assert credit.grant(unsettled=0, buffered=0, waiting=100) == 7
    assert credit.excess(buffered=7) == 0


def test_no_more_is_granted_than_is_missing() -> None:
    credit = Credit(10)

    assert credit.grant(0, 0, 0) == 10
    credit.used(6)
    assert credit.grant(6, 6, 0) == 0
    assert credit.grant(1, 1, 0) == 5
    credit.reset()
    assert credit.grant(8, 8, 0) == 2


def test_credit_is_gathered_while_the_broker_has_more_than_that() -> None:
    """K1: what came in two parts comes together from then on."""
    credit = Credit(10)
    credit.grant(0, 0, 0)
    credit.used(4)

    assert credit.grant(unsettled=0, buffered=0, waiting=1) == 0
    credit.used(6)
    assert credit.grant(unsettled=0, buffered=0, waiting=1) == 10


def test_credit_is_not_gathered_while_tasks_wait_for_more_than_the_broker_may_send() -> None:
    """K2: each of ten tasks is provided for."""
    credit = Credit(10)
    credit.grant(0, 0, 0)
    credit.used(4)

    assert credit.grant(unsettled=0, buffered=0, waiting=10) == 4


def test_what_waits_beyond_the_allowance_is_too_much() -> None:
    """K1: it goes back, so that other consumers get it."""
    credit = Credit(None)
    credit.waited(2 * WAIT_MS)

    assert credit.excess(buffered=START) == START - START // 2
    assert credit.excess(buffered=1) == 0
