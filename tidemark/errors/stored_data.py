"""The data on disk cannot be used. An operator has to act: none of these is transient."""

from grpc import StatusCode

from tidemark.errors.base import ServiceError


class FormatNotSupported(ServiceError):
    """The data was written in a format that this version cannot read.

    What to do: run the version that wrote it, or follow the upgrade notes.
    """

    reason = "FORMAT_NOT_SUPPORTED"
    code = StatusCode.FAILED_PRECONDITION


class DataCorrupt(ServiceError):
    """Stored data fails its checksum or cannot be decoded.

    What to do: keep the file named by `file`, restore from a backup, and check the disk.
    """

    reason = "DATA_CORRUPT"
    code = StatusCode.DATA_LOSS


class RecordUnreadable(ServiceError):
    """One stored record is missing or fails its checksum; the rest of the partition goes on.

    What to do: check the disk, and restore from a backup; or purge the queue named by `queue`.
    """

    reason = "RECORD_UNREADABLE"
    code = StatusCode.DATA_LOSS


class StoreNotFit(ServiceError):
    """The server that stores the data is not as durable as the settings promise.

    What to do: change the server's configuration as in the detail, or the settings.
    """

    reason = "STORE_NOT_FIT"
    code = StatusCode.FAILED_PRECONDITION


class DataDirectoryInUse(ServiceError):
    """Another process has the data directory open.

    What to do: stop the other process, or choose another directory.
    """

    reason = "DATA_DIRECTORY_IN_USE"
    code = StatusCode.FAILED_PRECONDITION
