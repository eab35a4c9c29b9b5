"""Keepalive: how a channel or server notices that its peer has vanished or hangs.

A peer that does not answer a ping within `KEEPALIVE_TIMEOUT_MS` is given up, and its calls end with
UNAVAILABLE: within 4.5 s of the fault, also on an idle connection.
"""

from typing import Final

KEEPALIVE_TIME_MS: Final = 2_000
KEEPALIVE_TIMEOUT_MS: Final = 2_500

KEEPALIVE: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # gRPC gives a ping a minute by default, whatever the keepalive timeout is.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
