"""Decides which reads end early when others need their memory (DESIGN section 2).

A read may be revoked, since its reader compares generations and computes what it lost. The first to
go are reads of engines that are stopped, whoever wants the memory. For a lookup that waits for
room, reads that began after it go too, the youngest first: an older request never loses for a
younger one. Only sessions that recompute are touched, and only when that makes enough room.
"""

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.leases import ReadLease, Session
from kvkeep.core.tickets import Ticket

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

_MOST_LEASES = 64  # looked at, and revoked, in one event
_MOST_CHUNKS = 4_096  # looked at in one event


class Pressure:
    """Who lacks memory, and whose reads give it."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory
        self._staging_bytes = 0  # of a chunk that an engine could not store

    def not_staged(self, chunk_bytes: int) -> None:
        """An engine wanted to store a chunk, and nothing more could be evicted."""
        self._staging_bytes = chunk_bytes

    def felt(self) -> bool:
        """Whether somebody lacks memory that readers hold. O(1)."""
        if not self._d.slots.reserved_bytes:
            self._staging_bytes = 0
            return False
        return self._staging_bytes > 0 or self._waiting() is not None

    def readers(self) -> Iterator[str]:
        """Sessions whose reads may be revoked."""
        return (s.id for s in self._d.sessions.values() if s.recompute and s.reads_open)

    def relieve(self, event: ev.Relieve) -> ev.Done:
        """Revoke what makes room for who waits; how many reads ended."""
        d = self._d
        waiting = self._waiting()
        need_bytes = waiting.session.chunk_bytes if waiting is not None else self._staging_bytes
        self._staging_bytes = 0
        if not need_bytes:
            return ev.Done(0)
        victims = self._enough(self._candidates(event.stopped, waiting), need_bytes)
        for session, lease in victims:
            d.counters["revoked_for_room"] += 1
            d.revoke(session, lease)
        return ev.Done(len(victims))

    def _waiting(self) -> Ticket | None:
        """The oldest lookup that has something to fetch and no memory for it."""
        ticket = self._d.fetcher.lacks_room
        return ticket if ticket is not None and ticket.id in self._d.fetcher.queued else None

    def _candidates(
        self, stopped: Container[str], waiting: Ticket | None
    ) -> Iterator[tuple[Session, ReadLease]]:
        """Reads that may go, in the order in which they do."""
        sessions = [s for s in self._d.sessions.values() if s.recompute and s.reads_open]
        for session in sessions:
            if session.id in stopped:
                yield from ((session, lease) for lease in list(session.reads_open.values()))
        if waiting is None:
            return
        live = [_youngest_first(s) for s in sessions if s.id not in stopped]
        for session, lease in heapq.merge(*live, key=lambda pair: -pair[1].since_s):
            if lease.since_s <= waiting.since_s:
                return
            if lease.ticket != waiting.id:
                yield session, lease

    def _enough(
        self, candidates: Iterable[tuple[Session, ReadLease]], need_bytes: int
    ) -> list[tuple[Session, ReadLease]]:
        """The first of them that together free the bytes; nothing when they do not."""
        chosen: list[tuple[Session, ReadLease]] = []
        ours: Counter[Chunk] = Counter()  # readers that would be gone
        freed: set[Chunk] = set()
        readers = self._d.slots.readers
        freed_bytes = looked_at = 0
        for session, lease in islice(candidates, _MOST_LEASES):
            for chunk in lease.chunks:
                ours[chunk] += 1
                if chunk not in freed and max(readers[s] for s in chunk.rows) <= ours[chunk]:
                    freed.add(chunk)
                    freed_bytes += chunk.size_bytes
            chosen.append((session, lease))
            looked_at += len(lease.chunks)
            if freed_bytes >= need_bytes:
                return chosen
            if looked_at > _MOST_CHUNKS:
                break
        return []


def _youngest_first(session: Session) -> Iterator[tuple[Session, ReadLease]]:
    return ((session, lease) for lease in reversed(list(session.reads_open.values())))
