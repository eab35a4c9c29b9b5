"""Channels by address, for those who talk to many peers or are told addresses while they run.

A pool opens a channel when it is first asked for one and keeps a bounded number of them; the one
that was not used for longest is closed first. It never calls anybody itself.
"""

from collections import OrderedDict
from types import TracebackType
from typing import Self

import grpc

from tidemark.rpc.channel import open_channel

CHANNELS_MAX = 64


class ChannelPool:
    """Use as an async context manager: leaving it closes all channels."""

    def __init__(self, channels_max: int = CHANNELS_MAX) -> None:
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._channels_max = channels_max

    async def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`. Use it now: the next call may close it."""
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        self._channels.move_to_end(address)
        while len(self._channels) > self._channels_max:
            _, oldest = self._channels.popitem(last=False)
            await oldest.close()
        return channel

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
