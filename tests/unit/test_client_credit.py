"""The credit of a consumer: fitted to how quick its handlers are."""

from tidemark.client.consume.credit import MOST, START, WAIT_MS, Credit


def arrive(credit: Credit, messages: int) -> None:
    credit.grant(0)
    credit.used(messages)


def test_a_quick_handler_soon_has_all_of_it() -> None:
    credit, rounds = Credit(None), 0

    while credit.limit < MOST:
        arrive(credit, credit.limit)
        credit.starved(busy_ms=0)
        rounds += 1

    assert rounds <= 5


def test_a_slow_handler_is_given_little_ahead() -> None:
    """One second a message: what it holds and the next one."""
    credit = Credit(None)
    for waited_ms in range(0, 10_000, 500):
        credit.waited(waited_ms)
    assert credit.limit == 1

    for _ in range(10):
        arrive(credit, credit.limit)
        credit.starved(busy_ms=1_000)

    assert credit.limit == 2


def test_an_idle_queue_changes_nothing() -> None:
    credit = Credit(None)

    for _ in range(10):
        credit.starved(busy_ms=0)

    assert credit.limit == START


def test_a_number_from_the_user_stays() -> None:
    credit = Credit(7)
    arrive(credit, 7)

    credit.starved(busy_ms=0)
    credit.waited(10 * WAIT_MS)

    assert credit.limit == 7


def test_no_more_is_granted_than_is_missing() -> None:
    credit = Credit(10)

    assert credit.grant(held=0) == 10
    credit.used(4)
    assert credit.grant(held=4) == 0
    assert credit.grant(held=1) == 3
    credit.reset()
    assert credit.grant(held=8) == 2
