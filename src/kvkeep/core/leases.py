"""What sessions hold: read leases (reservations) and write leases (staged chunks).

Leases have parts, one per rank. A part ends once; ending it again is a counted no-op. Sessions
know which peer (process) writes for which rank, because staged memory is only reused when that
process confirmed or is provably gone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvkeep.core.common_prefix import common_prefix
from kvkeep.core.events import ObjectRows
from kvkeep.core.eviction import Chunk
from kvkeep.types import (
    ChunkHash,
    Fingerprint,
    LeaseId,
    Namespace,
    PeerId,
    RowSpec,
    SlotId,
    TicketId,
)

NO_TICKET = TicketId(0)
NO_FINGERPRINT = Fingerprint(b"")
_SPACES_KEPT = 1_024
_HELD_PARTS = 64


@dataclass(slots=True)
class Peer:
    """One connection and the process behind it."""

    id: PeerId
    session: str
    rank: int | None  # the rank it writes for; None for a pure scheduler
    dma: bool
    writes: bool = True  # False: it is never given a handle for writing
    open: bool = True
    gone: bool = False
    orphans: set[SlotId] = field(default_factory=set)  # extents it may still write


@dataclass(slots=True)
class ReadLease:
    """Chunks reserved for one request; `live_ranks` are the parts that have not ended."""

    id: LeaseId
    session: str
    request: str
    chunks: list[Chunk]
    live_ranks: set[int]
    since_s: float
    ticket: TicketId = NO_TICKET  # the pending lookup it grows for; nobody has seen it yet


@dataclass(slots=True)
class WriteLease:
    """One chunk being written: a slot per row, each with the peer that writes it."""

    id: LeaseId
    session: str
    request: str
    hash: ChunkHash
    parent: ChunkHash
    space: Namespace
    depth: int
    slots: tuple[SlotId, ...]
    writers: tuple[PeerId, ...]
    since_s: float
    doomed: bool = False  # not to be published: its layout was forgotten meanwhile


class Held:
    """How many read leases of a session list each chunk; in parts, so that none grows for long."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[Chunk, int]] = [{} for _ in range(_HELD_PARTS)]

    def __contains__(self, chunk: object) -> bool:
        return isinstance(chunk, Chunk) and chunk in self._parts[chunk.rows[0] % _HELD_PARTS]

    def counts(self) -> dict[Chunk, int]:
        """Every chunk with its number of leases. O(chunks)."""
        return {chunk: count for part in self._parts for chunk, count in part.items()}

    def add(self, chunks: Sequence[Chunk]) -> int:
        """One more lease lists these; the bytes of those that none listed before."""
        parts, new_bytes = self._parts, 0
        for chunk in chunks:
            part = parts[chunk.rows[0] % _HELD_PARTS]
            if chunk in part:
                part[chunk] += 1
            else:
                part[chunk] = 1
                new_bytes += chunk.size_bytes
        return new_bytes

    def remove(self, chunk: Chunk) -> bool:
        """One lease less; True when none is left."""
        part = self._parts[chunk.rows[0] % _HELD_PARTS]
        count = part.pop(chunk) - 1
        if count:
            part[chunk] = count
        return not count


@dataclass(slots=True)
class Session:
    """All connections of one engine instance."""

    id: str
    world: int
    recompute: bool
    model: str = ""
    scheduler: PeerId | None = None
    workers: dict[int, PeerId] = field(default_factory=dict)
    rows: dict[int, tuple[RowSpec, ...]] = field(default_factory=dict)  # by rank
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)
    writes: bool = True
    reads_open: dict[LeaseId, ReadLease] = field(default_factory=dict)
    writes_open: dict[LeaseId, WriteLease] = field(default_factory=dict)
    reserved_bytes: int = 0
    staging_bytes: int = 0
    all_rows: tuple[RowSpec, ...] = ()  # rank-major, set when ready
    row_ranks: tuple[int, ...] = ()
    fingerprint: Fingerprint = NO_FINGERPRINT  # of all ranks, set when ready
    objects: ObjectRows = field(default_factory=lambda: ObjectRows(1, ()))
    chunk_bytes: int = 0  # rounded bytes of one chunk over all rows
    leading_run: bool = True  # a row needs every chunk, so a hit is the leading resident run
    held: Held = field(default_factory=Held)
    wanted: Counter[ChunkHash] = field(default_factory=Counter)  # awaited by pending lookups
    spaces: dict[str | None, Namespace] = field(default_factory=dict)  # by salt, made before

    def space(self, salt: str | None) -> Namespace:
        """Where this session's objects under a salt are kept; mostly the same object again."""
        space = self.spaces.get(salt)
        if space is None or (space.fingerprint, space.model) != (self.fingerprint, self.model):
            if len(self.spaces) >= _SPACES_KEPT:
                self.spaces.clear()
            space = self.spaces[salt] = Namespace(self.fingerprint, salt, self.model)
        return space

    def hold(self, chunks: Sequence[Chunk]) -> None:
        """One more read lease of this session lists these chunks."""
        self.reserved_bytes += self.held.add(chunks)

    def release(self, chunk: Chunk) -> None:
        """One read lease less."""
        if self.held.remove(chunk):
            self.reserved_bytes -= chunk.size_bytes

    @property
    def ready(self) -> bool:
        """Scheduler and every rank have said Hello."""
        return self.scheduler is not None and len(self.workers) == self.world


def usable(session: Session, held: Sequence[bool]) -> int:
    """The common prefix when every row holds the same chunks."""
    if session.leading_run:
        return held.index(False) if False in held else len(held)
    rows = session.all_rows
    return common_prefix(rows, [held] * len(rows), len(held))
