"""The client side of Tidemark: what programs that publish and consume import.

`tidemark.connect` is the door; everything else follows from what it returns.
"""

from tidemark.client.client import Client, connect
from tidemark.client.delivery import Delivery, DeliveryBatch
from tidemark.client.messages import Message, PublishReceipt
from tidemark.client.publisher import Publisher
from tidemark.client.pulling import PulledBatch
from tidemark.client.subscription import Eviction, Subscription

__all__ = [
    "Client",
    "Delivery",
    "DeliveryBatch",
    "Eviction",
    "Message",
    "PublishReceipt",
    "Publisher",
    "PulledBatch",
    "Subscription",
    "connect",
]
