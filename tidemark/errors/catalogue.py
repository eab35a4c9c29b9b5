"""The catalogue of all reasons, with the documentation of each.

`tidemark.rpc` finds the class of a received error here; docs/ERRORS.md is generated from it.
"""

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# Imported for their classes: every subclass of a branch is part of the catalogue.
from tidemark.errors import availability, existence, ownership, requests, rights, stored_data  # noqa: F401
from tidemark.errors.base import ClientError, ServiceError, TidemarkError

_ACTION: Final = "What to do:"


def _concrete() -> tuple[type[TidemarkError], ...]:
    found = [*ClientError.__subclasses__(), *ServiceError.__subclasses__()]
    return tuple(sorted(found, key=lambda error: error.reason))


ALL: Final[tuple[type[TidemarkError], ...]] = _concrete()
"""Every error that can be raised, sorted by reason."""

BY_REASON: Final[Mapping[str, type[TidemarkError]]] = MappingProxyType(
    {error.reason: error for error in ALL}
)


def meaning_and_action(error: type[TidemarkError]) -> tuple[str, str]:
    """The two halves of the docstring, each on one line: meaning and remedy."""
    meaning, found, action = inspect.cleandoc(error.__doc__ or "").partition(_ACTION)
    if not (found and meaning.strip() and action.strip()):
        raise ValueError(f"the docstring of {error.__name__} has no sentence '{_ACTION}'")
    return " ".join(meaning.split()), " ".join(action.split())
