"""The operator's half of the client, over a real broker."""

import pytest

import tidemark
from tidemark.errors import ClientClosed, QueueNotFound, TopicNotFound


async def test_a_client_looks_into_queues_and_changes_them(client: tidemark.Client) -> None:
    """S7: topics, queues and groups, without waking a queue."""
    publisher = await client.publisher("orders/ada")
    await publisher.publish_many([b"1", b"2"])
    await client.pull("orders/ada", group="web")

    queues = [queue async for queue in client.admin.list_queues("orders")]
    stats = await client.admin.get_queue("orders/ada")
    peeked = await client.admin.peek_queue("orders/ada")
    changed = await client.admin.update_topic("orders", {"max_attempts": 3})
    deleted = await client.admin.delete_queue("orders/ada")

    assert [(queue.lmq_name, queue.messages) for queue in queues] == [("orders/ada", 2)]
    assert [group.name for group in stats.groups] == ["web"]
    assert [message.payload for message in peeked] == [b"1", b"2"]
    assert changed.settings.max_attempts == 3
    assert deleted == 2
    with pytest.raises(QueueNotFound):
        await client.admin.get_queue("orders/ada")


async def test_what_is_not_there_is_an_error_with_its_reason(client: tidemark.Client) -> None:
    with pytest.raises(TopicNotFound) as missing:
        await client.admin.get_topic("nothing")

    assert missing.value.reason == "TOPIC_NOT_FOUND"


async def test_a_closed_client_administers_nothing(client: tidemark.Client) -> None:
    await client.close()

    with pytest.raises(ClientClosed):
        _ = client.admin
