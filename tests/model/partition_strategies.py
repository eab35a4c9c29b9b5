"""What a random example may ask of a partition: which values are drawn, and how often.

An example is short, so the values are few and meet often. Queues and receipts are drawn by the part
they play; the machine that follows an example knows which are meant.
"""

from dataclasses import replace
from typing import NamedTuple

from hypothesis import strategies as st

from storage_svc.operations.groups import PlaceGroup, RemoveGroup, Start, StartAt
from storage_svc.operations.loading import Materialize, Unmaterialize
from storage_svc.operations.ownership import ConfirmOwnership, DropOwnership, TakeOwnership
from storage_svc.operations.queues import PauseQueue, Purge, RemoveQueue
from storage_svc.operations.schedule import Unschedule
from storage_svc.operations.topics import PutTopic
from storage_svc.queue.reservation import Ending
from tidemark.topics import Subscription, Topic, TopicSettings

TOPICS = {
    "dead": TopicSettings(),
    "jobs": TopicSettings(dead_letter_topic="dead", max_attempts=3, visibility_timeout_ms=1000),
    "kept": TopicSettings(
        retention_enabled=True,
        fairness_weights={"b": 3},
        retry_delay_ms=250,
        retry_delay_ms_max=900,
        retry_multiplier=2,
    ),
    "own": TopicSettings(
        subscription=Subscription.EXCLUSIVE,
        retry_delay_ms=400,
        retry_delay_ms_max=800,
        retry_multiplier=2,
    ),
}
RUN_MESSAGES_MAX = 20
"""A bound that a short example reaches."""
ALL = 10_000
"""As many due entries as there may be."""


class Run(NamedTuple):
    """What to publish."""

    queue: str
    messages: int
    fairness_key: str
    ttl_ms: int
    delay_ms: int
    padding: int
    sequence: int
    again: bool  # what was published under this sequence before


class Wish(NamedTuple):
    """What to ask for."""

    queue: str
    group: str
    messages_max: int
    bytes_max: int
    visibility_ms: int
    epoch: int
    reports_hand_outs: bool
    standing_messages: int
    standing_bytes: int
    replaces: bool


class Settlement(NamedTuple):
    """What to settle or, without an ending, to extend or renew."""

    pick: int
    ending: Ending | None
    cuts: list[int]
    delay_ms: int
    epoch: int
    client_id: str


queues = st.sampled_from(("first", "first", "second"))
"""An example has one or two queues, so that operations meet."""
groups = st.sampled_from(("g", "g", "g", "h"))
keys = st.sampled_from(("", "", "a", "b"))
clients = st.sampled_from("AB")
picks = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 4, 6, 9))
"""Which of many: mostly the newest."""
more = st.booleans()
"""Whether an operation waits for others to go into the same commit."""
runs = st.builds(
    Run,
    queues,
    st.integers(1, RUN_MESSAGES_MAX),
    keys,
    ttl_ms=st.sampled_from((0, 0, 0, 500, 3000)),
    delay_ms=st.sampled_from((0, 0, 0, 0, 700)),
    padding=st.sampled_from((0, 0, 0, 30_000)),
    sequence=st.sampled_from((0, 0, 0, 1, 2, 3, 1026)),
    again=st.booleans(),
)
wishes = st.builds(
    Wish,
    st.sampled_from(("first", "first", "first", "second", "dead")),
    groups,
    messages_max=st.sampled_from((1, 3, 10, 1000)),
    bytes_max=st.sampled_from((1, 100, 70_000, 4_000_000, 4_000_000)),
    visibility_ms=st.sampled_from((0, 50, 2000)),
    epoch=picks,
    reports_hand_outs=st.booleans(),
    standing_messages=st.sampled_from((0, 0, 1, 4, 64)),
    standing_bytes=st.sampled_from((1, 100, 4096, 4096)),
    replaces=st.booleans(),
)
settlements = st.builds(
    Settlement,
    picks,
    st.sampled_from(
        (
            Ending.ACK,
            Ending.ACK,
            Ending.NACK,
            Ending.NACK,
            Ending.RELEASE,
            Ending.DISCONNECT,
            Ending.DEAD_LETTER,
            None,
            None,
        )
    ),
    st.lists(st.integers(0, RUN_MESSAGES_MAX), max_size=4, unique=True).map(sorted),
    delay_ms=st.sampled_from((0, 300)),
    epoch=picks,
    client_id=st.sampled_from(("A", "A", "B", "")),
)
limits = st.sampled_from((1, ALL, ALL, ALL))
starts = st.one_of(
    st.none(),
    st.sampled_from((Start(StartAt.EARLIEST), Start(StartAt.LATEST))),
    st.builds(Start, st.sampled_from((StartAt.LAST, StartAt.OFFSET)), st.integers(1, 30)),
)
administrations = st.one_of(
    st.builds(PlaceGroup, queues, groups, starts, st.sampled_from((0, 0, 0, 1))),
    st.builds(RemoveGroup, queues, groups),
    st.builds(RemoveQueue, queues, st.sampled_from((0, 0, 0, 1))),
    st.builds(Purge, queues),
    st.builds(PauseQueue, queues, st.sampled_from((True, False, False))),
    st.builds(Unschedule, queues, st.integers(1, 4)),
    st.builds(Materialize, queues, st.booleans(), st.sampled_from(((), ("g",), ("g", "h")))),
    st.builds(Unmaterialize, queues),
    st.builds(TakeOwnership, queues, groups, clients, starts, st.integers(0, 3)),
    st.builds(ConfirmOwnership, queues, groups, clients, st.integers(0, 3)),
    st.builds(DropOwnership, queues, groups, clients, st.integers(0, 3)),
    st.integers(0, 3).map(
        lambda max_attempts: PutTopic(
            Topic("jobs", replace(TOPICS["jobs"], max_attempts=max_attempts)), create=False
        )
    ),
)
