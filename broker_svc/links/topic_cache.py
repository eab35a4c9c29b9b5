"""Topics as this broker knows them: read once, and again when storage reports a newer version.

Unknown topics are read from their home partition; a partition that lacks a version gets it from
here. Names that do not exist are not cached. A change counts once its home has stored it. A
partition that cannot be reached then catches up when its link is up again, also after a restart of
the broker: every partition is compared with the home whenever its link comes up.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from broker_svc.links.holders import Holders
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.placement import TOPIC_HOME
from broker_svc.links.storage_nodes import StorageNodes
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2
from tidemark.clock import Clock
from tidemark.errors import TidemarkError, TopicNotFound
from tidemark.limits import PAGE_SIZE_MAX
from tidemark.rpc.topic_codec import topic_from_proto, topic_to_proto
from tidemark.topics import Topic

_RETRY_MS_MIN = 500
_RETRY_MS_MAX = 10_000

_log = logging.getLogger(__name__)


class TopicCache:
    """The topics that were used. There is no bound: all topics of a cluster fit in memory."""

    def __init__(
        self,
        nodes: StorageNodes,
        links: Mapping[int, PartitionLink],
        holders: Holders,
        clock: Clock,
    ) -> None:
        self._nodes = nodes
        self._links = links
        self._holders = holders
        self._clock = clock
        self._retries: dict[int, asyncio.Task[None]] = {}
        self._topics: dict[str, Topic] = {}
        self._behind: set[int] = set()
        """Partitions that are to be compared with the home."""
        self._catching_up: asyncio.Task[None] | None = None

    def known(self, name: str) -> Topic | None:
        return self._topics.get(name)

    async def get(self, name: str) -> Topic:
        """The cached topic, or else that of the home partition; raises TopicNotFound."""
        topic = self._topics.get(name)
        return topic if topic is not None else await self.renew(name)

    async def renew(self, name: str) -> Topic:
        """Read the topic from its home partition; raises TopicNotFound."""
        self._topics.pop(name, None)
        found = await (await self._nodes.storage(TOPIC_HOME)).GetTopic(
            storage_pb2.GetTopicRequest(partition=TOPIC_HOME, name=name)
        )
        topic = self._topics[name] = topic_from_proto(found.topic)
        return topic

    async def fan_out(self, topic: Topic, *, deleted: bool = False) -> None:
        """Bring a version to every partition, and cache it.

        Its home has it: a partition that cannot be reached gets it later.
        """
        if deleted:
            self._topics.pop(topic.name, None)
        else:
            self._topics[topic.name] = topic
        await asyncio.gather(
            *(self._bring_now_or_later(number, topic, deleted) for number in self._links)
        )

    def learned(self, topic: Topic, *, deleted: bool) -> bool:
        """Another broker has changed a topic; returns whether that is news here."""
        known = self._topics.get(topic.name)
        if known is not None and known.version >= topic.version:
            return False
        if deleted:
            self._topics.pop(topic.name, None)
        else:
            self._topics[topic.name] = topic
        return True

    async def _bring_now_or_later(self, partition: int, topic: Topic, deleted: bool) -> None:
        try:
            await self.bring(partition, topic, deleted=deleted)
        except TidemarkError as error:
            if self._holders.address(partition) and partition not in self._retries:
                # Its broker may not notice; that of this broker does when its link is up again.
                retry = asyncio.create_task(self._compare_later(partition))
                self._retries[partition] = retry
                retry.add_done_callback(lambda _: self._retries.pop(partition, None))
            _log.warning(
                "a topic change reaches a partition later",
                extra={"partition": partition, "topic": topic.name, "reason": error.reason},
            )

    async def bring(self, partition: int, topic: Topic, *, deleted: bool = False) -> None:
        """Bring a version to one partition, which ignores it if it has a newer one."""
        apply_topic = exchange_pb2.ApplyTopic(topic=topic_to_proto(topic), deleted=deleted)
        await self._holders.call(partition, exchange_pb2.Operation(apply_topic=apply_topic))

    # --- partitions that were away -------------------------------------------------------------

    def link_up(self, partition: int) -> None:
        """Compare the partition with the home, and bring it what it lacks."""
        if partition != TOPIC_HOME:
            self._behind.add(partition)
        if self._behind and (self._catching_up is None or self._catching_up.done()):
            self._catching_up = asyncio.create_task(self._catch_up())

    async def _catch_up(self) -> None:
        """Stops if the home cannot be read: its link coming up starts it again."""
        try:
            while self._behind:
                stored = await self._list(TOPIC_HOME)
                behind, self._behind = self._behind, set()
                for partition in behind:
                    await self._bring_missing(partition, stored)
        except TidemarkError as error:
            _log.info("topics could not be compared", extra={"reason": error.reason})

    async def _compare_later(self, partition: int) -> None:
        """Until the broker that holds the partition has what it lacks."""
        wait_ms = _RETRY_MS_MIN
        while True:
            await self._clock.sleep_ms(wait_ms)
            wait_ms = min(2 * wait_ms, _RETRY_MS_MAX)
            with suppress(TidemarkError):
                if not await self._missing(partition, await self._list(TOPIC_HOME)):
                    return
                await self._bring_missing(partition, await self._list(TOPIC_HOME))

    async def _missing(self, partition: int, stored: Mapping[str, Topic]) -> bool:
        found = await self._list(partition)
        return {k: v.version for k, v in found.items()} != {k: v.version for k, v in stored.items()}

    async def _bring_missing(self, partition: int, stored: Mapping[str, Topic]) -> None:
        """A partition whose link breaks meanwhile is compared when it is up again."""
        try:
            found = await self._list(partition)
        except TidemarkError:
            return
        for topic in stored.values():
            if topic.name not in found or found[topic.name].version < topic.version:
                await self._bring_now_or_later(partition, topic, deleted=False)
        for name in found.keys() - stored.keys():
            try:
                await self._bring_now_or_later(partition, await self.renew(name), deleted=False)
            except TopicNotFound as gone:
                version = int(gone.metadata.get("version", found[name].version + 1))
                deleted = replace(found[name], version=version)
                await self._bring_now_or_later(partition, deleted, deleted=True)

    async def _list(self, partition: int) -> dict[str, Topic]:
        topics: dict[str, Topic] = {}
        storage = await self._nodes.storage(partition)
        request = storage_pb2.ListTopicsRequest(partition=partition, page_size=PAGE_SIZE_MAX)
        while True:
            page = await storage.ListTopics(request)
            topics.update((each.name, topic_from_proto(each)) for each in page.topics)
            if not page.next_page_token:
                return topics
            request.page_token = page.next_page_token
