"""The engine on Redis or Valkey: partitions that any storage node can take over.

`layout.py` has the keys and their cost, `scripts.py` what runs on the server, `address.py` and
`server.py` the way to it. This module owns the promises: a commit is applied on top of the mark
that this node has seen last, or not at all; a request whose answer was lost is sent again; and
a commit returns once the server is as durable as the settings demand.

*Large commits.* The server does nothing else while it runs a script. A commit that would hold it
for long is staged piece by piece, sealed, which is when it counts, and applied piece by piece. A
node that opens the partition in between applies the rest before it reads anything.

*One writer.* Opening raises the storage epoch. Everything that a node commits or verifies names its
epoch, so that a node which another has deposed writes nothing and confirms nothing. It opens the
partition again only if it is the later of the two: the store had lost its opening.

*Lost tails.* A server that fails over to a lagging replica forgets commits that it had confirmed.
The node that made them notices, because the mark went back, and raises EngineDataLost. A node that
opens the partition later cannot know.

*Former masters.* A master that stood still while its replica was promoted answers until it learns
of it. Reads name the sequence that they must not be behind; with `replicated`, a replica confirms
what verifies as well as what is committed. One that is a replica, and knows it, confirms nothing.
"""

import asyncio
import random
from collections.abc import Sequence
from functools import partial
from typing import Final

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from storage_svc.engines.engine import (
    Batch,
    CommitEnded,
    EngineClosed,
    EngineDataLost,
    EngineFailed,
    EngineFenced,
    Identity,
    Row,
    Table,
)
from storage_svc.engines.identity import (
    IDENTITY_KEY,
    check_identity,
    identity_value,
    read_partitions,
)
from storage_svc.engines.keys import successor, u64
from storage_svc.engines.marks import Fate, Mark, fate_of
from storage_svc.engines.paged_reader import PagedReader
from storage_svc.engines.redis.address import AskedServers, MasterFinder, ServerUrl
from storage_svc.engines.redis.checks import (
    Durability,
    check_server,
    check_settings,
    check_types,
    explained,
    free_memory,
    memory_questions,
    server_time_ms,
)
from storage_svc.engines.redis.layout import (
    LAYOUT_VERSION,
    Argument,
    Piece,
    base_key,
    declared_keys,
    mark_key,
    staged_key,
    write_pieces,
)
from storage_svc.engines.redis.reads import BYTES_PER_PAGE_MAX, Reads
from storage_svc.engines.redis.scripts import (
    COMMIT,
    MARK,
    OPEN,
    PIECES_GONE,
    SEAL,
    STAGE,
    STORE_AFTER_LOSS,
    UNAPPLIED,
    VERIFY,
    Script,
)
from storage_svc.engines.redis.server import AnswerLost, Command, Server, is_moved_away
from storage_svc.engines.redis.staging import apply_staged
from tidemark.clock import SystemClock
from tidemark.errors import CommitOutcomeUnknown, DataCorrupt, FormatNotSupported, StoreNotFit

COMMIT_WITHIN_MS: Final = 15_000
"""After which the outcome of a commit is unknown: a cluster promotes a replica within that."""
_LOOK_WITHIN_MS: Final = 5_000
"""Commits wait meanwhile."""
_RETRY_MS: Final = 50
_WAIT_MS: Final = 1_500
_WAIT: Final = (b"WAIT", 1, _WAIT_MS)
"""Until a replica has received the last write of the connection."""
_WAIT_AOF: Final = (_WAIT, (b"WAITAOF", 1, 1, _WAIT_MS))
"""Until it has also synced it. WAITAOF alone would take a second: a replica that is asked together
with the write answers before it has synced, and is then not asked again."""
_CLOCK = SystemClock()


class RedisEngines:
    """Opens partitions on the servers that a URL names."""

    def __init__(self, url: ServerUrl, durability: Durability = Durability.LOCAL) -> None:
        self.durability = durability
        self._url = url
        self._asked = AskedServers(url)
        self._epochs: dict[int, int] = {}
        """Under which this node has opened partitions last."""
        self._generations: dict[int, int] = {}
        """Which of the nodes that opened a partition this one is. If the store loses the opening of
        a node, the one before may open it again; the later one takes it back then."""
        self._openings: dict[int, bytes] = {}
        """Ids of openings that were not answered: they may have been made."""

    async def open(self, identity: Identity) -> "RedisEngine":
        where = f"partition {identity.partition} on its server"
        server = self._server(identity)
        try:
            await check_server(server, self.durability)
            await check_types(server, identity, where)
            mark = await self._take_over(server, identity, where)
            await apply_staged(server, identity, mark, COMMIT_WITHIN_MS)
        except AnswerLost as error:
            await server.close()
            raise ConnectionError(f"{where} cannot be reached: {error}") from error
        except NoPermissionError as error:
            await server.close()
            raise StoreNotFit(f"{where} cannot be opened by this user: {error}") from error
        except ResponseError as error:  # it may pass: a full disk, missing replicas
            await server.close()
            raise ConnectionError(f"{where} cannot be opened: {explained(error)}") from error
        except BaseException:
            await server.close()
            raise
        self._epochs[identity.partition] = mark.epoch
        generation = self._generations[identity.partition]
        reader = self._reader(identity)
        return RedisEngine(identity, mark, generation, server, reader, self.durability)

    async def stored_partitions(self, cluster_id: str, expected: int = 0) -> int:
        """The number of partitions of a cluster, as its first one has it; 0 for a new cluster.

        Raises ClusterMismatch if it is not the expected one, unless that is 0.
        """
        first = Identity(cluster_id, 0, 0)
        server = self._reader(first)
        try:
            (stored,) = await server.ask(
                (b"HGET", base_key(first) + b":" + Table.META.encode(), IDENTITY_KEY),
                within_ms=COMMIT_WITHIN_MS,
            )
        except AnswerLost as error:
            raise ConnectionError(f"the server cannot be reached: {error}") from error
        finally:
            await server.close()
        return 0 if stored is None else read_partitions("partition 0", stored, cluster_id, expected)

    async def time_ms(self, cluster_id: str) -> int:
        """The clock of the server of the first partition; raises ConnectionError."""
        server = self._reader(Identity(cluster_id, 0, 0))
        try:
            return await server_time_ms(server)
        except (AnswerLost, RedisError, KeyError) as error:
            raise ConnectionError(f"the server cannot be reached: {error}") from error
        finally:
            await server.close()

    def _server(self, identity: Identity) -> Server:
        check = partial(check_settings, durability=self.durability)
        return Server(self._finder(identity), check)

    def _reader(self, identity: Identity) -> Server:
        return Server(self._finder(identity))

    def _finder(self, identity: Identity) -> MasterFinder:
        return MasterFinder(self._url, mark_key(identity), self._asked)

    async def _take_over(self, server: Server, identity: Identity, where: str) -> Mark:
        meta = base_key(identity) + b":" + Table.META.encode()
        opening = self._openings.setdefault(identity.partition, u64(random.getrandbits(64)))
        answer, *waited = await server.run(
            OPEN,
            (mark_key(identity), meta, staged_key(identity)),
            meta,
            identity_value(identity),
            self._epochs.get(identity.partition, 0),
            opening,
            LAYOUT_VERSION,
            self._generations.get(identity.partition, 0),
            _CLOCK.wall_ms(),
            then=_WAIT_AOF if self.durability is Durability.REPLICATED else (),
            within_ms=COMMIT_WITHIN_MS,
        )
        outcome, *rest = answer
        if outcome == b"FENCED":
            raise EngineFenced(f"{where} is open elsewhere")
        if outcome == b"LAYOUT":
            raise FormatNotSupported(
                f"{where} has layout {int(rest[0])} of the redis engine, "
                f"this version reads {LAYOUT_VERSION}"
            )
        if outcome == b"FOREIGN":
            check_identity(where, rest[0], identity)
        if outcome != b"OPEN":
            raise DataCorrupt(f"{where} has lost its identity")
        if waited and not _is_replicated(waited[-1]):
            raise ConnectionError(f"{where} is not replicated")
        epoch, sequence, commit_id, generation = rest
        self._generations[identity.partition] = int(generation)
        del self._openings[identity.partition]
        return Mark(int(epoch), opening, int(sequence), commit_id)


class RedisEngine:
    """One partition, open under one epoch."""

    def __init__(
        self,
        identity: Identity,
        mark: Mark,
        generation: int,
        writes: Server,
        reads: Server,
        durability: Durability,
    ) -> None:
        self._identity = identity
        self._mark = mark
        self._generation = generation
        self._mark_key = mark_key(identity)
        self._sent: Mark | None = None
        """The mark of the commit that is under way: it may be stored already."""
        self._base = base_key(identity) + b":"
        self._writes = writes
        self._read_server = reads
        self._reads = Reads(
            reads,
            self._mark_key,
            base_key(identity),
            lambda: self._mark.sequence,
            lambda: self._sent is not None,
            self._apply_rest,
        )
        self._durability = durability
        self._order = asyncio.Lock()
        self._commits: set[asyncio.Future[None]] = set()
        self._failed = asyncio.Event()
        self._fault: BaseException | None = None
        self._closed = False

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def storage_epoch(self) -> int:
        return self._mark.epoch

    # --- reads ---------------------------------------------------------------------------------

    async def load(self, table: Table, keys: Sequence[bytes]) -> list[bytes | None]:
        self._check_open()
        return await self._reads.load(table, keys)

    async def scan(self, table: Table, start: bytes, end: bytes | None, *, limit: int) -> list[Row]:
        rows: list[Row] = []
        while len(rows) < limit:
            left = limit - len(rows)
            page, is_last = await self._page(table, start, end, left, BYTES_PER_PAGE_MAX)
            rows += page
            if is_last:
                break
            start = successor(page[-1][0])
        return rows

    async def page(
        self, table: Table, start: bytes, end: bytes | None, rows_max: int, bytes_max: int
    ) -> list[Row]:
        page, _ = await self._page(table, start, end, rows_max, bytes_max)
        return page

    async def _page(
        self, table: Table, start: bytes, end: bytes | None, rows_max: int, bytes_max: int
    ) -> tuple[list[Row], bool]:
        self._check_open()
        if end is not None and end <= start:
            return [], True
        return await self._reads.page(table, start, end, rows_max, bytes_max)

    def reader(self) -> PagedReader:
        self._check_open()
        return PagedReader(self)

    # --- commits -------------------------------------------------------------------------------

    async def commit(self, batch: Batch) -> None:
        self._check_open()
        if batch:
            committing = asyncio.ensure_future(self._commit_in_order(write_pieces(batch)))
            self._commits.add(committing)
            committing.add_done_callback(self._commits.discard)
            await asyncio.shield(committing)  # a caller that is cancelled leaves it to its fate

    def begin_commit(self, batch: Batch, ended: CommitEnded) -> bool:
        return False  # partitions share no sync here

    async def verify(self) -> None:
        self._check_open()
        if self._failed.is_set():
            raise self._later_fault(EngineFailed(f"{self._name} must be opened again"))
        deadline_ms = _CLOCK.monotonic_ms() + COMMIT_WITHIN_MS
        asked = self._mark
        while True:
            try:
                stored, confirmed = await self._stored_mark(asked)
            except AnswerLost as error:
                why = str(error)
            except StoreNotFit as error:
                self._fail(error)
                raise EngineFailed(f"{self._name} cannot be verified: {error}") from error
            except RedisError as error:
                raise EngineFailed(
                    f"{self._name} cannot be verified: {explained(error)}"
                ) from error
            else:
                if stored == asked and confirmed:
                    return
                if stored != asked and stored not in (self._mark, self._sent):
                    self._fail(fault := self._fault_of(stored))
                    raise fault
                asked, why = stored, "no replica confirms it"
            if _CLOCK.monotonic_ms() >= deadline_ms:
                raise EngineFailed(f"{self._name} cannot be verified: {why}")
            await _CLOCK.sleep_ms(_RETRY_MS)

    async def store_after_loss(self, batch: Batch) -> None:
        self._check_open()
        (piece,) = write_pieces(batch)
        deadline_ms = _CLOCK.monotonic_ms() + _LOOK_WITHIN_MS
        while True:
            try:
                is_open_elsewhere, *waited = await self._writes.run(
                    STORE_AFTER_LOSS,
                    declared_keys(self._mark_key, self._base, piece.tables),
                    self._mark.epoch,
                    self._mark.opening,
                    self._mark.sequence,
                    self._generation,
                    self._base + Table.META.encode(),
                    identity_value(self._identity),
                    self._base,
                    *piece.steps,
                    then=_WAIT_AOF if self._durability is Durability.REPLICATED else (),
                    within_ms=_LOOK_WITHIN_MS,
                )
            except AnswerLost as error:
                why = str(error)
            else:
                if is_open_elsewhere:
                    raise EngineFenced(f"{self._name} is open elsewhere")
                if not waited or _is_replicated(waited[-1]):
                    return
                why = "no replica has it"
            if _CLOCK.monotonic_ms() >= deadline_ms:
                raise EngineFailed(f"{self._name} cannot be written: {why}")
            await _CLOCK.sleep_ms(_RETRY_MS)

    async def wait_failed(self) -> None:
        await self._failed.wait()

    async def free_bytes(self) -> int:
        """Notices as well that another node has opened the partition, or that the server has lost
        commits or was given other settings, where nothing is committed that would."""
        self._check_open()
        asked = self._mark
        try:
            answer, *memory = await self._writes.run(
                MARK,
                (self._mark_key,),
                then=memory_questions(self._durability),
                within_ms=_LOOK_WITHIN_MS,
            )
            free_bytes = free_memory(memory)
        except StoreNotFit as error:  # of this server, or of another one that has its place
            self._fail(error)
            raise EngineFailed(f"{self._name} cannot be used: {error}") from error
        except (AnswerLost, RedisError) as error:
            raise EngineFailed(f"{self._name} cannot be reached: {error}") from error
        if (stored := _read_mark(answer)) not in (asked, self._mark, self._sent):
            self._fail(fault := self._fault_of(stored))
            raise fault
        return free_bytes

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._commits:
            await asyncio.wait(list(self._commits))
        await self._reads.close()
        await self._writes.close()
        await self._read_server.close()

    # --- inside --------------------------------------------------------------------------------

    async def _stored_mark(self, asked: Mark) -> tuple[Mark, bool]:
        """The mark as the server has it, and whether that is as sure as a commit would be."""
        if self._durability is not Durability.REPLICATED:
            (answer,) = await self._writes.run(MARK, (self._mark_key,), within_ms=COMMIT_WITHIN_MS)
            return _read_mark(answer), True
        answer, waited = await self._writes.run(
            VERIFY, (self._mark_key,), *asked, then=[_WAIT], within_ms=COMMIT_WITHIN_MS
        )
        return _read_mark(answer), isinstance(waited, int) and waited >= 1

    def _fault_of(self, stored: Mark) -> Exception:
        """Why the mark is not the one that this node has left."""
        if stored.epoch > self._mark.epoch:
            return EngineFenced(f"{self._name} is open elsewhere")
        return EngineDataLost(f"{self._name} has lost its last commits")

    async def _commit_in_order(self, pieces: list[Piece]) -> None:
        async with self._order:
            if self._failed.is_set():
                raise self._later_fault(CommitOutcomeUnknown(f"{self._name} must be opened again"))
            sequence = self._mark.sequence + 1
            # The opening makes the id unlike that of any other commit with this number.
            commit_id = self._mark.opening + u64(sequence)
            self._sent = self._mark._replace(sequence=sequence, commit_id=commit_id)
            try:
                if len(pieces) == 1 and not pieces[0].is_range:
                    keys = declared_keys(self._mark_key, self._base, pieces[0].tables)
                    await self._send(self._sent, COMMIT, keys, *pieces[0].steps)
                else:
                    await self._send_staged(self._sent, [each.packed() for each in pieces])
            except BaseException as error:
                self._fail(error)
                raise
            self._mark, self._sent = self._sent, None

    async def _send_staged(self, commit: Mark, pieces: list[bytes]) -> None:
        keys = [self._mark_key, staged_key(self._identity)]
        while await self._stage(commit, keys, pieces) or await self._send(
            commit, SEAL, keys, len(pieces)
        ):
            pass  # a failover has lost pieces: all of them are staged again
        try:  # it is committed: a node that opens the partition now applies it
            await apply_staged(self._writes, self._identity, commit, COMMIT_WITHIN_MS)
        except (AnswerLost, EngineFailed, StoreNotFit) as error:
            raise CommitOutcomeUnknown(f"{self._name} did not apply a commit: {error}") from error

    async def _apply_rest(self) -> None:
        """Apply what is left of the last commit, which has been applied before: a server that was
        promoted has the commit, and lacks that."""
        try:
            await apply_staged(self._writes, self._identity, self._mark, COMMIT_WITHIN_MS)
        except (AnswerLost, StoreNotFit) as error:
            raise EngineFailed(f"{self._name} could not apply a commit again: {error}") from error

    async def _stage(self, commit: Mark, keys: list[bytes], pieces: list[bytes]) -> bool:
        """Returns whether pieces were lost."""
        for number, piece in enumerate(pieces):
            if await self._send(commit, STAGE, keys, number, piece):
                return True
        return False

    async def _send(
        self, commit: Mark, script: Script, keys: list[bytes], *arguments: Argument
    ) -> bool:
        """Run a script of a commit, again while answers are lost; returns whether it found that
        pieces of the commit are lost."""
        deadline_ms = _CLOCK.monotonic_ms() + COMMIT_WITHIN_MS
        asked = (*self._mark, commit.sequence, commit.commit_id, self._base, *arguments)
        commits = script is not STAGE
        replicated = commits and self._durability is Durability.REPLICATED
        then: Sequence[Command] = _WAIT_AOF if replicated else ()
        why = ""
        while _CLOCK.monotonic_ms() < deadline_ms:
            is_first = not why
            try:
                answer, *waited = await self._writes.run(
                    script, keys, *asked, then=then, within_ms=COMMIT_WITHIN_MS
                )
            except AnswerLost as error:
                why = str(error)
                await _CLOCK.sleep_ms(_RETRY_MS)
                continue
            except StoreNotFit as error:  # another server has its place
                why = str(error)
                if not is_first:
                    break
                raise EngineFailed(f"{self._name} cannot be written: {error}") from error
            except RedisError as error:
                why = str(error)
                if is_moved_away(error):  # all of it can be done again
                    await _CLOCK.sleep_ms(_RETRY_MS)
                    continue
                # A script keeps what it wrote before, and one that was sent before may have run.
                if _is_from_script(error) or not is_first:
                    break
                raise EngineFailed(f"{self._name} cannot be written: {explained(error)}") from error
            if answer == PIECES_GONE:
                return True
            if answer == UNAPPLIED:
                try:
                    await self._apply_rest()
                except EngineFailed as error:
                    why = str(error)
                    if not is_first:
                        break
                    raise
                continue
            fate = Fate.DONE if answer is None else fate_of(self._mark, commit, _read_mark(answer))
            if fate is Fate.DONE and (not waited or _is_replicated(waited[-1])):
                return False
            never_sent = is_first or not commits
            if fate is Fate.FENCED or (fate is Fate.UNKNOWN and never_sent):
                raise EngineFenced(f"{self._name} is open elsewhere")
            if fate is Fate.LOST:
                raise EngineDataLost(f"{self._name} has lost its last commits")
            if fate is Fate.UNKNOWN:
                break
            why = "no replica has it"
        raise CommitOutcomeUnknown(f"{self._name} did not confirm a commit: {why}")

    @property
    def _name(self) -> str:
        return f"partition {self._identity.partition}"

    def _fail(self, error: BaseException) -> None:
        self._fault = error
        self._failed.set()

    def _later_fault(self, usual: Exception) -> Exception:
        """Why nothing is committed any more; a fence and a loss are reported to every caller."""
        fault = self._fault
        return (
            type(fault)(*fault.args) if isinstance(fault, EngineFenced | EngineDataLost) else usual
        )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"{self._name} is closed")


def _is_from_script(error: RedisError) -> bool:
    """Whether a command of the script was refused, and not the script as such."""
    return isinstance(error, ResponseError) and "user_script" in str(error)


def _read_mark(fields: Sequence[bytes | None]) -> Mark:
    epoch, opening, sequence, commit_id = fields
    return Mark(int(epoch or 0), opening or b"", int(sequence or 0), commit_id or b"")


def _is_replicated(waited: object) -> bool:
    return isinstance(waited, list) and len(waited) == 2 and waited[0] >= 1 and waited[1] >= 1
