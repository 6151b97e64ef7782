"""What must be true, computed another way than the core computes it.

`WatchedDirectory` is the real core with a model beside it: before each event the model says what
the answer must be, after it the audit runs and the model compares. Bytes of a chunk follow from its
hash, so that every byte in the arena, written or read, can be judged at any time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from kvkeep.core import audit
from kvkeep.core import events as ev
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.eviction import Chunk
from kvkeep.core.leases import Session
from kvkeep.testing.process import Process
from kvkeep.testing.sim_l2_model import Flight, L2Before, L2Model
from kvkeep.testing.sim_quota_model import QuotaModel, Used
from kvkeep.testing.sim_usable import longest, split
from kvkeep.types import (
    NO_LEASE,
    ChunkHash,
    CommitOutcome,
    Epoch,
    LeaseId,
    Reason,
    SlotId,
    SlotState,
    StageOutcome,
    TransferId,
)

_CONTENT = b"kvkeep.simulated.content\x00"
_LEFT = (SlotState.STAGING, SlotState.RESIDENT)  # leaving one of these changes the generation
_WRITABLE = (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED)


class Watch(Protocol):
    """Who counts what happens."""

    def seen(self, state: SlotState, event: ev.Event) -> None:
        """An event met a slot in this state."""

    def counted(self, what: str) -> None:
        """Something worth counting happened."""


def content(chunk_hash: bytes, rank: int, group: int, size_bytes: int) -> bytes:
    """The only right bytes of one object."""
    return blake3(_CONTENT + chunk_hash + bytes((rank, group))).digest(length=size_bytes)


@dataclass(slots=True)
class Memory:
    """What the server shares with its clients: the arena and the generation table."""

    epoch: Epoch
    arena: bytearray
    generations: list[int]
    copying: dict[int, tuple[int, int, Process]] = field(default_factory=dict)  # offset, end, by
    model: "Model | None" = None  # None once the server of this epoch is gone


@dataclass(frozen=True, slots=True)
class _Before:
    """What an event found."""

    states: list[SlotState]
    generations: list[int]
    evicted_chunks: int
    hits: list[tuple[int, bool]]  # chunks, and whether they are reserved: each right answer
    commits: list[tuple[CommitOutcome, ChunkHash]]
    pending: bool  # the lookup is to be answered later
    l2: L2Before
    used: Used


class Model:
    """The expectations of one epoch."""

    def __init__(self, directory: Directory, memory: Memory, watch: Watch) -> None:
        self.directory = self._d = directory
        self._memory = memory
        self._seen = watch.seen
        self.resident: dict[ChunkHash, Chunk] = {}  # findable
        self._condemned: dict[ChunkHash, Chunk] = {}  # cleared or forgotten, and there for a while
        self._owners: dict[SlotId, int] = {}  # who may write a slot: a lease, or minus a transfer
        self.events = 0
        self.l2 = L2Model(self, watch.counted)
        self._quotas = QuotaModel(directory)

    # ---- what engines ask

    def writes(self, lease: int, slot: int) -> None:
        """A piece is being written under `lease`: the extent must still be that lease's."""
        owner = self._owners.get(SlotId(slot))
        assert owner == lease, f"slot {slot} is written by a lease that does not own it"

    def still_reserved(self, session: str, lease: int, rank: int) -> bool:
        """Whether the server counts this rank's part of a read lease as open."""
        known = self._d.sessions.get(session)
        read = known.reads_open.get(LeaseId(lease)) if known else None
        return read is not None and rank in read.live_ranks

    # ---- around one event

    def before(self, event: ev.Event) -> _Before:
        """Count the coverage and say what the answer must be."""
        slots = self._d.slots
        for state in SlotState:
            held = self._d.arena.free_bytes if state is SlotState.FREE else slots.bytes_in[state]
            if held:
                self._seen(state, event)
        hits: list[tuple[int, bool]] = []
        pending = False
        if isinstance(event, ev.Lookup):
            hits, pending = self._expected_hit(event)
        return _Before(
            states=list(slots.state),
            generations=self._memory.generations[: len(slots.state)],
            evicted_chunks=self._d.residents.evicted_chunks,
            hits=hits,
            commits=self._expected_commits(event) if isinstance(event, ev.Commit) else [],
            pending=pending,
            l2=self.l2.before(event),
            used=self._quotas.used(),
        )

    def after(
        self,
        event: ev.Event,
        answer: tuple[ev.Reply, list[ev.Effect]],
        before: _Before,
        now_s: float,
    ) -> None:
        """Compare what happened with what had to."""
        self.events += 1
        reply, effects = answer
        self._generations_changed(before)
        if isinstance(reply, ev.Sweeping):  # from now on nobody finds them
            for chunk_hash in self.l2.expected_to_go(event):
                self._condemned[chunk_hash] = self.resident.pop(chunk_hash)
        self.l2.ended(event, reply, now_s)
        states = self._d.slots.state
        for slot in [s for s in self._owners if states[s] not in _WRITABLE]:
            del self._owners[slot]
        committed: list[ChunkHash] = []
        assert isinstance(reply, ev.Pending) == before.pending, "to be answered now, or later"
        if isinstance(reply, ev.Hit):
            assert isinstance(event, ev.Lookup)
            self._check_hit(event, reply, before)
        elif isinstance(reply, ev.Committed):
            right = [outcome for outcome, _ in before.commits]
            assert list(reply.outcomes) == right, f"committed {reply.outcomes}, not {right}"
            committed = [h for o, h in before.commits if o is CommitOutcome.COMMITTED]
        elif isinstance(reply, ev.Staged):
            assert isinstance(event, ev.Stage)
            self._check_grants(event, reply)
        self._residents_moved(event, committed, before, now_s)
        self.l2.began(event, effects, before.l2, now_s)
        self._quotas.after(event, before.used)

    def _generations_changed(self, before: _Before) -> None:
        slots, words = self._d.slots, self._memory.generations
        for slot, (was, word) in enumerate(zip(before.states, before.generations, strict=True)):
            if was in _LEFT and slots.state[slot] is not was:
                assert words[slot] > word, f"slot {slot} left {was.name}, same generation"
            assert words[slot] >= word

    # ---- lookups

    def _expected_hit(self, event: ev.Lookup) -> tuple[list[tuple[int, bool]], bool]:
        """Each right (hit, reserved), and whether the lookup must be answered later."""
        session = self._d.sessions.get(event.session)
        if session is None or not session.ready:
            return [(0, False)], False
        found = [self.resident.get(h) for h in split(event.hashes)]
        rows = session.all_rows
        if any(chunk is not None and chunk.specs is not rows for chunk in found):
            return [(0, False)], False
        usable = longest(rows, [chunk is not None for chunk in found])
        if self.l2.must_wait(event, usable):
            return [], True
        promised_bytes = len(session.wanted) * session.chunk_bytes  # some may be resident by now
        right = []
        for taken_bytes in {0, promised_bytes}:
            fits = self._under_cap(session, found[:usable], taken_bytes)
            hit = longest(rows, [chunk is not None for chunk in found[:fits]])
            far = fits < usable and not event.near
            right.append((usable, False) if far else (hit, hit > 0))
        return right, False

    def _under_cap(self, session: Session, found: list[Chunk | None], taken_bytes: int) -> int:
        """How many of these the session may reserve."""
        cap = int(self._d.limits.session_reserve_fraction * self._d.arena.populated_bytes)
        fits, held = 0, set(session.held.counts())
        for chunk in found:
            if chunk is not None:
                held.add(chunk)
                new = chunk not in session.held
                if new and sum(c.size_bytes for c in held) + taken_bytes > cap:
                    break
            fits += 1
        return fits

    def _check_hit(self, event: ev.Lookup, reply: ev.Hit, before: _Before) -> None:
        hashes = split(event.hashes)
        answer = reply.chunks, reply.lease != NO_LEASE
        assert answer in before.hits, f"(hit, reserved) {answer}, the model says {before.hits}"
        assert len(reply.reasons) == len(hashes) - reply.chunks, "one reason for each chunk lost"
        if reply.lease == NO_LEASE:
            assert not reply.columns
            return
        assert Reason.NOT_READY not in reply.reasons
        self.check_columns(self._d.sessions[event.session], hashes, reply)

    def check_columns(self, session: Session, hashes: list[ChunkHash], hit: ev.Hit) -> None:
        """The handles of a reserved hit name resident chunks, and its lease is open."""
        lease = session.reads_open.get(hit.lease)
        assert lease is not None, "a hit without its lease"
        reserved = {chunk.hash for chunk in lease.chunks}
        rows = session.all_rows
        held = [h in reserved for h in hashes[: hit.chunks]]
        assert longest(rows, held) == hit.chunks, "a hit that is not reserved"
        for row, column in enumerate(hit.columns):
            slots = memoryview(column.slots).cast("Q")
            words = memoryview(column.generations).cast("Q")
            offsets = memoryview(column.offsets).cast("Q")
            for position, chunk_hash in enumerate(hashes[: hit.chunks]):
                chunk = self.resident.get(chunk_hash)
                if chunk is None or chunk_hash not in reserved:
                    assert slots[position] == ev.NO_SLOT, "a hit of what is not resident"
                    continue
                slot = chunk.rows[row]
                assert slots[position] == slot
                assert offsets[position] == self._d.slots.offset[slot]
                assert words[position] == self._memory.generations[slot]

    # ---- stores

    def _check_grants(self, event: ev.Stage, reply: ev.Staged) -> None:
        session = self._d.sessions.get(event.session)
        hashes = [h for item in event.items for h in split(item.hashes)]
        assert len(hashes) == len(reply.outcomes)
        granted = [
            h for h, o in zip(hashes, reply.outcomes, strict=True) if o is StageOutcome.GRANTED
        ]
        assert len(granted) == len(reply.leases)
        for chunk_hash, outcome in zip(hashes, reply.outcomes, strict=True):
            if outcome is StageOutcome.RESIDENT:
                assert chunk_hash in self.resident
        for chunk_hash, lease_id in zip(granted, reply.leases, strict=True):
            assert session is not None
            assert session.ready, "a grant without every rank"
            assert session.writes, "a grant for a reader"
            lease = session.writes_open[lease_id]
            assert lease.hash == chunk_hash
            for slot in lease.slots:
                assert slot not in self._owners, f"slot {slot} has two owners"
                self._owners[slot] = lease_id
                self._nobody_copies_into(slot)

    def owned_by_fetch(self, slot: SlotId, transfer: TransferId) -> None:
        """A fetch took this extent."""
        self._owners[slot] = -transfer
        self._nobody_copies_into(slot)

    def disown(self, slot: SlotId) -> None:
        """The fetch that owned this extent has ended."""
        assert self._owners.pop(slot, 0) < 0, "a fetch lost its extent"

    def _nobody_copies_into(self, slot: SlotId) -> None:
        start = self._d.slots.offset[slot]
        end = start + self._d.slots.size[slot]
        for offset, stop, process in self._memory.copying.values():
            if process.alive:  # what a dead one's device still does is judged as it writes
                apart = stop <= start or end <= offset
                assert apart, f"slot {slot} granted under a running copy"

    def _expected_commits(self, event: ev.Commit) -> list[tuple[CommitOutcome, ChunkHash]]:
        session = self._d.sessions.get(event.session)
        is_open = dict(session.writes_open) if session else {}
        resident = set(self.resident)
        answers: list[tuple[CommitOutcome, ChunkHash]] = []
        for lease_id in event.leases:
            lease = is_open.pop(lease_id, None)
            if lease is None:
                answers.append((CommitOutcome.UNKNOWN_LEASE, ChunkHash(b"")))
            elif lease_id in self.l2.doomed_leases:
                answers.append((CommitOutcome.FORGOTTEN, ChunkHash(b"")))
            elif lease.hash in resident:
                answers.append((CommitOutcome.ALREADY_RESIDENT, lease.hash))
            else:
                resident.add(lease.hash)
                answers.append((CommitOutcome.COMMITTED, lease.hash))
        return answers

    # ---- what became resident, and what left

    def _residents_moved(
        self, event: ev.Event, committed: list[ChunkHash], before: _Before, now_s: float
    ) -> None:
        index = self._d.residents.index
        flight = before.l2.publishes
        expected = committed if flight is None else [flight.hash]
        at_once = [h for h in expected if h not in index]  # evicted by the fetch that had to wait
        if before.l2.makes_room or self.l2.skips_l1:
            expected = [h for h in expected if h in index]
        swept = [h for h, chunk in self._condemned.items() if index.get(h) is not chunk]
        for chunk_hash in swept:
            del self._condemned[chunk_hash]
        added = [h for h in index if h not in self.resident and h not in self._condemned]
        right = sorted(added) == sorted(expected)
        assert right, f"{type(event).__name__} published what it must not, or did not"
        for chunk_hash in added:
            chunk = self.resident[chunk_hash] = index[chunk_hash]
            self.l2.arrived(chunk_hash, flight, now_s)
            self._right_bytes(chunk, self._ranks(event, flight))
        gone = [h for h in self.resident if h not in index]
        meant = self.l2.expected_to_go(event)
        others = [h for h in gone if h not in meant]
        evicted = self._d.residents.evicted_chunks - before.evicted_chunks
        if isinstance(event, ev.Clear | ev.Forget):
            assert len(others) <= evicted, f"{len(others)} chunks left, {evicted} evicted"
        else:
            left = len(others) + len(at_once)
            right = left <= evicted <= left + len(swept)  # what is condemned may go either way
            assert right, f"{left} chunks left, {evicted} evicted"
        for chunk_hash in others:
            chunk = self.resident[chunk_hash]
            assert self.l2.may_evict(chunk, before.l2), f"{type(event).__name__} evicted a chunk"
            assert chunk not in self._d.residents.unlinked, "evicted, but read"
        if isinstance(event, ev.Clear):
            assert set(index) == set(self._condemned)
        for chunk_hash in gone:
            del self.resident[chunk_hash]

    def _ranks(self, event: ev.Event, flight: Flight | None) -> tuple[int, ...]:
        """Which rank each row of a published chunk belongs to."""
        if flight is not None:
            return flight.ranks
        assert isinstance(event, ev.Commit)
        return self._d.sessions[event.session].row_ranks

    def _right_bytes(self, chunk: Chunk, ranks: tuple[int, ...]) -> None:
        """Published bytes are the chunk's only right bytes, in every row."""
        for slot, rank, spec in zip(chunk.rows, ranks, chunk.specs, strict=True):
            offset, size = self._d.slots.offset[slot], self._d.slots.length[slot]
            assert size == spec.object_bytes
            right = content(chunk.hash, rank, spec.group, size)
            assert self._memory.arena[offset : offset + size] == right, "wrong bytes published"


class WatchedDirectory(Directory):
    """The core, audited and compared with the model at every event."""

    def __init__(
        self, memory: Memory, new_id: Callable[[], int], *, limits: Limits, watch: Watch
    ) -> None:
        super().__init__(memory.generations, new_id, limits=limits)
        self.model = memory.model = Model(self, memory, watch)

    def handle(self, event: ev.Event, now_s: float) -> tuple[ev.Reply, list[ev.Effect]]:
        """As the core's, or AssertionError."""
        before = self.model.before(event)
        answer = super().handle(event, now_s)
        audit.check(self)
        self.model.after(event, answer, before, now_s)
        return answer
