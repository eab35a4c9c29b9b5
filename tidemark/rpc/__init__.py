"""gRPC as Tidemark uses it: servers, channels, and errors that keep their class over the wire.

Only `topic_codec` uses protos of Tidemark. Modules are imported on first use, so that a client does
not load the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemark.rpc.channel import open_channel, revive, wait_until_serving
    from tidemark.rpc.deadline import remaining_ms
    from tidemark.rpc.server import AddressInUse, RpcServer
    from tidemark.rpc.statuses import from_rpc_error, from_status, to_status

__all__ = [
    "AddressInUse",
    "RpcServer",
    "from_rpc_error",
    "from_status",
    "open_channel",
    "remaining_ms",
    "revive",
    "to_status",
    "wait_until_serving",
]

_MODULES = {
    "AddressInUse": "server",
    "RpcServer": "server",
    "from_rpc_error": "statuses",
    "from_status": "statuses",
    "open_channel": "channel",
    "remaining_ms": "deadline",
    "revive": "channel",
    "to_status": "statuses",
    "wait_until_serving": "channel",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tidemark.rpc' has no attribute {name!r}")
    return getattr(import_module(f"tidemark.rpc.{_MODULES[name]}"), name)
