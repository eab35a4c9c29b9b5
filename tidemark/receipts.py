"""Receipts: storage's proof of a reservation, good across restarts of a broker.

Storage makes them and a broker reads the partition out of them; to everybody else they are opaque.

Layout, big-endian: version u8, partition u16, queue_id u64, reservation id u64, owner epoch u64.
"""

from dataclasses import dataclass
from struct import Struct

from tidemark.errors import InvalidArgument

_VERSION = 1
_LAYOUT = Struct(">BHQQQ")


@dataclass(frozen=True, slots=True)
class Receipt:
    """Names one reservation in the whole cluster."""

    partition: int
    queue_id: int
    reservation_id: int
    owner_epoch: int = 0

    def encode(self) -> bytes:
        return _LAYOUT.pack(
            _VERSION, self.partition, self.queue_id, self.reservation_id, self.owner_epoch
        )

    @staticmethod
    def decode(data: bytes) -> "Receipt":
        """Raises InvalidArgument for anything that is not a receipt of this version."""
        if len(data) != _LAYOUT.size or data[0] != _VERSION:
            raise InvalidArgument("not a receipt", field="receipt")
        _, partition, queue_id, reservation_id, owner_epoch = _LAYOUT.unpack(data)
        return Receipt(partition, queue_id, reservation_id, owner_epoch)
