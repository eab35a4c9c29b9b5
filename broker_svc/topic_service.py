"""The topic API: translates and checks, then asks storage."""

from typing import Any

import grpc

from tidemark.api.broker.v1 import topic_pb2, topic_pb2_grpc
from tidemark.api.storage.v1 import storage_pb2, storage_pb2_grpc
from tidemark.names import validate_topic

Context = grpc.aio.ServicerContext[Any, Any]


class TopicService(topic_pb2_grpc.TopicServiceServicer):
    """Topics, kept by storage."""

    def __init__(self, storage: storage_pb2_grpc.StorageServiceStub) -> None:
        self._storage = storage

    async def CreateTopic(
        self, request: topic_pb2.CreateTopicRequest, context: Context
    ) -> topic_pb2.CreateTopicResponse:
        validate_topic(request.name)
        topic = topic_pb2.Topic(name=request.name, settings=request.settings)
        stored = await self._storage.PutTopic(storage_pb2.PutTopicRequest(topic=topic, create=True))
        return topic_pb2.CreateTopicResponse(topic=stored.topic)

    async def GetTopic(
        self, request: topic_pb2.GetTopicRequest, context: Context
    ) -> topic_pb2.GetTopicResponse:
        validate_topic(request.name)
        found = await self._storage.GetTopic(storage_pb2.GetTopicRequest(name=request.name))
        return topic_pb2.GetTopicResponse(topic=found.topic)
