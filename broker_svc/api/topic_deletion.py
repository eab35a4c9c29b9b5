"""Deletion of a topic: its queues in every partition, then the topic itself.

Not atomic: a deletion that fails halfway has deleted some queues, and can be repeated.
"""

from dataclasses import replace

from broker_svc.api.queue_partitions import QueuePartitions
from broker_svc.components import BrokerComponents
from broker_svc.links.placement import TOPIC_HOME
from tidemark import limits
from tidemark.api.storage.v1 import exchange_pb2, storage_pb2
from tidemark.errors import TopicNotEmpty


class TopicDeletion:
    """Deletes topics."""

    def __init__(
        self,
        components: BrokerComponents,
        partitions: QueuePartitions,
    ) -> None:
        self._components = components
        self._nodes = components.storage_nodes
        self._partitions = partitions

    async def delete(self, name: str, *, force: bool) -> int:
        """Delete a topic; returns the number of its queues.

        Without `force` it raises TopicNotEmpty, before anything is deleted, if a queue has
        messages.
        """
        topic = await self._components.topics.renew(name)
        deleted = 0
        partitions = range(self._components.settings.partitions)
        if not force:  # all of them before the first is deleted
            for number in partitions:
                await self._check_empty(number, name)
        try:
            for number in partitions:
                deleted += await self._delete_queues(number, name, force=force)
            home = await self._nodes.storage(TOPIC_HOME)
            gone = await home.DeleteTopic(storage_pb2.DeleteTopicRequest(name=name))
            await self._components.topics.fan_out(
                replace(topic, version=gone.version), deleted=True
            )
        finally:  # also after half a deletion
            self._components.subscriptions.topic_deleted(name)
        return deleted

    async def _check_empty(self, partition: int, topic: str) -> None:
        pages = storage_pb2.ListQueuesRequest(
            partition=partition, topic=topic, page_size=limits.PAGE_SIZE_MAX
        )
        storage = await self._nodes.storage(partition)
        while True:
            page = await storage.ListQueues(pages)
            full = [queue.lmq_name for queue in page.queues if queue.messages]
            if full:
                raise TopicNotEmpty(
                    f"queue {full[0]} has messages; force deletes them", queue=full[0]
                )
            pages.page_token = page.next_page_token
            if not pages.page_token:
                return

    async def _delete_queues(self, partition: int, topic: str, *, force: bool) -> int:
        """Without `force`, storage refuses a queue that was published to meanwhile."""
        deleted = 0
        storage = await self._nodes.storage(partition)
        while True:
            page = await storage.ListQueues(
                storage_pb2.ListQueuesRequest(
                    partition=partition, topic=topic, page_size=limits.PAGE_SIZE_MAX
                )
            )
            for queue in page.queues:
                remove = exchange_pb2.RemoveQueue(lmq_name=queue.lmq_name, only_empty=not force)
                operation = exchange_pb2.Operation(remove_queue=remove)
                try:
                    await self._partitions.call(partition, operation)
                finally:
                    self._components.tracking.queue_deleted(queue.lmq_name, [partition])
            deleted += len(page.queues)
            if not page.next_page_token:
                return deleted
