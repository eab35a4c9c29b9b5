"""Tidemark: a message-queue cluster for very many, mostly idle queues.

This package is the client library, and the code that the services share. It never imports a
service.

    import tidemark

    async with tidemark.connect("127.0.0.1:7400") as client:
        publisher = await client.publisher("greetings/ada")
        await publisher.publish(b"Hello, Ada!")

`tidemark.sync.connect` is the same for programs without an event loop. All errors are classes of
`tidemark.errors`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemark import errors, sync
    from tidemark.client import (
        Client,
        Delivery,
        DeliveryBatch,
        Eviction,
        EvictionReason,
        Message,
        Publisher,
        PublishReceipt,
        PulledBatch,
        Subscription,
        connect,
    )

__version__ = "0.1.0"

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
    "errors",
    "sync",
]


def __getattr__(name: str) -> Any:
    """Import the client on first use: services do not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'tidemark' has no attribute {name!r}")
    if name in ("errors", "sync"):
        return import_module(f"tidemark.{name}")
    return getattr(import_module("tidemark.client"), name)
