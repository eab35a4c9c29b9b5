"""The caller does not hold what it acts on: a reservation, a queue, a partition, a cluster.

Whoever gets one of these drops what it believed to hold before it goes on.
"""

from grpc import StatusCode

from tidemark.errors.base import ClientError


class ReservationExpired(ClientError):
    """The reservation ran out before it was settled; its messages are ready for others.

    What to do: drop the work or make it idempotent; extend earlier, or ask for more time.
    """

    reason = "RESERVATION_EXPIRED"
    code = StatusCode.FAILED_PRECONDITION


class ReservationNotFound(ClientError):
    """The receipt names no reservation that storage remembers.

    What to do: drop the receipt; the messages come again if they were not settled.
    """

    reason = "RESERVATION_NOT_FOUND"
    code = StatusCode.NOT_FOUND


class AlreadySettled(ClientError):
    """The reservation was settled before, in another way than asked for now.

    What to do: keep the first outcome; settle every delivery from one place only.
    """

    reason = "ALREADY_SETTLED"
    code = StatusCode.FAILED_PRECONDITION


class UnknownDeliveryTag(ClientError):
    """The delivery tag does not stand for a delivery of this connection.

    What to do: settle on the connection that received the delivery, or by receipt.
    """

    reason = "UNKNOWN_DELIVERY_TAG"
    code = StatusCode.NOT_FOUND


class Fenced(ClientError):
    """The caller acts under an epoch that a newer owner has replaced.

    What to do: stop acting on it and drop what was held; claim or subscribe anew to own it again.
    """

    reason = "FENCED"
    code = StatusCode.FAILED_PRECONDITION


class NotOwner(ClientError):
    """This broker does not own the partition of the queue.

    What to do: call the broker whose address is in `owner`; wait for one if that is empty.
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
