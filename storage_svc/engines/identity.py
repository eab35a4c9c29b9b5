"""The identity that every engine stores with a partition, and its check.

The version stays in front in every format to come.
"""

from pathlib import Path
from typing import Final

from storage_svc.engines.engine import FORMAT_VERSION, Identity
from storage_svc.engines.keys import read_text, read_u32, text, u32
from tidemark.errors import ClusterMismatch, DataCorrupt, FormatNotSupported

IDENTITY_KEY: Final = b"identity"
"""In META."""

_PARTITIONS_AT: Final = 8


def identity_value(identity: Identity) -> bytes:
    """u32 format version, u32 partition, u32 partitions, text cluster id."""
    cluster = u32(identity.partitions) + text(identity.cluster_id.encode())
    return u32(FORMAT_VERSION) + u32(identity.partition) + cluster


def check_foreign(
    where: Path | str, stored: bytes, partitions_at: int, cluster_id: str, partitions: int
) -> int:
    """Refuse an identity of another format, cluster or number of partitions; returns the number."""
    if (version := read_u32(stored)) != FORMAT_VERSION:
        raise FormatNotSupported(
            f"{where} is in format {version}, this version reads {FORMAT_VERSION}"
        )
    found = read_u32(stored, partitions_at)
    cluster = read_text(stored, partitions_at + 4)[0].decode(errors="replace")
    if (cluster, partitions or found) != (cluster_id, found):
        raise ClusterMismatch(
            f"{where} belongs to cluster {cluster!r} with {found} partitions, "
            f"not to cluster {cluster_id!r}"
            + (f" with {partitions} (TIDEMARK_PARTITIONS)" if partitions else "")
        )
    return found


def read_partitions(where: str, stored: bytes, cluster_id: str, expected: int = 0) -> int:
    """The number of partitions in the identity of one; refuses another format or cluster, and
    another number than the expected one, unless that is 0."""
    return check_foreign(where, stored, _PARTITIONS_AT, cluster_id, expected)


def check_identity(where: str, stored: bytes, identity: Identity) -> None:
    """Refuse the identity of anything but this partition."""
    check_foreign(where, stored, _PARTITIONS_AT, identity.cluster_id, identity.partitions)
    if stored != identity_value(identity):
        raise DataCorrupt(f"{where} has the identity of another partition")
