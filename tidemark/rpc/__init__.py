"""gRPC as Tidemark uses it: servers, channels, and errors that keep their class over the wire.

Services and the client build on what is named here; nothing in this package knows a single proto
of Tidemark's own.
"""

from tidemark.rpc.channel import open_channel, revive, wait_until_serving
from tidemark.rpc.deadline import remaining_ms
from tidemark.rpc.server import AddressInUse, RpcServer
from tidemark.rpc.signals import run_until_stopped
from tidemark.rpc.statuses import from_rpc_error, from_status, to_status

__all__ = [
    "AddressInUse",
    "RpcServer",
    "from_rpc_error",
    "from_status",
    "open_channel",
    "remaining_ms",
    "revive",
    "run_until_stopped",
    "to_status",
    "wait_until_serving",
]
