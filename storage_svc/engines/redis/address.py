"""Where the master of a partition is: one server, behind Sentinels, or in a cluster.

A URL names one of them. Credentials and TLS options in it hold for every server; it is never logged
and is in no error.

    redis://[user:password@]host[:port]                          rediss:// with TLS
    redis+sentinel://[user:password@]host[:port],.../MASTER      rediss+sentinel://
    redis+cluster://[user:password@]host[:port],...              rediss+cluster://

Options follow as a query: those of TLS as redis-py has them (ssl_ca_certs, ssl_certfile, ...), and
`db` unless the servers are a cluster. Others are refused: they would change how answers are read.
"""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, ReadOnlyError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from tidemark.errors import StoreNotFit

CONNECT_TIMEOUT_S: Final = 2.0
FAULTS: Final = (RedisError, OSError, TimeoutError, EOFError)
"""Errors of a connection to a server; errors that it answers with are RedisErrors."""

_SETTING: Final = "TIDEMARK_REDIS_URL"
_NO_LOGIN: Final = ("HELLO must be called with", "Authentication required", "NOAUTH")
_MODES: Final = ("", "sentinel", "cluster")
_OPTIONS: Final = frozenset(
    {
        "db",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_min_version",
        "ssl_password",
    }
)


class ServerNotFound(ConnectionError):
    """No server answered, or none knows the master."""


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A URL, taken apart."""

    scheme: str
    mode: str
    login: str
    """User and password as in the URL, with the @."""
    hosts: tuple[str, ...]
    master: str
    query: str

    @classmethod
    def parse(cls, url: str) -> "ServerUrl":
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise _wrong("must be a URL") from error
        scheme, _, mode = parts.scheme.partition("+")
        if scheme not in ("redis", "rediss") or mode not in _MODES:
            raise _wrong("must begin with redis://, redis+sentinel://, redis+cluster:// or rediss")
        login, _, hosts = parts.netloc.rpartition("@")
        found = tuple(each for each in hosts.split(",") if each)
        if not found or (not mode and len(found) > 1):
            raise _wrong("must name a host, and several only with +sentinel or +cluster")
        master = parts.path.strip("/")
        if (mode == "sentinel") != bool(master) or "/" in master:
            raise _wrong(
                "must name the master after the hosts with +sentinel, and nothing otherwise; "
                "a database is chosen by ?db="
            )
        for name, _ in parse_qsl(parts.query, keep_blank_values=True):
            if name not in _OPTIONS or (name == "db" and mode == "cluster"):
                raise _wrong(f"has the option {name}, which cannot be used here")
        made = cls(scheme, mode, f"{login}@" if login else "", found, master, parts.query)
        try:
            for host in found:
                made.pool(host)
        except Exception as error:
            raise _wrong("has a host, port or option that is wrong") from error
        return made

    def pool(self, host: str, *, login: bool = True) -> ConnectionPool:
        """Makes connections to one host; redis-py's own retries are off."""
        port = "" if ":" in host.rpartition("]")[2] else ":26379" if not login else ":6379"
        query = f"?{self.query}" if self.query else ""
        return ConnectionPool.from_url(
            f"{self.scheme}://{self.login if login else ''}{host}{port}{query}",
            socket_timeout=None,  # redis-py's can swallow a cancellation, by asyncio.wait_for
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
            driver_info=None,  # Redis 7.0 has no CLIENT SETINFO, and no user needs a right for it
        )


class AskedServers:
    """The servers that are asked for masters: those of a URL, and others of their cluster.

    Those that were of no use are asked last. A caller may not have the time for several that hang,
    and one that is cut off from the others goes on naming a master that is gone.
    """

    def __init__(self, url: ServerUrl) -> None:
        self._named = url.hosts
        self._order = list(url.hosts)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._order))

    def ask_last(self, host: str) -> None:
        if host in self._order:
            self._order.remove(host)
            self._order.append(host)

    def doubt_first(self) -> None:
        """The master that it has named cannot be used."""
        self.ask_last(self._order[0])

    def learn(self, cluster: Iterable[str]) -> None:
        """The servers that a cluster has now."""
        servers = list(dict.fromkeys(cluster))
        known = [each for each in self._order if each in self._named or each in servers]
        self._order = [*known, *(each for each in servers if each not in known)]


class MasterFinder:
    """Finds the master of one key again whenever a connection is needed."""

    def __init__(self, url: ServerUrl, key: bytes, asked: AskedServers | None = None) -> None:
        """`asked` is shared by finders for the same servers: what one of them learns, all know."""
        self._url = url
        self._slot = key_slot(key)
        self._asked = AskedServers(url) if asked is None else asked
        self._hint = ""
        """Where a server of a cluster has sent this node."""

    async def connect(self) -> Any:
        """A connection to the master; raises one of FAULTS."""
        if self._hint:
            hint, self._hint = self._hint, ""
            return await _connected(self._url.pool(hint))
        if self._url.mode == "sentinel":
            return await _connected(self._url.pool(await self._ask(self._sentinel_master)))
        if self._url.mode == "cluster":
            return await _connected(self._url.pool(await self._ask(self._slot_master)))
        return await _connected(self._url.pool(self._url.hosts[0]))

    def explained(self, error: BaseException) -> str:
        """Why a server cannot be used, with the setting to change where it is known."""
        text = str(error) or type(error).__name__
        if isinstance(error, ServerNotFound):  # it has the reason of each server
            return text
        if text.startswith(_NO_LOGIN):
            return f"the server requires a password, and {_SETTING} has none"
        hint = self._hint_for(error, text)
        return f"{text} ({hint})" if hint else text

    def _hint_for(self, error: BaseException, text: str) -> str:
        if isinstance(error, AuthenticationError):
            return f"check the user and the password in {_SETTING}"
        if isinstance(error, ReadOnlyError):
            return "" if self._url.mode else f"{_SETTING} must name the master"
        if "cluster support disabled" in text:
            return (
                f"{_SETTING} must begin with redis:// or rediss:// for a server without a cluster"
            )
        if "unknown command 'SENTINEL'" in text:
            return f"{_SETTING} must name Sentinels after redis+sentinel"
        is_ended = isinstance(error, ConnectionError | RedisConnectionError | EOFError)
        if self._url.scheme == "redis" and is_ended and "connecting to" not in text:
            return "servers with TLS end plain connections: they need rediss in the URL"
        return ""

    def moved_to(self, host: str, port: int) -> None:
        self._hint = _address(host, port)

    def doubt(self) -> None:
        """The master that was found cannot be used."""
        self._asked.doubt_first()

    async def _ask(self, question: Any) -> str:
        reasons = []
        for host in self._asked:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    found: str | None = await question(host)
                if found is not None:
                    return found
            except FAULTS as error:
                reasons.append(f"{host}: {self.explained(error)}")
            self._asked.ask_last(host)
        raise ServerNotFound("; ".join(["no server knows the master", *reasons]))

    async def _sentinel_master(self, host: str) -> str | None:
        connection = await _connected(self._url.pool(host, login=False))
        try:
            await connection.send_command("SENTINEL", "get-master-addr-by-name", self._url.master)
            found = await connection.read_response()
        finally:
            await connection.disconnect()
        return None if found is None else ":".join(each.decode() for each in found)

    async def _slot_master(self, host: str) -> str | None:
        connection = await _connected(self._url.pool(host))
        try:
            await connection.send_command("CLUSTER", "SLOTS")
            slots = await connection.read_response()
        finally:
            await connection.disconnect()
        servers: list[str] = []
        found = None
        for first, last, *nodes in slots:
            # One without a name is the server that answers.
            names = [
                _address(each[0].decode() if each[0] else _name(host), each[1]) for each in nodes
            ]
            servers += names
            if first <= self._slot <= last:
                found = names[0]
        self._asked.learn(servers)
        return found


def _name(host: str) -> str:
    """A host without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).strip("[]")


def _address(name: str, port: int) -> str:
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


async def _connected(pool: ConnectionPool) -> Any:
    connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]
    await connection.connect()
    return connection


def _wrong(why: str) -> StoreNotFit:
    """Without the URL, which may hold a password."""
    return StoreNotFit(f"{_SETTING} {why}")
