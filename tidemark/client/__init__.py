"""The client library, for programs that publish and consume.

`tidemark.connect` is the entry point; everything else is reached through the client it returns.
Submodules are imported on first use, so that a short command loads only the modules that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemark.client.client import Client, connect
    from tidemark.client.consume.delivery import Delivery, DeliveryBatch
    from tidemark.client.consume.eviction import Eviction, EvictionReason
    from tidemark.client.consume.pull import PulledBatch
    from tidemark.client.consume.subscription import Subscription
    from tidemark.client.publish.messages import Message, PublishReceipt
    from tidemark.client.publish.publisher import Publisher

__all__ = [
    "Client",
    "Delivery",
    "DeliveryBatch",
    "Eviction",
    "EvictionReason",
    "Message",
    "PublishReceipt",
    "Publisher",
    "PulledBatch",
    "Subscription",
    "connect",
]

_MODULES = {
    "Client": "client",
    "Delivery": "consume.delivery",
    "DeliveryBatch": "consume.delivery",
    "Eviction": "consume.eviction",
    "EvictionReason": "consume.eviction",
    "Message": "publish.messages",
    "PublishReceipt": "publish.messages",
    "Publisher": "publish.publisher",
    "PulledBatch": "consume.pull",
    "Subscription": "consume.subscription",
    "connect": "client",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tidemark.client' has no attribute {name!r}")
    return getattr(import_module(f"tidemark.client.{_MODULES[name]}"), name)
