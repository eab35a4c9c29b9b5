"""Keys of the outbox: the entries that wait for a destination, in their order."""

from storage_svc.engines.keys import read_text, read_u32, read_u64, text, u64


def outbox_prefix(destination: str) -> bytes:
    """The prefix of the keys of all entries for one destination."""
    return text(destination.encode())


def outbox_key(destination: str, sequence: int) -> bytes:
    return outbox_prefix(destination) + u64(sequence)


def read_outbox_key(key: bytes) -> tuple[str, int]:
    """Destination and sequence."""
    destination, at = read_text(key)
    return destination.decode(), read_u64(key, at)


def outbox_partition(value: bytes) -> int:
    """The destination partition, with which the value begins."""
    return read_u32(value)
