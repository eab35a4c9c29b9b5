"""The request is invalid: the same call never succeeds.

Fields, names, sizes, sequences of idempotent publishing, and calls that a server does not
implement. Valid requests for something that does not exist are in `existence`, those that are not
allowed in `rights`.
"""

from grpc import StatusCode

from tidemark.errors.base import ClientError


class InvalidArgument(ClientError):
    """A field of the request is missing, malformed or out of range.

    What to do: correct the field named by `field`; the same request never succeeds.
    """

    reason = "INVALID_ARGUMENT"
    code = StatusCode.INVALID_ARGUMENT


class InvalidName(ClientError):
    """A topic, lite, group, client or header name breaks the rules for names.

    What to do: choose a name within the documented length and characters.
    """

    reason = "INVALID_NAME"
    code = StatusCode.INVALID_ARGUMENT


class MessageTooLarge(ClientError):
    """One message is larger than the message limit.

    What to do: shrink the message, or store the payload elsewhere and publish a reference.
    """

    reason = "MESSAGE_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


class BatchTooLarge(ClientError):
    """One call or frame carries more messages or bytes than allowed.

    What to do: split it; each part may be as large as the documented limit.
    """

    reason = "BATCH_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


class HeadersTooLarge(ClientError):
    """The headers of one message are too large or too many.

    What to do: move data that is not needed for routing into the payload.
    """

    reason = "HEADERS_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


class SequenceTooOld(ClientError):
    """The producer's sequence is older than the window that storage remembers.

    What to do: do not repeat it; check whether the run arrived, and continue with newer sequences.
    """

    reason = "SEQUENCE_TOO_OLD"
    code = StatusCode.OUT_OF_RANGE


class SequenceConflict(ClientError):
    """The producer already used this sequence for a different run.

    What to do: give every run its own sequence, and every producer its own id.
    """

    reason = "SEQUENCE_CONFLICT"
    code = StatusCode.FAILED_PRECONDITION


class Unimplemented(ClientError):
    """This server does not implement the call.

    What to do: check that client and server versions match, and which service is at the address.
    """

    reason = "UNIMPLEMENTED"
    code = StatusCode.UNIMPLEMENTED
