"""Decides hits: finds the common prefix of resident chunks, reserves it, and says why not more."""

from array import array
from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.leases import ReadLease, Session, usable
from kvkeep.types import NO_LEASE, ChunkHash, LeaseId, Reason, SlotId

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory


@dataclass(frozen=True, slots=True)
class Asked:
    """One lookup, and what L2 has said about it."""

    request: str
    hashes: list[ChunkHash]
    near: bool
    in_l2: Container[int] = ()  # positions that a backend has, for what that is worth
    unknown: Reason = Reason.NEVER_STORED  # why a chunk is nowhere that left no trace in L1
    down: bool = False  # a backend could not say what it has


class Finder:
    """The lookup of DESIGN section 4, for L1."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory

    def lookup(self, event: ev.Lookup, now_s: float) -> ev.Hit | ev.Pending:
        """Reserve the longest common prefix; one reason for every chunk beyond it.

        Pending when L2 may have more.
        """
        hashes = self._d.split(event.hashes)
        session = self._d.sessions.get(event.session)
        if session is None or not session.ready:
            return ev.Hit(NO_LEASE, 0, (), (Reason.NOT_READY,) * len(hashes))
        found = self._found(session, hashes)
        if found is None:
            return self._mismatch(hashes)
        length = usable(session, [chunk is not None for chunk in found])
        if length < len(hashes) and self._may_fetch(event):
            return self._d.fetcher.begin(event, session, hashes, now_s)
        # Where L2 was not asked, nobody knows whether it has the chunk.
        unasked = self._d.limits.backends > 0 and length < len(hashes)
        unknown = Reason.L2_TIMEOUT if unasked else Reason.NEVER_STORED
        asked = Asked(event.request, hashes, event.near, unknown=unknown)
        return self._local(session, asked, found, now_s)

    def _may_fetch(self, event: ev.Lookup) -> bool:
        return event.fetch and event.wait_s != 0.0 and self._d.limits.backends > 0

    def local(self, session: Session, asked: "Asked", now_s: float) -> ev.Hit:
        """The answer from L1 alone; `asked` says what L2 has told."""
        found = self._found(session, asked.hashes)
        if found is None:
            return self._mismatch(asked.hashes)
        return self._local(session, asked, found, now_s)

    def _local(
        self, session: Session, asked: "Asked", found: list[Chunk | None], now_s: float
    ) -> ev.Hit:
        length = usable(session, [chunk is not None for chunk in found])
        fits = self._under_cap(session, found[:length])
        if fits < length and not asked.near:  # the answer stands, the reservation comes later
            return ev.Hit(NO_LEASE, length, (), self._reasons(asked, found, length, length))
        if fits < length:
            fits = usable(session, [chunk is not None for chunk in found[:fits]])
        reasons = self._reasons(asked, found, fits, length)
        if not fits:
            return ev.Hit(NO_LEASE, 0, (), reasons)
        prefix = found[:fits]
        chunks = [chunk for chunk in prefix if chunk is not None]
        lease = self._reserve(session, asked.request, chunks, now_s)
        return answer(self._d, lease, prefix, reasons)

    def _found(self, session: Session, hashes: list[ChunkHash]) -> list[Chunk | None] | None:
        """What is resident of these; None when a key has another layout."""
        found = self._d.residents.index.find(hashes)
        specs = session.all_rows
        if any(chunk is not None and chunk.specs is not specs for chunk in found):
            return None
        return found

    def _mismatch(self, hashes: list[ChunkHash]) -> ev.Hit:
        """A key of another layout: cannot happen with honest hashes, so nothing is served."""
        self._d.counters["layout_mismatch"] += 1
        return ev.Hit(NO_LEASE, 0, (), (Reason.LAYOUT_MISMATCH,) * len(hashes))

    def _under_cap(self, session: Session, prefix: list[Chunk | None]) -> int:
        """How many leading chunks the session may reserve; a hole costs nothing."""
        room = self._d.chunks_to_reserve(session)
        if room >= len(prefix):
            return len(prefix)
        for position, chunk in enumerate(prefix):
            if chunk is not None and chunk not in session.held:
                room -= 1
                if room < 0:
                    return position
        return len(prefix)

    def _reserve(
        self, session: Session, request: str, chunks: list[Chunk], now_s: float
    ) -> ReadLease:
        self._d.residents.policy.used(chunks)
        self._d.slots.hold([slot for chunk in chunks for slot in chunk.rows])
        session.hold(chunks)
        ranks = set(session.row_ranks)
        lease = ReadLease(LeaseId(self._d.new_id()), session.id, request, chunks, ranks, now_s)
        session.reads_open[lease.id] = lease
        return lease

    def _reasons(
        self, asked: "Asked", found: list[Chunk | None], hit: int, length: int
    ) -> tuple[Reason, ...]:
        """Reasons of chunks from `hit` on; from `hit` to `length` there was no room to reserve."""
        reasons = [Reason.NO_ROOM] * (length - hit)
        why_absent = self._d.residents.why_absent
        for position in range(length, len(found)):
            if found[position] is not None or position in asked.in_l2:
                reason = Reason.BEHIND
            elif asked.down:
                reason = Reason.L2_ERROR
            else:
                reason = why_absent(asked.hashes[position], asked.unknown)
            reasons.append(reason)
        return tuple(reasons)


def answer(
    directory: "Directory",
    lease: ReadLease,
    prefix: list[Chunk | None],
    reasons: tuple[Reason, ...],
    tiers: bytes = b"",
) -> ev.Hit:
    """The hit of a lease that holds every chunk of `prefix`."""
    chunks = lease.chunks
    rows = len(chunks[0].rows) if chunks else 0
    columns = [columns_of(directory, [chunk.rows[row] for chunk in chunks]) for row in range(rows)]
    if len(chunks) < len(prefix):
        columns = [_with_holes(column, prefix) for column in columns]
    return ev.Hit(lease.id, len(prefix), tuple(columns), reasons, tiers)


def columns_of(directory: "Directory", slots: list[SlotId]) -> ev.Columns:
    """Handles of one row as three u64 columns."""
    table = directory.slots
    offsets, generations = table.offset, table.generations
    return ev.Columns(
        array("Q", slots).tobytes(),
        array("Q", [offsets[s] for s in slots]).tobytes(),
        array("Q", [generations[s] for s in slots]).tobytes(),
    )


def _with_holes(column: ev.Columns, prefix: list[Chunk | None]) -> ev.Columns:
    """The same handles, with `NO_SLOT` where the prefix has no chunk."""

    def spread(packed: bytes, hole: int) -> bytes:
        words = iter(array("Q", packed))
        return array("Q", [hole if chunk is None else next(words) for chunk in prefix]).tobytes()

    return ev.Columns(
        spread(column.slots, ev.NO_SLOT), spread(column.offsets, 0), spread(column.generations, 0)
    )
