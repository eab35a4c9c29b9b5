"""How settings are declared: a field of a frozen dataclass is an environment variable.

Fills and lists such classes; contains no particular setting.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, TypeVar

from tidemark.settings.environment import given_or_own
from tidemark.settings.variables import Kind, SettingsError, Variable

T = TypeVar("T")


def setting(name: str, kind: Kind[T], *, default: T, doc: str, secret: bool = False) -> Any:
    """A dataclass field that is read from the variable `name`; a secret one is never shown."""
    variable = Variable(name, kind, default, doc, secret)
    return field(default=default, repr=not secret, metadata={"variable": variable})


def part(settings: type["Settings"]) -> Any:
    """A dataclass field with settings that services share."""
    return field(default_factory=settings, metadata={"part": settings})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The base of all settings classes."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Raises SettingsError for the first invalid value."""
        environ = given_or_own(environ)
        values: dict[str, Any] = {}
        for each in fields(cls):
            if "part" in each.metadata:
                values[each.name] = each.metadata["part"].from_environment(environ)
            else:
                values[each.name] = each.metadata["variable"].read(environ)
        return cls(**values)

    @classmethod
    def value_of(cls, field_name: str, environ: Mapping[str, str] | None = None) -> Any:
        """One value, whatever the others are: for a process that gives those to a service itself.

        Raises SettingsError if it is invalid.
        """
        (found,) = [each for each in fields(cls) if each.name == field_name]
        return found.metadata["variable"].read(given_or_own(environ))

    @classmethod
    def variables(cls) -> Iterator[Variable[Any]]:
        """The variables of this class, in declaration order."""
        for each in fields(cls):
            if "part" in each.metadata:
                yield from each.metadata["part"].variables()
            else:
                yield each.metadata["variable"]


S = TypeVar("S", bound=Settings)


def load_or_exit(settings: type[S]) -> S:
    """For `__main__`: the settings, or one line on stderr and exit status 2."""
    try:
        return settings.from_environment()
    except SettingsError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
