"""Every limit of the service in one place, as plain numbers; `docs/CONFIG.md` shows them.

Units are part of the names. The string under a constant is its documentation: its subject, and the
reason for its value. Limits are enforced where input enters, not here.
"""

from typing import Final

_KIB: Final = 1024
_MIB: Final = 1024 * _KIB
_HOUR_MS: Final = 60 * 60 * 1000
_DAY_MS: Final = 24 * _HOUR_MS

# ------------------------------------------------------------------------ messages, runs, frames

MESSAGE_BYTES_MAX: Final = 1 * _MIB
"""Payload of one message. Put larger data into an object store and a link into the message."""

HEADERS_BYTES_MAX: Final = 16 * _KIB
"""Header keys and values of one message together: headers stay small beside payloads."""

HEADERS_COUNT_MAX: Final = 64
"""Headers of one message."""

RUN_MESSAGES_MAX: Final = 10_000
"""Messages in one run: ten times as many as saturate the hot path. Bounds the cost of slicing."""

RUN_BYTES_MAX: Final = 4 * _MIB
"""One run as stored, headers included. A message of the largest size always fits."""

FRAME_RUNS_MAX: Final = 10_000
"""Runs in one frame: one message to each of ten thousand queues fits one frame."""

FRAME_PARTS_MAX: Final = 10_000
"""Parts of any other kind in one session frame: the broker serves no one else while it reads it."""

FRAME_ENTRIES_MAX: Final = 20_000
"""Subscriptions in all syncs of one frame: each of them is answered, refusals included."""

FRAME_BYTES_MAX: Final = 16 * _MIB
"""One frame on the wire, in either direction. Larger frames bring no more throughput."""

UNANSWERED_OPERATIONS_MAX: Final = 10_000
"""Operations of one partition that a broker leaves unanswered by storage. More wait in the broker,
so that a partition that is slow delays no other on the same stream."""

UNANSWERED_BYTES_MAX: Final = 32 * _MIB
"""The same in bytes: two frames of the largest size."""

GRPC_RECEIVE_BYTES_MAX: Final = FRAME_BYTES_MAX + 64 * _KIB
"""Largest gRPC message accepted: the largest frame plus slack, so that an oversized frame gets an
error with a reason instead of a broken call."""

# ----------------------------------------------------------------------------------------- names

TOPIC_NAME_BYTES_MAX: Final = 128
"""Name of a topic."""

LITE_NAME_BYTES_MAX: Final = 256
"""Lite part of a queue name, after the slash, in UTF-8: any e-mail address fits (254)."""

GROUP_NAME_BYTES_MAX: Final = 128
"""Name of a consumer group."""

CLIENT_ID_BYTES_MAX: Final = 256
"""Id of a client, in UTF-8."""

FAIRNESS_KEY_BYTES_MAX: Final = 128
"""Fairness key of a run, in UTF-8. It is part of storage keys, so it is short."""

PRODUCER_ID_BYTES_MAX: Final = 128
"""Id of an idempotent producer, in UTF-8."""

# ------------------------------------------------------------------------- connections and calls

OPEN_STREAMS_MAX: Final = 10_000
"""Open streams per broker. More clients need another broker."""

SUBSCRIPTIONS_PER_SESSION_MAX: Final = 10_000
"""Subscriptions of one session; a full sync must fit one frame."""

SETTLEMENT_RANGES_MAX: Final = 1_000
"""Ranges that one settlement may name."""

SETTLEMENTS_PER_FRAME_MAX: Final = 10_000
"""Settlements in one frame or call: their results must fit one frame."""

ACKS_PER_OPERATION_MAX: Final = 256
"""Reservations that a broker acknowledges with one operation: a commit takes whole operations."""

APPENDS_PER_OPERATION_MAX: Final = 256
"""Runs that a broker stores with one operation, for the same reason."""

RENEWALS_PER_FRAME_MAX: Final = 10_000
"""Reservations that the renewals of one frame may name."""

SMALL_FRAME_BYTES: Final = min(
    FRAME_RUNS_MAX,
    FRAME_PARTS_MAX,
    FRAME_ENTRIES_MAX,
    SUBSCRIPTIONS_PER_SESSION_MAX,
    SETTLEMENTS_PER_FRAME_MAX,
    RENEWALS_PER_FRAME_MAX,
)
"""Not a limit itself: the parts of a session frame up to this size are not counted, because each
takes a byte and so cannot exceed the limits above."""

TRACEPARENT_BYTES_MAX: Final = 64
"""Trace context of a run: the W3C form has 55 bytes."""

CREDIT_MAX: Final = 1_000_000
"""Outstanding credit of a consumer: messages requested and not yet delivered."""

PAGE_SIZE_MAX: Final = 1000
"""Items on one page of a listing. Larger page sizes are reduced to this."""

PAGE_SIZE_DEFAULT: Final = 100
"""Items on one page unless the caller sets a page size."""

PULL_MESSAGES_MAX: Final = 10_000
"""Messages in one pull: one full run."""

PEEK_MESSAGES_MAX: Final = 1000
"""Messages that one look at a queue may ask for."""

PULL_WAIT_MS_MAX: Final = 60_000
"""Longest wait of a pull. Load balancers cut calls that are idle for longer."""

# ------------------------------------------------------------------------------ queues and topics

PARTITIONS_DEFAULT: Final = 16
"""Partitions of a new cluster, unless its settings name a number."""

PARTITIONS_MAX: Final = 1024
"""Partitions of a cluster. Each costs an engine, a writer and a sweeper."""

GROUPS_PER_QUEUE_MAX: Final = 1_000
"""Groups of one queue: every published run is offered to each of them."""

RETURNED_SLICES_MAX: Final = 10_000
"""Delayed or buried slices of one group on one queue. At the limit, the group gets no more
messages until delays end or a sweep removes some. Also the retries of one fairness key that wait
behind ready messages; at the limit, they go first."""

PRODUCER_SEQUENCES_MAX: Final = 1024
"""Runs of one producer that a partition remembers, to answer repeats with the first result."""

MAX_ATTEMPTS_MAX: Final = 1_000_000
"""Highest `max_attempts` of a topic; 0 means no limit."""

FAIRNESS_WEIGHTS_MAX: Final = 100
"""Fairness keys of a topic with their own weight; all other keys have weight 1."""

FAIRNESS_WEIGHT_MIN: Final = 1
"""Smallest weight of a fairness key, so that no key starves."""

FAIRNESS_WEIGHT_MAX: Final = 100
"""Largest weight of a fairness key."""

RETENTION_ROWS_MAX: Final = 10_000
"""Planned deletions in one call of a retention or eviction pass."""

# ------------------------------------------------------------------------------------- durations

VISIBILITY_TIMEOUT_MS_MIN: Final = 50
"""Shortest visibility timeout: five times the finest tick of the expiry timer (V1, V2)."""

VISIBILITY_TIMEOUT_MS_MAX: Final = 12 * _HOUR_MS
"""Longest visibility timeout. Consumers extend the reservation for longer work."""

MAX_LEASE_MS_MAX: Final = 30 * _DAY_MS
"""Longest time for which a client renews the reservation of a message that is being handled."""

NACK_DELAY_MS_MAX: Final = 12 * _HOUR_MS
"""Longest delay of a nack or a retry, equal to the longest visibility timeout."""

RETRY_MULTIPLIER_MAX: Final = 100
"""Highest factor by which the delay of a retry grows with each failed attempt."""

DELAY_MS_MAX: Final = 365 * _DAY_MS
"""How far ahead a message can be scheduled."""

TTL_MS_MAX: Final = 365 * _DAY_MS
"""Longest time to live of a message; 0 means no limit."""

CLIENT_TIMEOUT_MS_MAX: Final = 30 * _DAY_MS
"""Longest timeout that a client may be given."""

IDLE_AFTER_MS_MIN: Final = 100
"""Shortest idle window of a topic. Below that, queues would be unloaded between two messages."""

IDLE_AFTER_MS_MAX: Final = 30 * _DAY_MS
"""Longest idle window of a topic."""

GROUP_EXPIRY_SECONDS_MIN: Final = 2 * PULL_WAIT_MS_MAX // 1000
"""A pull uses its group when it begins: the group must not expire while it waits."""

RETENTION_SECONDS_MAX: Final = 100 * 365 * 24 * 60 * 60
"""Longest age limit of a topic; 0 means no limit."""

PRODUCER_WINDOW_MS: Final = 7 * _DAY_MS
"""How long a partition remembers a producer after its last publish."""

SWEEP_LEASE_MS_MAX: Final = 600_000
"""Longest sweep lease: the time a lifecycle replica has a partition to itself without renewing."""

TIME_MS_MAX: Final = 253_402_300_799_999
"""The latest time in a request, in Unix milliseconds: the end of the year 9999, as in protobuf."""
