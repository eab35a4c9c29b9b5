"""What was asked for is not there, or already is, or is not in the state that was assumed.

Topics, queues, groups, publishers, sessions and jobs, each by the name that the caller gave.
Reservations are in `ownership`.
"""

from grpc import StatusCode

from tidemark.errors.base import ClientError


class TopicNotFound(ClientError):
    """There is no topic of this name.

    What to do: create the topic first, or check the spelling.
    """

    reason = "TOPIC_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class TopicExists(ClientError):
    """A topic of this name exists already.

    What to do: use the existing topic, or update its settings.
    """

    reason = "TOPIC_EXISTS"
    code = StatusCode.ALREADY_EXISTS


class TopicNotEmpty(ClientError):
    """The topic still has queues or messages.

    What to do: purge or consume them first, or ask for deletion with its contents.
    """

    reason = "TOPIC_NOT_EMPTY"
    code = StatusCode.FAILED_PRECONDITION


class TopicVersionMismatch(ClientError):
    """The call was checked against another version of the topic's settings.

    What to do: read the topic again and repeat the call with its current version.
    """

    reason = "TOPIC_VERSION_MISMATCH"
    code = StatusCode.ABORTED


class QueueNotFound(ClientError):
    """There is no queue of this lmq_name.

    What to do: publish or subscribe to create it, or check the spelling.
    """

    reason = "QUEUE_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class GroupNotFound(ClientError):
    """The queue has no group of this name.

    What to do: subscribe with the group to create it, or check the spelling.
    """

    reason = "GROUP_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class RunNotScheduled(ClientError):
    """The queue has no scheduled run of this id: it never had, or the run is already due.

    What to do: take it for delivered, and settle it when it arrives.
    """

    reason = "RUN_NOT_SCHEDULED"
    code = StatusCode.NOT_FOUND


class PublisherNotFound(ClientError):
    """No publisher has this id; it was destroyed or timed out.

    What to do: nothing if it should be gone; otherwise publish again, which makes a new one.
    """

    reason = "PUBLISHER_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class SessionNotFound(ClientError):
    """The broker knows no session of this client; it ended, timed out or was elsewhere.

    What to do: open a session and sync the subscriptions.
    """

    reason = "SESSION_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class ClientClosed(ClientError):
    """The client, or the subscription, was closed before or during the call.

    What to do: open a new one with `tidemark.connect`; nothing comes back to life.
    """

    reason = "CLIENT_CLOSED"
    code = StatusCode.FAILED_PRECONDITION


class JobRunning(ClientError):
    """A pass of the same job is running.

    What to do: wait for it to end; `ListJobs` tells how it is.
    """

    reason = "JOB_RUNNING"
    code = StatusCode.FAILED_PRECONDITION


class PartitionNotFound(ClientError):
    """This process does not hold the partition.

    What to do: look up where the partition lives and call there.
    """

    reason = "PARTITION_NOT_FOUND"
    code = StatusCode.NOT_FOUND
