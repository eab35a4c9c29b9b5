"""Wires the broker together: the only place that constructs its parts."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from broker_svc.partition_link import PartitionLink
from broker_svc.service import BrokerService
from broker_svc.topic_service import TopicService
from tidemark.api.broker.v1.broker_pb2_grpc import add_BrokerServiceServicer_to_server
from tidemark.api.broker.v1.topic_pb2_grpc import add_TopicServiceServicer_to_server
from tidemark.api.storage.v1.storage_pb2_grpc import StorageServiceStub
from tidemark.clock import Clock
from tidemark.rpc.channel import open_channel
from tidemark.rpc.server import RpcServer
from tidemark.settings import BrokerSettings

_log = logging.getLogger(__name__)
_BROKER_SERVICE = "tidemark.api.broker.v1.BrokerService"


@asynccontextmanager
async def broker(settings: BrokerSettings, clock: Clock) -> AsyncIterator[RpcServer]:
    """A broker that listens, and serves once it has claimed its partitions."""
    server = RpcServer(settings.listen, clock=clock)
    async with open_channel(settings.storage_address) as channel:
        storage = StorageServiceStub(channel)
        links = [
            PartitionLink(number, settings, storage, clock) for number in range(settings.partitions)
        ]
        server.add(add_BrokerServiceServicer_to_server, BrokerService(links, clock))
        server.add(add_TopicServiceServicer_to_server, TopicService(storage))
        server.set_serving(_BROKER_SERVICE, False)
        tasks = [asyncio.create_task(link.run()) for link in links]
        tasks.append(asyncio.create_task(_report_health(server, links)))
        try:
            await server.start()
            _log.info("broker listens", extra={"address": server.address})
            yield server
        finally:
            await server.stop(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _report_health(server: RpcServer, links: list[PartitionLink]) -> None:
    """Healthy from the moment at which every partition was claimed; links mend by themselves."""
    await asyncio.gather(*(link.connected.wait() for link in links))
    server.set_serving(_BROKER_SERVICE, True)
    _log.info("broker serves", extra={"partitions": len(links)})
