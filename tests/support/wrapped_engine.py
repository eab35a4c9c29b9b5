"""An engine around another one: passes every call on, so that a subclass changes some of them."""

from collections.abc import Sequence

from storage_svc.engines.engine import Batch, CommitEnded, Engine, Identity, Reader, Row, Table


class WrappedEngine:
    """One open partition."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def identity(self) -> Identity:
        return self._engine.identity

    @property
    def storage_epoch(self) -> int:
        return self._engine.storage_epoch

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._engine.load(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        return await self._engine.scan(table, start, end, limit=limit)

    async def commit(self, batch: Batch) -> None:
        await self._engine.commit(batch)

    def begin_commit(self, batch: Batch, ended: CommitEnded) -> bool:
        return self._engine.begin_commit(batch, ended)

    async def verify(self) -> None:
        await self._engine.verify()

    async def store_after_loss(self, batch: Batch) -> None:
        await self._engine.store_after_loss(batch)

    async def wait_failed(self) -> None:
        await self._engine.wait_failed()

    def reader(self) -> Reader:
        return self._engine.reader()

    async def free_bytes(self) -> int:
        return await self._engine.free_bytes()

    async def close(self) -> None:
        await self._engine.close()
