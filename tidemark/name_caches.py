"""Caches of what is made of names, emptied together now and then.

A name that stays in a cache keeps the memory around it: the interpreter returns memory in pieces of
1 MiB, and only whole ones. A few thousand names that were used while a million queues were loaded
would keep most of the memory of these queues for as long as the process is idle. To make all of
them again costs some 20 milliseconds.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeVar, cast

NAMES_MAX: Final = 16_384
"""Entries of one cache: more than the queues of one connection, which are used in turn. One that is
a little too small for that finds nothing."""

_Make = TypeVar("_Make", bound=Callable[..., object])
_empty: Final[list[Callable[[], None]]] = []


def name_cache(make: _Make) -> _Make:
    """Decorates a pure function of names."""
    cached = lru_cache(NAMES_MAX)(make)
    _empty.append(cached.cache_clear)
    return cast("_Make", cached)


def empty_name_caches() -> None:
    for empty in _empty:
        empty()
