"""What was asked for is not valid: no repetition of the same call ever succeeds.

Fields, names, sizes, the sequences of idempotent publishing, and calls that a server does not
offer. What is valid but not there is in `existence`, what is not allowed in `rights`.
"""

from grpc import StatusCode

from tidemark.errors.base import ClientError


class InvalidArgument(ClientError):
    """A field of the request is missing, malformed or out of its range.

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
    """One call or frame carries more messages or bytes than it may.

    What to do: split it; each part may be as large as the documented limit.
    """

    reason = "BATCH_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


class HeadersTooLarge(ClientError):
    """The headers of one message are larger than the header limit, or too many.

    What to do: move what is not needed for routing into the body.
    """

    reason = "HEADERS_TOO_LARGE"
    code = StatusCode.INVALID_ARGUMENT


class SequenceTooOld(ClientError):
    """The producer's sequence is older than the window storage remembers.

    What to do: do not repeat it; look up whether the run arrived, and go on with newer sequences.
    """

    reason = "SEQUENCE_TOO_OLD"
    code = StatusCode.OUT_OF_RANGE


class SequenceConflict(ClientError):
    """The producer used this sequence before, for a different run.

    What to do: give every run a sequence of its own, and every producer an id of its own.
    """

    reason = "SEQUENCE_CONFLICT"
    code = StatusCode.FAILED_PRECONDITION


class Unimplemented(ClientError):
    """This server does not offer the call.

    What to do: check that client and server versions fit, and which service listens at the address.
    """

    reason = "UNIMPLEMENTED"
    code = StatusCode.UNIMPLEMENTED
