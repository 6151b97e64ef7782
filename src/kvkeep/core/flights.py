"""Owns fetches: chunks on their way from a backend into staged extents, and how many may be.

Bounded in bytes and in number per backend. A fetch past its deadline is late: nobody waits for it,
it counts against its own backend only, and its extents are reused when its I/O has returned. One
fetch per chunk is under way at any time.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.tickets import Ticket
from kvkeep.types import (
    ChunkHash,
    IoOutcome,
    Namespace,
    Reason,
    RowSpec,
    SlotId,
    SlotState,
    TransferId,
    worst_of,
)

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

_NO_PARENT = ChunkHash(b"")  # a lookup does not say the root of its first chunk

_REASON_OF = {
    IoOutcome.MISSING: Reason.L2_MISS,
    IoOutcome.CORRUPT: Reason.CORRUPT,
    IoOutcome.LAYOUT_MISMATCH: Reason.LAYOUT_MISMATCH,
    IoOutcome.TIMEOUT: Reason.L2_TIMEOUT,
}


@dataclass(eq=False, slots=True)
class Fetching:
    """One chunk on its way from a backend into staged extents."""

    id: TransferId
    backend: int
    hash: ChunkHash
    parent: ChunkHash
    space: Namespace
    depth: int
    specs: tuple[RowSpec, ...]
    slots: tuple[SlotId, ...]
    size_bytes: int
    waiters: dict[Ticket, int] = field(default_factory=dict)  # -> the chunk's position in it
    late: bool = False  # past its deadline: nobody waits, its I/O still runs
    doomed: bool = False  # not to be published, whatever comes


class Flights:
    """Every fetch whose I/O has not returned."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory
        self.fetches: dict[TransferId, Fetching] = {}
        self.by_hash: dict[ChunkHash, Fetching] = {}
        self.staged_bytes = 0  # of all fetches, late ones too
        self._bytes_from = [0] * directory.limits.backends
        self._number_from = [0] * directory.limits.backends
        self._last_id = 0

    def coming(self, chunk_hash: ChunkHash) -> bool:
        """Whether the chunk is on its way and may arrive in time."""
        fetch = self.by_hash.get(chunk_hash)
        return fetch is not None and not fetch.late and not fetch.doomed

    def most_bytes(self) -> int:
        """How many bytes may be on their way from L2."""
        limits = self._d.limits
        share = int(limits.fetch_fraction * self._d.arena.populated_bytes)
        return min(limits.fetch_bytes, share)

    def backend_for(self, holders: int, size_bytes: int) -> int | None:
        """One of `holders` (bit n: backend n) that may begin another fetch.

        Each has an equal share of the bytes: one that hangs does not hold up another.
        """
        limits = self._d.limits
        most_bytes = self.most_bytes() // max(1, limits.backends)
        for backend in range(limits.backends):
            busy = self._number_from[backend]
            fits = self._bytes_from[backend] + size_bytes <= most_bytes or not busy
            if holders >> backend & 1 and busy < limits.fetches_per_backend and fits:
                return backend
        return None

    def start(self, ticket: Ticket, position: int, backend: int) -> bool:
        """Take extents and emit the fetch; False: there is no room now."""
        d, session = self._d, ticket.session
        size = session.chunk_bytes
        slots = d.stager.take([spec.object_bytes for spec in session.all_rows])
        if slots is None:
            return False
        self._last_id += 1
        fetch = Fetching(
            TransferId(self._last_id),
            backend,
            ticket.hashes[position],
            ticket.hashes[position - 1] if position else _NO_PARENT,
            session.space(ticket.salt),
            position,
            session.all_rows,
            tuple(slots),
            size,
            {ticket: position},
        )
        self.fetches[fetch.id] = self.by_hash[fetch.hash] = fetch
        self._count(fetch, 1)
        offsets = tuple([d.slots.offset[slot] for slot in slots])
        d.effects.append(
            ev.Fetch(fetch.id, backend, fetch.space, session.objects, fetch.hash, position, offsets)
        )
        d.counters["fetches"] += 1
        return True

    def late(self, transfer: TransferId) -> Fetching | None:
        """The deadline has passed and the I/O still runs."""
        fetch = self.fetches.get(transfer)
        if fetch is None or fetch.late:
            return None
        fetch.late = True
        self._d.counters["fetch_late"] += 1
        return fetch

    def returned(self, event: ev.Fetched) -> tuple[Fetching, Chunk | None, Reason] | None:
        """Publish good bytes, free the extents otherwise. The chunk that is resident now, if any.

        Good bytes are published although nobody waits any more: they cost nothing now. Not so when
        the chunk was dropped or forgotten meanwhile, or an engine committed it first.
        """
        fetch = self.fetches.pop(event.transfer, None)
        if fetch is None:
            return None
        d = self._d
        del self.by_hash[fetch.hash]
        self._count(fetch, -1)
        worst = worst_of(event.outcomes)
        d.counters[f"fetched_{worst.name.lower()}"] += 1
        chunk = d.residents.index.get(fetch.hash)
        if worst is IoOutcome.OK and chunk is None and not fetch.doomed:
            chunk = self._publish(fetch)
        else:
            for slot in fetch.slots:
                d.slots.move(slot, SlotState.FREE)
        reason = Reason.EVICTED if fetch.doomed else _REASON_OF.get(worst, Reason.L2_ERROR)
        return fetch, chunk, reason

    def _publish(self, fetch: Fetching) -> Chunk:
        residents = self._d.residents
        residents.attach(fetch.parent)
        chunk = Chunk(
            fetch.hash,
            fetch.parent,
            rows=fetch.slots,
            specs=fetch.specs,
            size_bytes=fetch.size_bytes,
            space=fetch.space,
            depth=fetch.depth,
            stored=1 << fetch.backend,
        )
        residents.publish(chunk)
        self._d.counters["fetched_bytes"] += fetch.size_bytes
        return chunk

    def doom(self, chunk_hash: ChunkHash | None = None) -> None:
        """What is on its way (of one chunk, or all) is not to be published."""
        for fetch in self.fetches.values():
            fetch.doomed |= chunk_hash is None or fetch.hash == chunk_hash

    def _count(self, fetch: Fetching, way: int) -> None:
        self.staged_bytes += way * fetch.size_bytes
        self._d.quotas.staged(fetch.space.salt, way * fetch.size_bytes)
        self._bytes_from[fetch.backend] += way * fetch.size_bytes
        self._number_from[fetch.backend] += way
