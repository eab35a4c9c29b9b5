"""Every limit of the service in one place, as plain numbers; `docs/CONFIG.md` shows them.

Units are part of the names. The string under a constant says what it bounds and why it has that
value, and is what the documentation prints. Limits are checked where input enters, never here.
"""

from typing import Final

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
_HOUR_MS: Final = 60 * 60 * 1000
_DAY_MS: Final = 24 * _HOUR_MS

# ------------------------------------------------------------------------ messages, runs, frames

MESSAGE_BYTES_MAX: Final = 1 * _MIB
"""Body of one message. Larger things belong in an object store, with a link in the message."""

HEADERS_BYTES_MAX: Final = 16 * _KIB
"""Header keys and values of one message together, so that headers stay small beside bodies."""

HEADERS_COUNT_MAX: Final = 64
"""Headers of one message."""

RUN_MESSAGES_MAX: Final = 10_000
"""Messages in one run. Ten times what saturates the hot path; bounds the cost of slicing a run."""

RUN_BYTES_MAX: Final = 4 * _MIB
"""One run as stored, headers included: at least one message of the largest size always fits."""

FRAME_RUNS_MAX: Final = 10_000
"""Runs in one frame: one message to each of ten thousand queues still fits a single frame."""

FRAME_PARTS_MAX: Final = 10_000
"""Parts of any other kind in one frame of a session: while it is taken nobody else is served."""

FRAME_ENTRIES_MAX: Final = 20_000
"""Subscriptions that the syncs of one frame may name: each is answered, also by its refusal."""

FRAME_BYTES_MAX: Final = 16 * _MIB
"""One frame on the wire, in either direction. Far beyond the size at which frames stop paying."""

GRPC_RECEIVE_BYTES_MAX: Final = FRAME_BYTES_MAX + 64 * _KIB
"""Largest gRPC message accepted: the largest frame plus slack, so that an overfull frame gets a
reasoned refusal instead of a broken call."""

# ----------------------------------------------------------------------------------------- names

TOPIC_NAME_BYTES_MAX: Final = 128
"""Name of a topic."""

LITE_NAME_BYTES_MAX: Final = 256
"""The part of a lite queue's name after the slash, in UTF-8: holds any e-mail address (254)."""

GROUP_NAME_BYTES_MAX: Final = 128
"""Name of a consumer group."""

CLIENT_ID_BYTES_MAX: Final = 256
"""Id of a client, in UTF-8."""

FAIRNESS_KEY_BYTES_MAX: Final = 128
"""Fairness key of a run, in UTF-8; it is part of storage keys, so it stays short."""

PRODUCER_ID_BYTES_MAX: Final = 128
"""Id of an idempotent producer, in UTF-8."""

# ------------------------------------------------------------------------- connections and calls

OPEN_STREAMS_MAX: Final = 10_000
"""Open streams per broker. More clients than that need another broker."""

SUBSCRIPTIONS_PER_SESSION_MAX: Final = 10_000
"""Subscriptions of one session; a full sync must fit one frame."""

SETTLEMENT_RANGES_MAX: Final = 1_000
"""Ranges that one settlement may name."""

SETTLEMENTS_PER_FRAME_MAX: Final = 10_000
"""Settlements in one frame or call: their refusals must fit one frame back."""

TRACEPARENT_BYTES_MAX: Final = 64
"""Trace context of a run: W3C's form has 55 bytes."""

CREDIT_MAX: Final = 1_000_000
"""Messages that a consumer may have asked for and not yet got."""

PAGE_SIZE_MAX: Final = 1000
"""Items on one page of a listing; asking for more gives this many."""

PAGE_SIZE_DEFAULT: Final = 100
"""Items on one page when the caller does not say."""

PULL_MESSAGES_MAX: Final = 10_000
"""Messages that one pull may ask for: one full run."""

PULL_WAIT_MS_MAX: Final = 60_000
"""How long a pull may wait for messages; longer idle calls are cut by load balancers."""

# ------------------------------------------------------------------------------ queues and topics

PARTITIONS_MAX: Final = 1024
"""Partitions of a cluster. Each costs an engine, a writer and a sweeper."""

GROUPS_PER_QUEUE_MAX: Final = 1_000
"""Groups of one queue: each run that is published is offered to every one of them."""

EXCEPTIONS_MAX: Final = 10_000
"""Slices of one group on one queue that are delayed or buried. At the cap nothing is handed out
until time or a sweep has taken some of them away."""

PRODUCER_SEQUENCES_MAX: Final = 1024
"""Runs of one producer that a partition remembers, to answer repeats with the first answer."""

MAX_ATTEMPTS_MAX: Final = 1_000_000
"""Highest `max_attempts` of a topic; 0 means no limit."""

FAIRNESS_WEIGHTS_MAX: Final = 100
"""Fairness keys of a topic with a weight of their own; all other keys weigh 1."""

FAIRNESS_WEIGHT_MIN: Final = 1
"""Smallest weight of a fairness key: no key can be starved."""

FAIRNESS_WEIGHT_MAX: Final = 100
"""Largest weight of a fairness key."""

RETENTION_ROWS_MAX: Final = 10_000
"""Planned deletions in one call of a retention or eviction pass."""

# ------------------------------------------------------------------------------------- durations

VISIBILITY_TIMEOUT_MS_MIN: Final = 50
"""Shortest visibility timeout: five times the finest tick of the expiry timer (V1, V2)."""

VISIBILITY_TIMEOUT_MS_MAX: Final = 12 * _HOUR_MS
"""Longest visibility timeout. Longer work extends its reservation."""

NACK_DELAY_MS_MAX: Final = 12 * _HOUR_MS
"""Longest delay of a nack, the same as the longest reservation."""

DELAY_MS_MAX: Final = 365 * _DAY_MS
"""How far ahead a message can be scheduled."""

TTL_MS_MAX: Final = 365 * _DAY_MS
"""Longest time to live of a message; 0 means that it does not expire."""

IDLE_AFTER_MS_MIN: Final = 100
"""Shortest idle window of a topic; below that, queues would be unloaded between two messages."""

IDLE_AFTER_MS_MAX: Final = 30 * _DAY_MS
"""Longest idle window of a topic."""

RETENTION_SECONDS_MAX: Final = 100 * 365 * 24 * 60 * 60
"""Longest age limit of a topic; 0 means that there is none."""

PRODUCER_WINDOW_MS: Final = 7 * _DAY_MS
"""How long a partition remembers a producer that does not publish."""

SWEEP_LEASE_MS_MAX: Final = 600_000
"""Longest time for which a lifecycle replica has a partition to itself without asking again."""
