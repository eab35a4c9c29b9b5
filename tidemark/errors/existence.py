"""Something that the caller named does not exist, already exists, or is in another state.

Topics, queues, groups, publishers, sessions and jobs. Errors of reservations are in `ownership`.
"""

from grpc import StatusCode

from tidemark.errors.base import ClientError


class TopicNotFound(ClientError):
    """There is no topic with this name.

    What to do: create the topic first, or check the spelling.
    """

    reason = "TOPIC_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class TopicExists(ClientError):
    """A topic with this name already exists.

    What to do: use the existing topic, or update its settings.
    """

    reason = "TOPIC_EXISTS"
    code = StatusCode.ALREADY_EXISTS


class TopicNotEmpty(ClientError):
    """The topic still has queues or messages.

    What to do: consume or purge them first, or delete the topic with its contents.
    """

    reason = "TOPIC_NOT_EMPTY"
    code = StatusCode.FAILED_PRECONDITION


class TopicVersionMismatch(ClientError):
    """The call was checked against a different version of the topic's settings.

    What to do: read the topic again and repeat the call with its current version.
    """

    reason = "TOPIC_VERSION_MISMATCH"
    code = StatusCode.ABORTED


class QueueNotFound(ClientError):
    """There is no queue with this lmq_name.

    What to do: publish or subscribe to create it, or check the spelling.
    """

    reason = "QUEUE_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class GroupNotFound(ClientError):
    """The queue has no group with this name.

    What to do: subscribe with the group to create it, or check the spelling.
    """

    reason = "GROUP_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class RunNotScheduled(ClientError):
    """The queue has no scheduled run with this id; the run may already be due.

    What to do: treat it as published, and settle it when it is delivered.
    """

    reason = "RUN_NOT_SCHEDULED"
    code = StatusCode.NOT_FOUND


class PublisherNotFound(ClientError):
    """No publisher has this id; it was destroyed or timed out.

    What to do: nothing if it should be gone; otherwise publish again, which creates a new one.
    """

    reason = "PUBLISHER_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class SessionNotFound(ClientError):
    """The broker has no session of this client; it ended, timed out or was on another broker.

    What to do: open a session and sync the subscriptions.
    """

    reason = "SESSION_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class ClientClosed(ClientError):
    """The client, or the subscription, was closed before or during the call.

    What to do: open a new one with `tidemark.connect`; a closed client cannot be reused.
    """

    reason = "CLIENT_CLOSED"
    code = StatusCode.FAILED_PRECONDITION


class JobRunning(ClientError):
    """A pass of the same job is running.

    What to do: wait until it ends; `ListJobs` shows its state.
    """

    reason = "JOB_RUNNING"
    code = StatusCode.FAILED_PRECONDITION


class PartitionNotFound(ClientError):
    """This process does not hold the partition.

    What to do: look up the process that holds the partition and call it.
    """

    reason = "PARTITION_NOT_FOUND"
    code = StatusCode.NOT_FOUND
