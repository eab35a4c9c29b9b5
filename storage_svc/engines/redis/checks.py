"""Checks of a server before a partition is opened on it, and its free memory."""

import logging
from enum import Enum
from typing import Any, Final

from redis.exceptions import ResponseError

from storage_svc.engines.engine import Identity
from storage_svc.engines.redis.layout import key_types
from storage_svc.engines.redis.server import Server
from tidemark.errors import DataCorrupt, StoreNotFit

_log = logging.getLogger(__name__)
_CHECK_WITHIN_MS: Final = 5_000


class Durability(Enum):
    """The durability that a commit waits for."""

    LOCAL = "local"
    """The append-only file of the master is synced."""
    REPLICATED = "replicated"
    """Also that of one replica."""
    AS_IS = "as-is"
    """Whatever the server does; a warning is logged."""


async def check_server(server: Server, durability: Durability) -> None:
    """Raise StoreNotFit if the server may lose what is committed, and ConnectionError while it
    has no replica that is needed."""
    memory = await _info(server, b"memory")
    policy = memory.get("maxmemory_policy", "")
    if int(memory.get("maxmemory", 0)) and policy != "noeviction":
        raise StoreNotFit(
            f"the server evicts keys when its memory is full (maxmemory-policy {policy}): "
            "set it to noeviction"
        )
    if durability is Durability.AS_IS:
        _log.warning("the durability of the server is not checked: commits may be lost")
        return
    for name, wanted in ((b"appendonly", b"yes"), (b"appendfsync", b"always")):
        found = await _setting(server, name)
        if found != wanted:
            raise StoreNotFit(
                f"the server has {name.decode()} {found.decode()}, which loses commits that were "
                f"answered: set it to {wanted.decode()}, or the durability to as-is"
            )
    if durability is Durability.REPLICATED:
        await _check_waits(server)
        replication = await _info(server, b"replication")
        if not int(replication.get("connected_slaves", 0)):
            # It may come back: after a failover the former master does.
            raise ConnectionError("the server has no replica: commits could not be replicated")


async def _check_waits(server: Server) -> None:
    """A refused wait would look as if no replica confirmed anything."""
    for command in ((b"WAIT", 0, 0), (b"WAITAOF", 0, 0, 0)):
        try:
            await server.ask(command, within_ms=_CHECK_WITHIN_MS)
        except ResponseError as error:
            raise StoreNotFit(f"the server does not wait for replicas: {error}") from error


async def check_types(server: Server, identity: Identity, where: str) -> None:
    """Raise DataCorrupt if a key of the partition is not what it should be: a commit would stop
    half way."""
    types = key_types(identity)
    found = await server.ask(*((b"TYPE", key) for key in types), within_ms=_CHECK_WITHIN_MS)
    for (key, expected), stored in zip(types.items(), found, strict=True):
        if isinstance(stored, bytes) and stored not in (expected, b"none"):
            raise DataCorrupt(f"{where} has a {stored.decode()} at {key.decode()}")


async def free_memory(server: Server) -> int:
    """Bytes up to the limit of the server, or up to what its machine has."""
    memory = await _info(server, b"memory")
    limit = int(memory.get("maxmemory", 0)) or int(memory.get("total_system_memory", 0))
    return max(0, limit - int(memory.get("used_memory", 0)))


async def server_time_ms(server: Server) -> int:
    """The clock of the server, without the command TIME, which its user may not have."""
    return int((await _info(server, b"server"))["server_time_usec"]) // 1000


async def _info(server: Server, section: bytes) -> dict[str, str]:
    (answer,) = await server.ask((b"INFO", section), within_ms=_CHECK_WITHIN_MS)
    lines = answer.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


async def _setting(server: Server, name: bytes) -> bytes:
    try:
        (answer,) = await server.ask((b"CONFIG", b"GET", name), within_ms=_CHECK_WITHIN_MS)
    except ResponseError as error:
        raise StoreNotFit(
            f"the server does not show its {name.decode()}: allow CONFIG GET to the user, or set "
            "the durability to as-is"
        ) from error
    found: dict[bytes, bytes] = _pairs(answer)
    return found.get(name, b"")


def _pairs(answer: Any) -> dict[bytes, bytes]:
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))
