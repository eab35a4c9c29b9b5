"""Receipts: storage's proof of a reservation, valid across broker restarts.

Storage issues them and the broker reads the partition from them; for other parts they are opaque.

Layout, big-endian: version u8, partition u16, queue_id u64, reservation id u64, owner epoch u64.
"""

from struct import Struct
from typing import NamedTuple

from tidemark.errors import InvalidArgument

_VERSION = 1
_LAYOUT = Struct(">BHQQQ")


def encode_receipt(partition: int, queue_id: int, reservation_id: int, owner_epoch: int) -> bytes:
    """As `Receipt.encode`, without a receipt."""
    return _LAYOUT.pack(_VERSION, partition, queue_id, reservation_id, owner_epoch)


class Receipt(NamedTuple):
    """Identifies one reservation in the cluster."""

    partition: int
    queue_id: int
    reservation_id: int
    owner_epoch: int = 0

    def encode(self) -> bytes:
        return encode_receipt(*self)

    @staticmethod
    def decode(data: bytes) -> "Receipt":
        """Raises InvalidArgument unless the data is a receipt of this version."""
        if len(data) != _LAYOUT.size or data[0] != _VERSION:
            raise InvalidArgument("not a receipt", field="receipt")
        return Receipt(*_LAYOUT.unpack(data)[1:])
