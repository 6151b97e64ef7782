"""The naive account of L2: who waits for what, whose memory is whose, and how short a hit may be.

What a pending lookup has reserved is the directory's choice (it keeps to caps): the model reads it
from there and then asks whether it may be so. A final answer must not be shorter than it had to be:
the first chunk that is missing needs an excuse that the model has seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.core.build import words
from tests.core.model import Model, Read, Stored, Write, split
from tests.core.model_memory import Extent, longest

from kvkeep.core import events as ev
from kvkeep.core.directory import Directory
from kvkeep.core.leases import ReadLease
from kvkeep.types import (
    NO_LEASE,
    ChunkHash,
    GroupKind,
    IoOutcome,
    LeaseId,
    Reason,
    RowSpec,
    SlotState,
    TicketId,
)


@dataclass
class Flight:
    """One chunk on its way from L2."""

    write: Write  # the backend's, as if it were an engine's
    backend: int
    late: bool = False

    @property
    def doomed(self) -> bool:
        return self.write.doomed


@dataclass
class Waiting:
    """One pending lookup, and why each position may be missing from its answer."""

    session: str
    hashes: list[ChunkHash]
    near: bool
    deadline_s: float
    asked: list[ChunkHash]
    probed: bool = False
    over: bool = False  # its deadline has passed
    lease: int = 0
    excused: set[ChunkHash] = field(default_factory=set)
    resident: set[ChunkHash] = field(default_factory=set)  # when the backends answered


class ModelL2(Model):
    """With backends; `directory` is looked at for choices that are its own."""

    directory: Directory

    def start(self, directory: Directory) -> None:
        self.directory = directory
        self.waiting: dict[int, Waiting] = {}
        self.flights: dict[int, Flight] = {}
        self.persists: dict[int, tuple[ev.Persist, Stored]] = {}
        self.answered: list[tuple[str, LeaseId]] = []  # leases that nobody has seen yet

    # ---- memory and readers

    def readers(self, chunk: Stored) -> bool:
        return super().readers(chunk) or any(c is chunk for _, c in self.persists.values())

    def promised_bytes(self, session: str) -> int:
        """How many are still awaited is the directory's account; the audit checks it."""
        of = self.directory.sessions[session]
        return len(of.wanted) * of.chunk_bytes

    def fetching(self) -> list[Extent]:
        return [e for flight in self.flights.values() for e in flight.write.extents]

    def flying(self, chunk_hash: ChunkHash) -> Flight | None:
        return next((f for f in self.flights.values() if f.write.hash == chunk_hash), None)

    def coming(self, chunk_hash: ChunkHash) -> bool:
        flight = self.flying(chunk_hash)
        return flight is not None and not flight.late and not flight.doomed

    # ---- one event

    def pending(self, event: ev.Lookup, reply: ev.Pending, probe: ev.Probe) -> None:
        member = self.members[event.session]
        hashes = split(event.hashes)
        found = [self.resident.get(h) for h in hashes]
        assert member.ready
        assert event.fetch
        assert not any(c is not None and c.rows != member.rows for c in found)
        assert longest(member.rows, [c is not None for c in found]) < len(hashes)
        asked = split(probe.hashes)
        assert set(asked) <= {h for h, c in zip(hashes, found, strict=True) if c is None}
        assert probe.ticket == reply.ticket
        assert probe.space.salt == event.salt
        limit_s = self.limits.lookup_wait_s if event.wait_s is None else event.wait_s
        deadline_s = self.now_s + limit_s
        self.waiting[reply.ticket] = Waiting(event.session, hashes, event.near, deadline_s, asked)

    def probed(self, event: ev.Probed, reply: ev.Done) -> None:
        ticket = self.waiting.get(event.ticket)
        assert reply.changed == (ticket is not None and not ticket.probed)
        if ticket is None or ticket.probed:
            return
        ticket.probed = True
        ticket.resident = {h for h in ticket.hashes if h in self.resident}
        there = {h for h, held in zip(ticket.asked, event.holders, strict=True) if held}
        for chunk_hash in ticket.hashes:
            here = self.resident.get(chunk_hash)
            same = here is not None and here.rows == self.members[ticket.session].rows
            flight = self.flying(chunk_hash)
            flies = flight is not None and not flight.late
            asked_in_vain = chunk_hash not in there or flight is not None
            if not same and not flies and asked_in_vain:
                ticket.excused.add(chunk_hash)

    def expire(self, event: ev.Expire, reply: ev.Done) -> None:
        ticket = self.waiting.get(event.ticket)
        rang = ticket is not None and self.now_s >= ticket.deadline_s
        assert reply.changed == rang
        if rang and ticket is not None:
            ticket.over = True

    def cancel(self, event: ev.Cancel, reply: ev.Done) -> None:
        ticket = self.waiting.get(event.ticket)
        mine = ticket is not None and ticket.session == event.session
        assert reply.changed == mine
        if mine:
            self._give_back(self.waiting.pop(event.ticket))

    def late(self, event: ev.FetchLate, reply: ev.Done) -> None:
        flight = self.flights.get(event.transfer)
        assert reply.changed == (flight is not None and not flight.late)
        if flight is not None:
            flight.late = True
            self._excuse(flight.write.hash)

    def fetched(self, event: ev.Fetched, reply: ev.Done) -> None:
        flight = self.flights.pop(event.transfer, None)
        assert reply.changed == (flight is not None)
        if flight is None:
            return
        good = all(outcome is IoOutcome.OK for outcome in event.outcomes)
        write = flight.write
        if good and not flight.doomed and write.hash not in self.resident:
            self.publish(write)
            return
        for extent in write.extents:
            self.memory.release(extent)
        if write.hash not in self.resident:
            self._excuse(write.hash)

    def persisted(self, event: ev.Persisted, reply: ev.Done) -> None:
        assert reply.changed == (event.transfer in self.persists)
        self.persists.pop(event.transfer, None)
        self.forget_reads()

    def forget(self, event: ev.Forget, reply: ev.Done) -> None:
        member = self.members.get(event.session)
        mark = member.fingerprint if member is not None else b""
        gone = [h for h, c in self.resident.items() if mark and c.fingerprint == mark]
        assert self.most_left(reply.changed, len(gone))
        for write in [*self.writes.values(), *(f.write for f in self.flights.values())]:
            write.doomed |= bool(mark) and write.fingerprint == mark
        for chunk_hash in gone:
            self.unlink(chunk_hash)

    def doom(self, hashes: Sequence[ChunkHash] | None = None) -> None:
        """Dropped, or (None) all cleared: what is on its way stays away."""
        for flight in self.flights.values():
            flight.write.doomed |= hashes is None or flight.write.hash in hashes

    def unlink(self, chunk_hash: ChunkHash) -> None:
        self._excuse(chunk_hash)
        super().unlink(chunk_hash)

    def _excuse(self, chunk_hash: ChunkHash) -> None:
        for ticket in self.waiting.values():
            ticket.excused.add(chunk_hash)

    def _give_back(self, ticket: Waiting) -> None:
        if ticket.lease:
            self.reads.pop(ticket.lease, None)
        self.forget_reads()

    # ---- effects

    def ended(self, effect: ev.Answered) -> None:
        """A lookup that ends with nothing because its session did."""
        ticket = self.waiting.pop(effect.ticket)
        hit = effect.hit
        assert (hit.lease, hit.chunks, hit.columns) == (NO_LEASE, 0, ())
        assert hit.reasons == (hit.reasons[0],) * len(ticket.hashes)
        self._give_back(ticket)

    def answer(self, effect: ev.Answered) -> None:
        ticket = self.waiting.pop(effect.ticket)
        hit, hashes = effect.hit, ticket.hashes
        if hit.reasons and hit.reasons[0] in (Reason.REVOKED, Reason.NOT_READY):
            self.waiting[effect.ticket] = ticket
            return self.ended(effect)
        assert effect.session == ticket.session
        assert ticket.probed or ticket.over or hit.reasons[0] is Reason.EVICTED
        assert len(hit.reasons) == len(hashes) - hit.chunks
        member = self.members[ticket.session]
        old = self.reads.pop(ticket.lease, None)
        if hit.lease:
            known = list(self.resident.values()) + (old.chunks if old else [])
            found = self._found(hit, hashes, known)
            held = [chunk is not None for chunk in found]
            assert longest(member.rows, held) == hit.chunks > 0
            self.check_handles(hit, found, len(member.rows))
            chunks = [chunk for chunk in found if chunk is not None]
            assert all(chunk.hash in self.resident for chunk in chunks), "handed out when dropped"
            ranks = member.ranks
            self.reads[hit.lease] = Read(ticket.session, chunks, ranks, set(ranks))
            self.answered.append((ticket.session, hit.lease))
        else:
            assert hit.columns == ()
            assert not hit.chunks or not ticket.near
        self._check_length(ticket, hit, member.rows)
        self.forget_reads()
        return None

    def _found(
        self, hit: ev.Hit, hashes: list[ChunkHash], known: list[Stored]
    ) -> list[Stored | None]:
        """The chunks that the handles are of; None for the holes."""
        slots = words(hit.columns[0].slots)
        at = {chunk.extents[0].slot: chunk for chunk in known}
        found = [None if slot == ev.NO_SLOT else at[slot] for slot in slots]
        assert all(c is None or c.hash == h for c, h in zip(found, hashes, strict=False))
        return found

    def _check_length(self, ticket: Waiting, hit: ev.Hit, rows: tuple[RowSpec, ...]) -> None:
        """It is not shorter than it had to be, and tiers say L2 only of what was not here."""
        for tier, chunk_hash in zip(hit.tiers, ticket.hashes, strict=False):
            assert tier <= self.limits.backends
            assert not tier or chunk_hash not in ticket.resident
        if hit.chunks == len(ticket.hashes) or ticket.over:
            return
        first = ticket.hashes[hit.chunks]
        mixed = any(spec.kind is not GroupKind.FULL_ATTENTION for spec in rows)
        excuses = (Reason.NO_ROOM, Reason.LAYOUT_MISMATCH, Reason.EVICTED)
        no_less = not mixed and hit.reasons[0] not in excuses
        if no_less and len(set(ticket.hashes)) == len(ticket.hashes):
            assert first in ticket.excused, "L1 or L2 had the next chunk"

    def sync(self) -> None:
        """What pending lookups hold now; new chunks must be findable and of their layout."""
        for key, ticket in self.waiting.items():
            of = self.directory.fetcher.tickets[TicketId(key)]
            if of.lease is None:
                assert not ticket.lease
                continue
            ticket.lease = of.lease.id
            member = self.members[ticket.session]
            ranks = member.ranks
            read = self.reads.setdefault(ticket.lease, Read(ticket.session, [], ranks, set(ranks)))
            read.chunks = [self._held(ticket, read, c.hash, of.lease) for c in of.lease.chunks]
        cap = self.limits.session_reserve_fraction * self.capacity_bytes
        for session in {ticket.session for ticket in self.waiting.values()}:
            assert self.reserved_bytes(session) <= cap

    def _held(self, ticket: Waiting, read: Read, chunk_hash: ChunkHash, lease: ReadLease) -> Stored:
        before = next((c for c in read.chunks if c.hash == chunk_hash), None)
        if before is not None:
            return before
        chunk = self.resident[chunk_hash]
        assert chunk.rows == self.members[ticket.session].rows
        assert chunk_hash in ticket.hashes
        return chunk

    def fetch(self, effect: ev.Fetch) -> None:
        """Memory is taken; somebody waits for it, or did when it was wanted."""
        assert self.flying(effect.chunk) is None, "two fetches of one chunk"
        assert effect.chunk not in self.resident
        slots = self.directory.slots
        sessions = self.directory.sessions  # a session that lies may want another's key
        waiters = [
            t
            for t in self.waiting.values()
            if effect.chunk in t.hashes
            and sessions[t.session].fingerprint == effect.space.fingerprint
        ]
        assert waiters, "nobody wants it"
        rows = self.members[waiters[0].session].rows
        extents = []
        for offset, spec in zip(effect.offsets, rows, strict=True):
            slot = next(
                s
                for s, state in enumerate(slots.state)
                if state is SlotState.STAGING and slots.offset[s] == offset
            )
            handle = (slot, offset, self.memory.generations[slot])
            extents.append(self.memory.take(handle, spec.object_bytes))
        space = effect.space
        write = Write(
            "L2", effect.chunk, ChunkHash(b""), extents, [], rows, space.salt, self.now_s,
            space.fingerprint,
        )  # fmt: skip
        assert effect.backend < self.limits.backends
        self.flights[effect.id] = Flight(write, effect.backend)

    def persist(self, effect: ev.Persist) -> None:
        """It is findable, read where it lies, and not on its way there already."""
        chunk = self.resident[effect.chunk]
        assert effect.offsets == tuple(e.offset for e in chunk.extents)
        twice = [p for p, _ in self.persists.values() if p.chunk == effect.chunk]
        assert effect.backend not in [p.backend for p in twice]
        self.persists[effect.id] = (effect, chunk)
        busy = [p for p, _ in self.persists.values() if p.backend == effect.backend]
        assert len(busy) <= self.limits.persists_per_backend
