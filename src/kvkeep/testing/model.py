"""What must be true, computed another way than the core computes it.

`WatchedDirectory` is the real core with a model beside it: before each event the model says what
the answer must be, after it the audit runs and the model compares. Bytes of a chunk follow from its
hash, so that every byte in the arena, written or read, can be judged at any time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from kvkeep.core import audit
from kvkeep.core import events as ev
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.eviction import Chunk
from kvkeep.testing.process import Process
from kvkeep.types import (
    HASH_BYTES,
    NO_LEASE,
    ChunkHash,
    CommitOutcome,
    Epoch,
    GroupKind,
    LeaseId,
    Reason,
    RowSpec,
    SlotId,
    SlotState,
    StageOutcome,
)

_CONTENT = b"kvkeep.simulated.content\x00"
_LEFT = (SlotState.STAGING, SlotState.RESIDENT)  # leaving one of these changes the generation
_WRITABLE = (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED)

Seen = Callable[[SlotState, ev.Event], None]


def content(chunk_hash: bytes, rank: int, group: int, size_bytes: int) -> bytes:
    """The only right bytes of one object."""
    return blake3(_CONTENT + chunk_hash + bytes((rank, group))).digest(length=size_bytes)


def pack(hashes: Sequence[bytes]) -> bytes:
    """Hashes as the wire carries them."""
    return b"".join(hashes)


def split(packed: bytes) -> list[ChunkHash]:
    """Packed hashes as a list."""
    return [ChunkHash(packed[i : i + HASH_BYTES]) for i in range(0, len(packed), HASH_BYTES)]


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
    hit: tuple[int, bool]  # chunks, and whether they are reserved
    commits: list[tuple[CommitOutcome, ChunkHash]]


class Model:
    """The expectations of one epoch."""

    def __init__(self, directory: Directory, memory: Memory, seen: Seen) -> None:
        self._d = directory
        self._memory = memory
        self._seen = seen
        self._resident: dict[ChunkHash, Chunk] = {}
        self._owners: dict[SlotId, LeaseId] = {}  # who may write a slot
        self.events = 0

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
        return _Before(
            states=list(slots.state),
            generations=self._memory.generations[: len(slots.state)],
            evicted_chunks=self._d.residents.evicted_chunks,
            hit=self._expected_hit(event) if isinstance(event, ev.Lookup) else (0, False),
            commits=self._expected_commits(event) if isinstance(event, ev.Commit) else [],
        )

    def after(self, event: ev.Event, reply: ev.Reply, before: _Before) -> None:
        """Compare what happened with what had to."""
        self.events += 1
        self._generations_changed(before)
        states = self._d.slots.state
        for slot in [s for s in self._owners if states[s] not in _WRITABLE]:
            del self._owners[slot]
        committed: list[ChunkHash] = []
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
        self._residents_moved(event, committed, before)

    def _generations_changed(self, before: _Before) -> None:
        slots, words = self._d.slots, self._memory.generations
        for slot, (was, word) in enumerate(zip(before.states, before.generations, strict=True)):
            if was in _LEFT and slots.state[slot] is not was:
                assert words[slot] > word, f"slot {slot} left {was.name}, same generation"
            assert words[slot] >= word

    # ---- lookups

    def _expected_hit(self, event: ev.Lookup) -> tuple[int, bool]:
        """(hit, reserved) that the lookup must answer."""
        session = self._d.sessions.get(event.session)
        if session is None or not session.ready:
            return 0, False
        found = [self._resident.get(h) for h in split(event.hashes)]
        rows = session.all_rows
        if any(chunk is not None and chunk.specs is not rows for chunk in found):
            return 0, False
        usable = longest(rows, [chunk is not None for chunk in found])
        cap = int(self._d.limits.session_reserve_fraction * self._d.arena.populated_bytes)
        fits, held = 0, set(session.held)
        for chunk in found[:usable]:
            if chunk is not None:
                held.add(chunk)
            if sum(c.size_bytes for c in held) > cap and chunk not in session.held:
                break
            fits += 1
        if fits < usable and not event.near:
            return usable, False
        hit = longest(rows, [chunk is not None for chunk in found[:fits]])
        return hit, hit > 0

    def _check_hit(self, event: ev.Lookup, reply: ev.Hit, before: _Before) -> None:
        hit, reserved = before.hit
        hashes = split(event.hashes)
        assert reply.chunks == hit, f"a hit of {reply.chunks}, the model says {hit}"
        assert (reply.lease != NO_LEASE) == reserved, "a hit and its lease disagree"
        assert len(reply.reasons) == len(hashes) - hit, "one reason for each chunk lost"
        if not reserved:
            assert not reply.columns
            return
        session = self._d.sessions[event.session]
        for row, column in enumerate(reply.columns):
            slots = memoryview(column.slots).cast("Q")
            words = memoryview(column.generations).cast("Q")
            offsets = memoryview(column.offsets).cast("Q")
            for position, chunk_hash in enumerate(hashes[:hit]):
                chunk = self._resident.get(chunk_hash)
                if chunk is None:
                    assert slots[position] == ev.NO_SLOT
                    continue
                slot = chunk.rows[row]
                assert slots[position] == slot
                assert offsets[position] == self._d.slots.offset[slot]
                assert words[position] == self._memory.generations[slot]
        assert Reason.NOT_READY not in reply.reasons
        assert reply.lease in session.reads_open

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
                assert chunk_hash in self._resident
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
        resident = set(self._resident)
        answers: list[tuple[CommitOutcome, ChunkHash]] = []
        for lease_id in event.leases:
            lease = is_open.pop(lease_id, None)
            if lease is None:
                answers.append((CommitOutcome.UNKNOWN_LEASE, ChunkHash(b"")))
            elif lease.hash in resident:
                answers.append((CommitOutcome.ALREADY_RESIDENT, lease.hash))
            else:
                resident.add(lease.hash)
                answers.append((CommitOutcome.COMMITTED, lease.hash))
        return answers

    # ---- what became resident, and what left

    def _residents_moved(
        self, event: ev.Event, committed: list[ChunkHash], before: _Before
    ) -> None:
        index = self._d.residents.index
        added = [h for h in index if h not in self._resident]
        assert added == committed, f"{type(event).__name__} published what nobody committed"
        for chunk_hash in added:
            self._resident[chunk_hash] = index[chunk_hash]
            assert isinstance(event, ev.Commit)
            self._right_bytes(event.session, index[chunk_hash])
        gone = [h for h in self._resident if h not in index]
        if not gone:
            return
        match event:
            case ev.Stage():
                evicted = self._d.residents.evicted_chunks - before.evicted_chunks
                assert len(gone) == evicted, f"{len(gone)} chunks left, {evicted} evicted"
                lost = [self._resident[h] for h in gone]
                assert not any(c in self._d.residents.unlinked for c in lost), "evicted, but read"
            case ev.Drop():
                assert set(gone) <= set(split(event.hashes))
            case ev.Clear():
                assert not index
            case _:
                raise AssertionError(f"{type(event).__name__} made resident chunks disappear")
        for chunk_hash in gone:
            del self._resident[chunk_hash]

    def _right_bytes(self, session_id: str, chunk: Chunk) -> None:
        """Published bytes are the chunk's only right bytes, in every row."""
        ranks = self._d.sessions[session_id].row_ranks
        for slot, rank, spec in zip(chunk.rows, ranks, chunk.specs, strict=True):
            offset, size = self._d.slots.offset[slot], self._d.slots.length[slot]
            assert size == spec.object_bytes
            right = content(chunk.hash, rank, spec.group, size)
            assert self._memory.arena[offset : offset + size] == right, "wrong bytes published"


class WatchedDirectory(Directory):
    """The core, audited and compared with the model at every event."""

    def __init__(
        self, memory: Memory, new_id: Callable[[], int], *, limits: Limits, seen: Seen
    ) -> None:
        super().__init__(memory.generations, new_id, limits=limits)
        self.model = memory.model = Model(self, memory, seen)

    def handle(self, event: ev.Event, now_s: float) -> tuple[ev.Reply, list[ev.Effect]]:
        """As the core's, or AssertionError."""
        before = self.model.before(event)
        reply, effects = super().handle(event, now_s)
        audit.check(self)
        self.model.after(event, reply, before)
        return reply, effects


def longest(rows: Sequence[RowSpec], held: Sequence[bool]) -> int:
    """The longest usable length, straight from the words of DESIGN section 4."""
    for length in range(len(held), 0, -1):
        if all(_usable(spec, held, length) for spec in rows):
            return length
    return 0


def _usable(spec: RowSpec, held: Sequence[bool], length: int) -> bool:
    match spec.kind:
        case GroupKind.FULL_ATTENTION:
            return all(held[:length])
        case GroupKind.SLIDING_WINDOW:
            return all(held[max(0, length - spec.window_chunks) : length])
        case GroupKind.RECURRENT:
            return held[length - 1]
