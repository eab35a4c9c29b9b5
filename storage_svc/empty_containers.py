"""Empty containers that stand for those that few commits, frames and results need.

A commit of one of many partitions is mostly the cost of making and dropping containers (ADR 40).
These refuse to be changed: code that adds to one replaces it first.
"""

from types import MappingProxyType
from typing import Any, Final, cast

NO_SET: Final = cast("set[Any]", frozenset())
NO_DICT: Final = cast("dict[Any, Any]", MappingProxyType({}))
NO_LIST: Final = cast("list[Any]", ())
