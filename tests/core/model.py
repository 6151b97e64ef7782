"""A second, naive account of what the directory promises, from what its clients can see.

It sees
events, replies, effects and the generation table, and fails when the two accounts differ. Which
chunk is evicted is the policy's choice: the model reads it from the generations and then asks
whether that chunk could go.
"""

from dataclasses import dataclass, field

from tests.core.build import PAGE, words
from tests.core.model_memory import Extent, Memory, Rows, longest, pages_of
from tests.core.model_sessions import Member, Party

from kvkeep.core import events as ev
from kvkeep.core.directory import Limits
from kvkeep.types import (
    NO_LEASE,
    ChunkHash,
    CommitOutcome,
    Reason,
    StageOutcome,
    StorePolicy,
)


@dataclass
class Stored:
    """One published chunk, findable or only still read."""

    hash: ChunkHash
    parent: ChunkHash
    extents: list[Extent]
    rows: Rows
    salt: str | None
    fingerprint: bytes = b""

    @property
    def bytes(self) -> int:
        return sum(len(extent.pages) for extent in self.extents) * PAGE


@dataclass
class Write:
    """One chunk being written."""

    session: str
    hash: ChunkHash
    parent: ChunkHash
    extents: list[Extent]
    writers: list[int]
    rows: Rows
    salt: str | None
    since_s: float
    fingerprint: bytes = b""
    doomed: bool = False  # forgotten meanwhile


@dataclass
class Read:
    """What one lookup reserved; `live` are the ranks that have not ended."""

    session: str
    chunks: list[Stored]
    ranks: tuple[int, ...]  # of each row
    live: set[int] = field(default_factory=set)


class Model(Party):
    """Everything the directory should know; `apply` takes one event with its reply."""

    def __init__(self, generations: list[int], limits: Limits) -> None:
        super().__init__()
        self.memory = Memory(generations)
        self.limits = limits
        self.resident: dict[ChunkHash, Stored] = {}
        self.unlinked: list[Stored] = []  # dropped or cleared, still read
        self.writes: dict[int, Write] = {}
        self.latest: dict[ChunkHash, int] = {}
        self.reads: dict[int, Read] = {}
        self.stuck: list[tuple[Extent, int]] = []  # and the peer that may still write
        self.quarantine: list[tuple[Extent, float]] = []
        self.ended_again = 0
        self.now_s = 0.0
        self.disturbed = False  # the event also began fetches, after it was answered

    # ---- sums that the directory keeps too

    @property
    def capacity_bytes(self) -> int:
        return len(self.memory.free) * PAGE

    def unpublished_bytes(self) -> int:
        extents = [e for w in self.writes.values() for e in w.extents]
        extents += [e for e, _ in self.stuck] + [e for e, _ in self.quarantine]
        return sum(len(e.pages) for e in extents) * PAGE

    def readers(self, chunk: Stored) -> bool:
        return any(
            any(c is chunk for c in read.chunks) and read.live for read in self.reads.values()
        )

    def most_left(self, counted: int, there: int) -> bool:
        """Whether all went at this word; under skip_l1 some had left with their last reader."""
        return counted == there or (
            counted < there and self.limits.store_policy is StorePolicy.SKIP_L1
        )

    def promised_bytes(self, session: str) -> int:
        """What pending lookups of the session will reserve when it arrives."""
        return 0

    def fetching(self) -> list[Extent]:
        """Memory that bytes from L2 come to."""
        return []

    def coming(self, chunk_hash: ChunkHash) -> bool:
        """Whether the chunk is on its way from L2, in time."""
        return False

    def reserved_bytes(self, session: str) -> int:
        mine = [c for r in self.reads.values() if r.session == session for c in r.chunks]
        return sum(c.bytes for c in {id(c): c for c in mine}.values())

    def holds(self, session: str) -> bool:
        return session in [x.session for held in (self.writes, self.reads) for x in held.values()]

    def may_touch(self, peer: int) -> bool:
        member = self.members.get(session := self.peers[peer].session)
        lasting = member is not None and not member.recompute
        writers = [w for _, w in self.stuck] + [w for v in self.writes.values() for w in v.writers]
        return peer in writers or (lasting and session in [r.session for r in self.reads.values()])

    # ---- one event

    def lookup(self, event: ev.Lookup, reply: ev.Hit) -> None:
        hashes = split(event.hashes)
        member = self.members.get(event.session)
        if member is None or not member.ready:
            assert reply == ev.Hit(NO_LEASE, 0, (), (Reason.NOT_READY,) * len(hashes))
            return
        found = [self.resident.get(h) for h in hashes]
        if any(c is not None and c.rows != member.rows for c in found):
            assert reply == ev.Hit(NO_LEASE, 0, (), (Reason.LAYOUT_MISMATCH,) * len(hashes))
            return
        held = [c is not None for c in found]
        length = longest(member.rows, held)
        fits = self._under_cap(member, event.session, found[:length])
        if fits < length and not event.near:
            assert (reply.lease, reply.chunks, reply.columns) == (NO_LEASE, length, ())
            assert len(reply.reasons) == len(hashes) - length
            return
        if fits < length:
            fits = longest(member.rows, held[:fits])
        assert reply.chunks == fits
        assert len(reply.reasons) == len(hashes) - fits
        assert list(reply.reasons[: length - fits]) == [Reason.NO_ROOM] * (length - fits)
        if not fits:
            assert (reply.lease, reply.columns) == (NO_LEASE, ())
            return
        self.check_handles(reply, found[:fits], len(member.rows))
        chunks = [c for c in found[:fits] if c is not None]
        assert reply.lease not in self.reads
        assert reply.lease != NO_LEASE
        self.reads[reply.lease] = Read(event.session, chunks, member.ranks, set(member.ranks))

    def _under_cap(self, member: Member, session: str, found: list[Stored | None]) -> int:
        room = int(self.limits.session_reserve_fraction * self.capacity_bytes)
        room -= self.reserved_bytes(session) + self.promised_bytes(session)
        mine = [c for r in self.reads.values() if r.session == session for c in r.chunks]
        for position, chunk in enumerate(found):
            if chunk is not None and not any(c is chunk for c in mine):
                room -= chunk.bytes
                if room < 0:
                    return position
        return len(found)

    def check_handles(self, reply: ev.Hit, found: list[Stored | None], rows: int) -> None:
        assert len(reply.columns) == rows
        for row, column in enumerate(reply.columns):
            handles = zip(
                *map(words, (column.slots, column.offsets, column.generations)), strict=True
            )
            for chunk, handle in zip(found, handles, strict=True):
                if chunk is None:
                    assert handle == (ev.NO_SLOT, 0, 0)
                    continue
                extent = chunk.extents[row]
                assert handle == (extent.slot, extent.offset, extent.generation)
                assert self.memory.intact(extent), "other bytes than were committed"

    def end(self, event: ev.End, reply: ev.Done) -> None:
        read = self.reads.get(event.lease)
        ended = 0
        for rank in event.ranks:
            if read is not None and read.session == event.session and rank in read.live:
                read.live.discard(rank)
                ended += 1
            else:
                self.ended_again += 1
        assert reply.changed == ended
        self.forget_reads()

    def forget_reads(self) -> None:
        self.reads = {lease: read for lease, read in self.reads.items() if read.live}
        for chunk in [c for c in self.unlinked if not self.readers(c)]:
            self.unlinked.remove(chunk)
            self._free(chunk)

    def _free(self, chunk: Stored) -> None:
        for extent in chunk.extents:
            self.memory.release(extent)

    def end_reads(self, session: str, rank: int | None = None) -> None:
        for read in self.reads.values():
            if read.session == session:
                read.live -= read.live if rank is None else {rank}
        self.forget_reads()

    # ---- storing

    def stage(self, event: ev.Stage, reply: ev.Staged) -> None:
        gone = self.evicted()
        member = self.members.get(event.session)
        outcomes, leases = iter(reply.outcomes), iter(reply.leases)
        columns = [
            iter(list(zip(*map(words, (c.slots, c.offsets, c.generations)), strict=True)))
            for c in reply.columns
        ]
        for item in event.items:
            parent, refusal = item.parent, None
            for chunk_hash in split(item.hashes):
                outcome = next(outcomes)
                if chunk_hash not in gone:
                    expected = self._expect(member, event.session, chunk_hash, refusal)
                    assert outcome in expected, (outcome, expected)
                if outcome in (StageOutcome.NO_ROOM, StageOutcome.OVER_CAP):
                    refusal = outcome
                if outcome is StageOutcome.GRANTED:
                    assert member is not None
                    handles = [next(column) for column in columns]
                    extents = [
                        self.memory.take(handle, spec.object_bytes)
                        for handle, spec in zip(handles, member.rows, strict=True)
                    ]
                    self._granted(event.session, next(leases), item, chunk_hash, parent, extents)
                parent = chunk_hash
        assert [*outcomes, *leases] == []
        if len(event.items) == 1 and member is not None and not self.disturbed:
            self._check_room(event.items[0], member, reply, gone)
        if not self.disturbed:
            assert reply.largest_free_bytes == self.memory.longest_run(set()) * PAGE

    def evicted(self) -> dict[ChunkHash, Stored]:
        """Chunks whose generations changed: all rows at once, and nobody was reading them."""
        table = self.memory.generations
        gone = {}
        for chunk in list(self.resident.values()):
            left = [table[e.slot] != e.generation for e in chunk.extents]
            assert all(left) or not any(left)
            if any(left):
                assert not self.readers(chunk), "evicted while it is read"
                gone[chunk.hash] = self.resident.pop(chunk.hash)
                self._free(chunk)
        return gone

    def _expect(
        self,
        member: Member | None,
        session: str,
        chunk_hash: ChunkHash,
        refusal: StageOutcome | None,
    ) -> set[StageOutcome]:
        if member is None or not member.ready:
            return {StageOutcome.NOT_READY}
        if not member.writes:
            return {StageOutcome.READ_ONLY}
        chunk = self.resident.get(chunk_hash)
        if chunk is not None:
            same = chunk.rows == member.rows
            return {StageOutcome.RESIDENT if same else StageOutcome.LAYOUT_MISMATCH}
        if self.coming(chunk_hash):
            return {StageOutcome.IN_PROGRESS}
        other = self.writes.get(self.latest.get(chunk_hash, 0))
        if other is not None and self.now_s - other.since_s < self.limits.in_progress_after_s:
            return {StageOutcome.IN_PROGRESS}
        if refusal is not None:
            return {refusal}
        size = sum(pages_of(spec.object_bytes) for spec in member.rows) * PAGE
        cap = self.limits.staging_fraction * self.capacity_bytes
        mine = sum(
            len(e.pages) for w in self.writes.values() if w.session == session for e in w.extents
        )
        own_cap = cap * self.limits.session_staging_fraction
        if self.unpublished_bytes() + size > cap or mine * PAGE + size > own_cap:
            return {StageOutcome.OVER_CAP}
        return {StageOutcome.GRANTED, StageOutcome.NO_ROOM}

    def _granted(
        self,
        session: str,
        lease: int,
        item: ev.StageItem,
        chunk_hash: ChunkHash,
        parent: ChunkHash,
        extents: list[Extent],
    ) -> None:
        member = self.members[session]
        writers = [member.workers[rank] for rank in member.ranks]
        assert lease not in self.writes
        self.writes[lease] = Write(
            session,
            chunk_hash,
            parent,
            extents,
            writers,
            member.rows,
            item.salt,
            self.now_s,
            member.fingerprint,
        )
        self.latest[chunk_hash] = lease

    def _check_room(
        self, item: ev.StageItem, member: Member, reply: ev.Staged, gone: dict[ChunkHash, Stored]
    ) -> None:
        """No ancestor went for a chunk, and a refusal was for want of a run that may move."""
        line = self._ancestors(item.parent, gone)
        granted = StageOutcome.GRANTED in reply.outcomes
        assert not (granted and line & set(gone)), "a chunk's own beginning was evicted for it"
        slots = len(self.memory.generations)
        if StageOutcome.NO_ROOM in reply.outcomes and len(member.rows) == 1 and slots > 100:
            keep = line | set(split(item.hashes))
            moving = [
                c for c in self.resident.values() if c.hash not in keep and not self.readers(c)
            ]
            pages = {page for c in moving for e in c.extents for page in e.pages}
            assert self.memory.longest_run(pages) < pages_of(member.rows[0].object_bytes)

    def _ancestors(self, parent: ChunkHash, gone: dict[ChunkHash, Stored]) -> set[ChunkHash]:
        line: set[ChunkHash] = set()
        at: ChunkHash | None = parent
        while at is not None and at not in line:
            line.add(at)
            write = self.writes.get(self.latest.get(at, 0))
            before = self.resident.get(at) or gone.get(at) or write
            at = before.parent if before is not None else None
        return line

    def commit(self, event: ev.Commit, reply: ev.Committed) -> None:
        for lease, outcome in zip(event.leases, reply.outcomes, strict=True):
            write = self.writes.get(lease)
            if write is None or write.session != event.session:
                assert outcome is CommitOutcome.UNKNOWN_LEASE
                continue
            self._finish(lease)
            if write.doomed or write.hash in self.resident:
                refused = CommitOutcome.ALREADY_RESIDENT
                assert outcome is (CommitOutcome.FORGOTTEN if write.doomed else refused)
                for extent in write.extents:
                    self.memory.release(extent)
                continue
            assert outcome is CommitOutcome.COMMITTED
            self.publish(write)

    def publish(self, write: Write) -> Stored:
        for extent in write.extents:
            extent.generation += 1  # one step: an eviction in the same event shows as another
            new = self.memory.generations[extent.slot]
            assert new >= extent.generation, "published under the writer's generation"
        chunk = Stored(
            write.hash, write.parent, write.extents, write.rows, write.salt, write.fingerprint
        )
        self.resident[write.hash] = chunk
        return chunk

    def abort(self, event: ev.Abort, reply: ev.Done) -> None:
        ended = 0
        for lease in event.leases:
            write = self.writes.get(lease)
            if write is not None and write.session == event.session:
                self.lose(lease, confirmed=event.confirmed)
                ended += 1
        assert reply.changed == ended

    def _finish(self, lease: int) -> Write:
        write = self.writes.pop(lease)
        if self.latest.get(write.hash) == lease:
            del self.latest[write.hash]
        return write

    def lose(self, lease: int, *, confirmed: bool = False) -> None:
        """A write ends unpublished: its memory waits for whoever may still write it."""
        write = self._finish(lease)
        for extent, writer in zip(write.extents, write.writers, strict=True):
            changed = self.memory.generations[extent.slot] > extent.generation
            assert changed, "given up under its old generation"
            self.give_up(extent, writer, confirmed)

    def give_up(self, extent: Extent, writer: int, confirmed: bool) -> None:
        peer = self.peers.get(writer)
        if confirmed or peer is None or (peer.gone and not peer.dma):
            self.memory.release(extent)
        elif peer.gone:
            self.quarantine.append((extent, self.now_s + self.limits.quarantine_s))
        else:
            self.stuck.append((extent, writer))

    def lose_writes(self, session: str) -> None:
        for lease in [k for k, w in self.writes.items() if w.session == session]:
            self.lose(lease)

    def died(self, peer: int, confirmed: bool) -> int:
        """The process can write no more: what waited for it is free or in quarantine."""
        mine = [(e, p) for e, p in self.stuck if p == peer]
        self.stuck = [(e, p) for e, p in self.stuck if p != peer]
        for extent, writer in mine:
            self.give_up(extent, writer, confirmed)
        for lease in [k for k, w in self.writes.items() if peer in w.writers]:
            self.lose(lease)
        return len(mine)

    # ---- leaving, time

    def unlink(self, chunk_hash: ChunkHash) -> None:
        chunk = self.resident.pop(chunk_hash)
        if self.readers(chunk):
            self.unlinked.append(chunk)
        else:
            self._free(chunk)

    def tick(self, reply: ev.Done) -> None:
        over = [e for e, until in self.quarantine if until <= self.now_s]
        self.quarantine = [(e, until) for e, until in self.quarantine if until > self.now_s]
        for extent in over:
            self.memory.release(extent)
        assert reply.changed == len(over)

    def nothing_moved(self) -> None:
        """Every handle that somebody may use still means what it meant when it was given."""
        for chunk in self.resident.values():
            assert all(self.memory.intact(e) for e in chunk.extents)
        for write in self.writes.values():
            assert all(self.memory.intact(e) for e in write.extents)
        for read in self.reads.values():
            for chunk in read.chunks:
                for extent, rank in zip(chunk.extents, read.ranks, strict=True):
                    assert rank not in read.live or self.memory.intact(extent)


def split(packed: bytes) -> list[ChunkHash]:
    return [ChunkHash(packed[i : i + 32]) for i in range(0, len(packed), 32)]
