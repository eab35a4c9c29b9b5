"""Checks of a server before a partition is opened on it, and its free memory."""

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from redis.exceptions import ReadOnlyError, ResponseError

from storage_svc.engines.engine import Identity
from storage_svc.engines.redis.layout import key_types
from storage_svc.engines.redis.server import Command, Connected, Server
from tidemark.errors import DataCorrupt, StoreNotFit

_log = logging.getLogger(__name__)
_CHECK_WITHIN_MS: Final = 5_000
_VERSION_MIN: Final = 7
"""Of Redis: older servers do not have the commands of the scripts."""
_WANTED: Final = {b"appendonly": b"yes", b"appendfsync": b"always"}


class Durability(Enum):
    """The durability that a commit waits for."""

    LOCAL = "local"
    """The append-only file of the master is synced."""
    REPLICATED = "replicated"
    """Also that of one replica."""
    AS_IS = "as-is"
    """Whatever the server does; a warning is logged."""


async def check_settings(server: Connected, durability: Durability) -> None:
    """Raise StoreNotFit if the settings of a server make it lose what is committed. Every server
    that is connected to is checked: the one that is promoted may have others."""
    asked = [(b"INFO", b"server"), (b"INFO", b"replication"), *memory_questions(durability)]
    about, replication, *memory = await server.converse(asked)
    for answer in (about, replication):
        if isinstance(answer, Exception):
            raise answer
    _check_version(_pairs_of_info(about))
    if _pairs_of_info(replication).get("role") == "slave":
        # Most refuse writes themselves. Those of others are gone with the next synchronization.
        raise ReadOnlyError("the server is a replica")
    free_memory(memory)


def memory_questions(durability: Durability) -> list[Command]:
    """The questions whose answers `free_memory` takes."""
    asked: list[Command] = [(b"INFO", b"memory")]
    if durability is not Durability.AS_IS:
        asked.append((b"CONFIG", b"GET", *_WANTED))
    return asked


def free_memory(answers: Sequence[Any]) -> int:
    """Bytes up to the limit of the server, or up to what its machine has; raises StoreNotFit if its
    settings make it lose what is committed."""
    info, *settings = answers
    if isinstance(info, Exception):
        raise info
    memory = _pairs_of_info(info)
    _check_eviction(memory)
    for found in settings:
        _check_syncs(found)
    limit = int(memory.get("maxmemory", 0)) or int(memory.get("total_system_memory", 0))
    return max(0, limit - int(memory.get("used_memory", 0)))


def _check_version(about: dict[str, str]) -> None:
    """Valkey names the version of Redis that it is compatible with."""
    version = about.get("redis_version", "")
    major = version.partition(".")[0]
    if major.isdecimal() and int(major) < _VERSION_MIN:
        raise StoreNotFit(
            f"the server is compatible with Redis {version}: its version must be "
            f"{_VERSION_MIN}.0 or newer"
        )


def _check_eviction(memory: dict[str, str]) -> None:
    policy = memory.get("maxmemory_policy", "")
    if int(memory.get("maxmemory", 0)) and policy != "noeviction":
        raise StoreNotFit(
            f"the server evicts keys when its memory is full (maxmemory-policy {policy}): "
            "set it to noeviction"
        )


def _check_syncs(answer: Any) -> None:
    if isinstance(answer, ResponseError):
        raise StoreNotFit(
            "the server does not show its appendonly: allow CONFIG GET to the user, or set "
            "the durability to as-is"
        ) from answer
    if isinstance(answer, Exception):
        raise answer
    settings = _pairs(answer)
    for name, wanted in _WANTED.items():
        found = settings.get(name, b"")
        if found != wanted:
            raise StoreNotFit(
                f"the server has {name.decode()} {found.decode()}, which loses commits that were "
                f"answered: set it to {wanted.decode()}, or the durability to as-is"
            )


async def check_server(server: Server, durability: Durability) -> None:
    """Raise what `check_settings` does, StoreNotFit if the server does not wait for replicas, and
    ConnectionError while it has no replica that is needed."""
    replication = await _info(server, b"replication")  # it is checked when it is connected to
    policy = (await _info(server, b"memory")).get("maxmemory_policy", "noeviction")
    if policy != "noeviction":  # without a limit, or it would have been refused
        _log.warning(
            "the server would evict keys if its maxmemory were set: set maxmemory-policy to "
            "noeviction",
            extra={"maxmemory_policy": policy},
        )
    if durability is Durability.AS_IS:
        _log.warning("the durability of the server is not checked: commits may be lost")
    if durability is Durability.REPLICATED:
        await _check_waits(server)
        replicas = int(replication.get("connected_slaves", 0))
        if not replicas:
            # It may come back: after a failover the former master does.
            raise ConnectionError("the server has no replica: commits could not be replicated")
        if replicas > 1:
            _log.warning(
                "a commit waits for one replica: another one that is promoted may lack it",
                extra={"replicas": replicas},
            )


async def _check_waits(server: Server) -> None:
    """A refused wait would look as if no replica confirmed anything."""
    for command in ((b"WAIT", 0, 0), (b"WAITAOF", 0, 0, 0)):
        try:
            await server.ask(command, within_ms=_CHECK_WITHIN_MS)
        except ResponseError as error:
            raise StoreNotFit(f"the server does not wait for replicas: {error}") from error


def explained(refusal: Exception) -> str:
    """Why a server refuses writes, with its setting; MISCONF names its own."""
    text = str(refusal)
    return f"{text} (min-replicas-to-write)" if text.startswith("NOREPLICAS") else text


async def check_types(server: Server, identity: Identity, where: str) -> None:
    """Raise DataCorrupt if a key of the partition is not what it should be: a commit would stop
    half way."""
    types = key_types(identity)
    found = await server.ask(*((b"TYPE", key) for key in types), within_ms=_CHECK_WITHIN_MS)
    for (key, expected), stored in zip(types.items(), found, strict=True):
        if isinstance(stored, bytes) and stored not in (expected, b"none"):
            raise DataCorrupt(f"{where} has a {stored.decode()} at {key.decode()}")


async def server_time_ms(server: Server) -> int:
    """The clock of the server, without the command TIME, which its user may not have."""
    return int((await _info(server, b"server"))["server_time_usec"]) // 1000


async def _info(server: Server, section: bytes) -> dict[str, str]:
    (answer,) = await server.ask((b"INFO", section), within_ms=_CHECK_WITHIN_MS)
    return _pairs_of_info(answer)


def _pairs_of_info(answer: bytes) -> dict[str, str]:
    lines = answer.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _pairs(answer: Any) -> dict[bytes, bytes]:
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))
