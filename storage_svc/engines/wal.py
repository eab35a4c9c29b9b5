"""A check of RocksDB's write-ahead log that RocksDB itself does not make.

A log may end in the middle of a record: the process or the power died while writing it, and the
commit was never acknowledged. RocksDB recognizes that by a length that runs past the end of the
file. It would treat a flipped bit in the length field of any record of the last block in the same
way, and silently drop that record and all behind it. This module distinguishes the two; it never
writes.
"""

import os
from pathlib import Path
from struct import Struct

_BLOCK_BYTES = 32 * 1024
# Masked CRC-32C of type and payload, length of the payload, type. No record crosses a block.
_HEADER = Struct("<IHB")
_TYPE_AT = 6


def _crc32c_table() -> list[int]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC = _crc32c_table()


def has_altered_length(log: Path) -> bool:
    """Whether the log seems to end in a torn record that was in fact written completely."""
    with log.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(size - size % _BLOCK_BYTES)
        block = file.read()
    at = 0
    while at + _HEADER.size <= len(block):
        masked_crc, length, _ = _HEADER.unpack_from(block, at)
        end = at + _HEADER.size + length
        if end > len(block):
            return _completes(masked_crc, block[at + _TYPE_AT :])
        at = end
    return False


def _completes(masked_crc: int, data: bytes) -> bool:
    """Whether some beginning of `data` has the checksum. The checksum does not cover the length,
    so a record whose length alone was altered still matches at its true end."""
    rotated = (masked_crc - 0xA282EAD8) & 0xFFFFFFFF
    wanted = (rotated >> 17 | rotated << 15) & 0xFFFFFFFF ^ 0xFFFFFFFF
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        if crc == wanted:
            return True
    return False
