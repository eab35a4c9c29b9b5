"""What an idle queue costs on the server: the reason for the layout."""

from storage_svc.engines.engine import Identity, Table
from storage_svc.engines.redis.address import ServerUrl
from storage_svc.engines.redis.engine import RedisEngines
from storage_svc.engines.redis.layout import base_key
from storage_svc.operations.publish import Append
from storage_svc.operations.reserve import Reserve
from storage_svc.operations.settle import Settle
from storage_svc.operations.topics import PutTopic
from storage_svc.partition.partition import Partition
from storage_svc.queue.reservation import Ending
from tests.model.redis.conftest import Servers
from tidemark.api.broker.v1.message_pb2 import Message, MessageBatch
from tidemark.clock import ManualClock
from tidemark.topics import Topic

QUEUES = 1_000
IDLE_BYTES_MAX = 350
AGES_BYTES_MAX = 50
BODY = MessageBatch(messages=[Message(payload=b"m" * 100)]).SerializeToString()


async def test_an_idle_queue_costs_little_memory_of_the_server(servers: Servers) -> None:
    """S9: one that has had a message and a group; the index of ages is counted apart."""
    identity = Identity("idle", 0, 1)
    engines = RedisEngines(ServerUrl.parse(servers.url))
    partition = Partition(engines, identity, ManualClock())
    await partition.open()
    await partition.call(PutTopic(Topic("jobs"), create=True))
    names = [f"jobs/{number:010}" for number in range(QUEUES)]

    for at in range(0, QUEUES, 250):
        frame = names[at : at + 250]
        await partition.submit([Append(name, 1, BODY) for name in frame])
        reserved = await partition.submit([Reserve(name, "group", 1) for name in frame])
        receipts = [each.slices[0].receipt for each in reserved if not isinstance(each, Exception)]
        await partition.submit([Settle(receipt, Ending.ACK) for receipt in receipts])

    await partition.close()
    base = base_key(identity).decode()
    used = {
        key.decode().removeprefix(base): servers.redis.memory_usage(key, samples=0)
        for key in servers.redis.keys(base + "*")
    }
    ages = used.pop(f":{Table.AGES}<")
    assert sum(used.values()) / QUEUES <= IDLE_BYTES_MAX, used
    assert ages / QUEUES <= AGES_BYTES_MAX
