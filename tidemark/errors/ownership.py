"""The caller does not hold the subject of its call: a reservation, a queue, a partition, a cluster.

The caller must drop it before it continues.
"""

from grpc import StatusCode

from tidemark.errors.base import ClientError


class ReservationExpired(ClientError):
    """The reservation expired before it was settled; its messages are ready for other consumers.

    What to do: drop the result or make the work idempotent; extend earlier, or reserve for longer.
    """

    reason = "RESERVATION_EXPIRED"
    code = StatusCode.FAILED_PRECONDITION


class ReservationNotFound(ClientError):
    """The receipt names no reservation that storage remembers.

    What to do: drop the receipt; messages that were not settled are delivered again.
    """

    reason = "RESERVATION_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class AlreadySettled(ClientError):
    """The reservation was already settled with a different outcome.

    What to do: keep the first outcome; settle each delivery in one place only.
    """

    reason = "ALREADY_SETTLED"
    code = StatusCode.FAILED_PRECONDITION


class UnknownDeliveryTag(ClientError):
    """The delivery tag belongs to no delivery that this connection holds.

    What to do: settle on the connection that received the delivery, or by receipt.
    """

    reason = "UNKNOWN_DELIVERY_TAG"
    code = StatusCode.NOT_FOUND


class Fenced(ClientError):
    """The caller is not the owner, or its epoch was replaced by a newer one.

    What to do: stop, and drop the messages; claim or subscribe again to become the owner.
    """

    reason = "FENCED"
    code = StatusCode.FAILED_PRECONDITION


class NotOwner(ClientError):
    """This broker does not hold the partition of the queue.

    What to do: call the broker whose address is in `owner`; if it is empty, wait for one.
    """

    reason = "NOT_OWNER"
    code = StatusCode.FAILED_PRECONDITION


class NotSubscribed(ClientError):
    """The client has no subscription to this queue.

    What to do: subscribe first; after a reconnect, sync the subscriptions.
    """

    reason = "NOT_SUBSCRIBED"
    code = StatusCode.FAILED_PRECONDITION


class ClusterMismatch(ClientError):
    """The caller, or the data directory, belongs to another cluster.

    What to do: check the address and the cluster id in the settings.
    """

    reason = "CLUSTER_MISMATCH"
    code = StatusCode.FAILED_PRECONDITION


class MemberReplaced(ClientError):
    """A later process with the same id has joined the cluster.

    What to do: give every member its own id; the earlier process has to end.
    """

    reason = "MEMBER_REPLACED"
    code = StatusCode.FAILED_PRECONDITION


class MembershipStatic(ClientError):
    """The members of the cluster come from settings, so that their partitions do not move.

    What to do: run the brokers with a registry (TIDEMARK_REGISTRY_URL), or change the settings.
    """

    reason = "MEMBERSHIP_STATIC"
    code = StatusCode.FAILED_PRECONDITION
