"""Environment variables: name, allowed values, and how text becomes a value.

Pure: the environment is an argument.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar
from urllib.parse import parse_qs, urlsplit

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SettingsError(ValueError):
    """A variable has an invalid value. The message is one line, for operators."""


class Kind(Protocol[T_co]):
    """A type of value, and how text is parsed as one."""

    @property
    def allowed(self) -> str:
        """The accepted values, phrased to follow "must be"."""
        ...

    def parse(self, text: str) -> T_co:
        """Raises ValueError for invalid text; its message is not shown."""
        ...


@dataclass(frozen=True, slots=True)
class Integer:
    minimum: int
    maximum: int
    unit: str = ""

    @property
    def allowed(self) -> str:
        what = f"a whole number of {self.unit}" if self.unit else "a whole number"
        return f"{what} from {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> int:
        # int() alone would also accept '1_000', ' 7 ' and digits of other scripts.
        if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
            raise ValueError(text)
        value = int(text)
        if not self.minimum <= value <= self.maximum:
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True)
class Share:
    allowed: str = "a number from 0 to 1"

    def parse(self, text: str) -> float:
        if re.fullmatch(r"[0-9]*\.?[0-9]+", text) is None or float(text) > 1:
            raise ValueError(text)
        return float(text)


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(self.options)}"

    def parse(self, text: str) -> str:
        value = text.lower()
        if value not in self.options:
            raise ValueError(text)
        return value


@dataclass(frozen=True, slots=True)
class Switch:
    allowed: str = "true or false"

    def parse(self, text: str) -> bool:
        value = text.lower()
        if value not in ("true", "false"):
            raise ValueError(text)
        return value == "true"


@dataclass(frozen=True, slots=True)
class Identifier:
    """A name that appears in file names, metrics and logs."""

    allowed: str = (
        "1 to 128 letters, digits, '.', '_' and '-', beginning with a letter, a digit or '_'"
    )

    def parse(self, text: str) -> str:
        if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", text) is None:
            raise ValueError(text)
        return text


@dataclass(frozen=True, slots=True)
class Address:
    """`host:port`, with an IPv6 host in brackets. Only a listening address may have port 0."""

    port_min: int = 1

    @property
    def allowed(self) -> str:
        return f"host:port with a port from {self.port_min} to 65535"

    def parse(self, text: str) -> str:
        _, port = split_address(text)
        if port < self.port_min:
            raise ValueError(text)
        return text


LISTEN: Final = Address(port_min=0)


@dataclass(frozen=True, slots=True)
class Addresses:
    """One address, or several that are all different."""

    allowed: str = (
        "host:port with a port from 1 to 65535, or several of them, all different, separated by "
        "commas"
    )

    def parse(self, text: str) -> tuple[str, ...]:
        addresses = tuple(Address().parse(each.strip()) for each in text.split(","))
        if len(set(addresses)) < len(addresses):
            raise ValueError(text)
        return addresses


@dataclass(frozen=True, slots=True)
class Members:
    """Ids and addresses of processes, all different."""

    allowed: str = "id=host:port pairs, separated by commas, each id and each address once"

    def parse(self, text: str) -> tuple[tuple[str, str], ...]:
        members = []
        for member in text.split(","):
            member_id, equals, address = member.strip().partition("=")
            if not equals:
                raise ValueError(text)
            members.append((Identifier().parse(member_id), Address().parse(address)))
        ids, addresses = zip(*members, strict=True)
        if len(set(ids)) < len(ids) or len(set(addresses)) < len(addresses):
            raise ValueError(text)
        return tuple(members)


@dataclass(frozen=True, slots=True)
class RegistryUrl:
    """The URL of a Redis or Valkey server, with the options that redis-py takes for TLS."""

    allowed: str = (
        "redis://[user:password@]host[:port][/database], or rediss:// for TLS, which also takes "
        "?ssl_ca_certs=, ssl_certfile=, ssl_keyfile= and ssl_check_hostname="
    )

    def parse(self, text: str) -> str:
        url = urlsplit(text)
        options = parse_qs(url.query, strict_parsing=True) if url.query else {}
        if (
            not text.isprintable()
            or url.scheme not in ("redis", "rediss")
            or not url.hostname
            or url.port == 0  # raises ValueError beyond 65535
            or url.fragment
            or re.fullmatch(r"(/[0-9]{0,3})?", url.path) is None
            or (options and url.scheme != "rediss")
            or not options.keys() <= _TLS_OPTIONS
        ):
            raise ValueError
        return text


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """The URL of one server, of Sentinels or of a cluster; the engine takes it apart."""

    allowed: str = (
        "redis://[user:password@]host[:port], redis+sentinel://[user:password@]host,.../MASTER"
        " or redis+cluster://[user:password@]host,...; rediss for TLS, which also takes "
        "?ssl_ca_certs=, ssl_certfile=, ssl_keyfile= and ssl_check_hostname="
    )

    def parse(self, text: str) -> str:
        if re.fullmatch(r"rediss?(\+sentinel|\+cluster)?://[!-~]+", text) is None:
            raise ValueError
        return text


_TLS_OPTIONS: Final = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}


@dataclass(frozen=True, slots=True)
class Directory:
    allowed: str = "the path of a directory"

    def parse(self, text: str) -> Path:
        if not text.isprintable():
            raise ValueError(text)
        return Path(text)


@dataclass(frozen=True, slots=True)
class File:
    """Empty where there is none, which a Path cannot be."""

    allowed: str = "the path of a file"

    def parse(self, text: str) -> str:
        if not text.isprintable():
            raise ValueError(text)
        return text


@dataclass(frozen=True, slots=True)
class Text:
    """Any text, for variables that other software defines and checks."""

    allowed: str = "text"

    def parse(self, text: str) -> str:
        return text


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of names and values, for settings of other software."""

    allowed: str = "name=value pairs, separated by commas"

    def parse(self, text: str) -> str:
        split_pairs(text)
        return text


_ADDRESS: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")


def split_address(address: str) -> tuple[str, int]:
    """Host (without brackets) and port of `host:port`; raises ValueError if invalid."""
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match[3]) > 65535:
        raise ValueError(f"not an address: {address!a}")
    return match[1] or match[2], int(match[3])


def split_pairs(text: str) -> dict[str, str]:
    """The values by name of `name=value,name=value`; raises ValueError if invalid."""
    pairs = {}
    for pair in text.split(",") if text else ():
        name, equals, value = pair.strip().partition("=")
        if not name or not equals:
            raise ValueError(f"not a name=value pair: {pair!a}")
        pairs[name] = value
    return pairs


@dataclass(frozen=True, slots=True)
class Variable(Generic[T]):
    """One environment variable, its default and its meaning."""

    name: str
    kind: Kind[T]
    default: T
    doc: str
    secret: bool = False
    """Whether the value holds credentials: it appears in no message."""

    def read(self, environ: Mapping[str, str]) -> T:
        """An empty value counts as unset, because templates render absent values as empty."""
        text = environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.kind.parse(text)
        except ValueError:
            shown = (
                "" if self.secret else "=" + ascii(text if len(text) <= 80 else text[:80] + "...")
            )
            raise SettingsError(f"{self.name}{shown}: must be {self.kind.allowed}") from None
