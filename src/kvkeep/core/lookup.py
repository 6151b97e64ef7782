"""Decides hits: finds the common prefix of resident chunks, reserves it, and says why not more."""

from array import array
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.common_prefix import common_prefix
from kvkeep.core.eviction import Chunk
from kvkeep.core.leases import ReadLease, Session
from kvkeep.types import NO_LEASE, ChunkHash, LeaseId, Reason, SlotId

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory


class Finder:
    """The lookup of DESIGN section 4, for L1."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory

    def lookup(self, event: ev.Lookup, now_s: float) -> ev.Hit:
        """Reserve the longest common prefix; one reason for every chunk beyond it."""
        hashes = self._d.split(event.hashes)
        session = self._d.sessions.get(event.session)
        if session is None or not session.ready:
            return ev.Hit(NO_LEASE, 0, (), (Reason.NOT_READY,) * len(hashes))
        index = self._d.residents.index
        found = [index.get(h) for h in hashes]
        specs = session.all_rows
        if any(c is not None and c.specs is not specs for c in found):
            return self._mismatch(found)
        length = self._usable(session, found)
        prefix = [c for c in found[:length] if c is not None]
        fits = self._under_cap(session, prefix)
        if fits < length and not event.near:  # the answer stands, the reservation comes later
            return ev.Hit(NO_LEASE, length, (), self._reasons(hashes, found, length, length))
        reasons = self._reasons(hashes, found, fits, length)
        del prefix[fits:]
        if not prefix:
            return ev.Hit(NO_LEASE, 0, (), reasons)
        lease_id = self._reserve(session, event.request, prefix, now_s)
        columns = tuple(
            columns_of(self._d, [chunk.rows[row] for chunk in prefix])
            for row in range(len(session.all_rows))
        )
        return ev.Hit(lease_id, len(prefix), columns, reasons)

    def _mismatch(self, found: list[Chunk | None]) -> ev.Hit:
        """A key of another layout: cannot happen with honest hashes, so nothing is served."""
        self._d.counters["layout_mismatch"] += 1
        return ev.Hit(NO_LEASE, 0, (), (Reason.LAYOUT_MISMATCH,) * len(found))

    def _usable(self, session: Session, found: list[Chunk | None]) -> int:
        rows = len(session.all_rows)
        if rows > 1:
            held = [[c is not None and c.rows[r] >= 0 for c in found] for r in range(rows)]
            return common_prefix(session.all_rows, held, len(found))
        try:
            return found.index(None)
        except ValueError:
            return len(found)

    def _under_cap(self, session: Session, prefix: list[Chunk]) -> int:
        """How many leading chunks the session may reserve."""
        cap = int(self._d.limits.session_reserve_fraction * self._d.arena.populated_bytes)
        room = (cap - session.reserved_bytes) // session.chunk_bytes
        if room >= len(prefix):
            return len(prefix)
        for position, chunk in enumerate(prefix):
            if chunk not in session.held:
                room -= 1
                if room < 0:
                    return position
        return len(prefix)

    def _reserve(
        self, session: Session, request: str, prefix: list[Chunk], now_s: float
    ) -> LeaseId:
        used = self._d.residents.policy.used
        hold = self._d.slots.hold
        for chunk in prefix:
            used(chunk)
            for slot in chunk.rows:
                hold(slot)
            session.hold(chunk)
        ranks = set(session.row_ranks)
        lease = ReadLease(LeaseId(self._d.new_id()), session.id, request, prefix, ranks, now_s)
        session.reads_open[lease.id] = lease
        return lease.id

    def _reasons(
        self, hashes: list[ChunkHash], found: list[Chunk | None], hit: int, usable: int
    ) -> tuple[Reason, ...]:
        """Reasons of chunks from `hit` on; from `hit` to `usable` there was no room to reserve."""
        reasons = [Reason.NO_ROOM] * (usable - hit)
        first: Reason | None = None
        for chunk_hash, chunk in zip(hashes[usable:], found[usable:], strict=True):
            if chunk is None:
                reason = self._d.residents.why_absent(chunk_hash)
            else:  # resident, but beyond a hole: lost for the reason of the hole
                reason = first or Reason.GROUP_SHORT
            first = first or reason
            reasons.append(reason)
        return tuple(reasons)


def columns_of(directory: "Directory", slots: list[SlotId]) -> ev.Columns:
    """Handles of one row as three u64 columns."""
    table = directory.slots
    offsets, generations = table.offset, table.generations
    return ev.Columns(
        array("Q", slots).tobytes(),
        array("Q", [offsets[s] for s in slots]).tobytes(),
        array("Q", [generations[s] for s in slots]).tobytes(),
    )
