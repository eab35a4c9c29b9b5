"""Rows of numbers in one repeated field: the numbers of an entry stand together.

Pure. A field for each number would be easier to read in a proto, and costs more at both ends: most
of the cost of a frame with a single entry is that of looking at fields (ADR 43).
"""

from collections.abc import Iterator, Sequence


def rows_of(numbers: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    """The rows. Raises ValueError at the end if the last one is not complete.

    `numbers` is a slice of the field: an iterator over a repeated field ends with an exception,
    which is slow.
    """
    each = iter(numbers)
    return zip(*(each,) * width, strict=True)
