"""A pool of channels by address, for processes that get the addresses of peers while they run.

The pool opens a channel on first use and keeps a bounded number, closing the least recently used
first. It makes no calls itself.
"""

from collections import OrderedDict
from types import TracebackType
from typing import Self

import grpc

from tidemark.rpc.channel import open_channel

CHANNELS_MAX = 64


class ChannelPool:
    """An async context manager: leaving it closes all channels."""

    def __init__(self, channels_max: int = CHANNELS_MAX) -> None:
        self._channels: OrderedDict[str, grpc.aio.Channel] = OrderedDict()
        self._channels_max = channels_max

    async def to(self, address: str) -> grpc.aio.Channel:
        """The channel to `host:port`. Use it at once: a later `to` may close it."""
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
        await self.close()

    async def close(self) -> None:
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()
