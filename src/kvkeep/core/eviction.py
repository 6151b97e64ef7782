"""Decides which chunks leave L1: the policy interface and prefix-aware LRU.

A policy is told when a chunk becomes resident, used, idle or gone. `evict` names chunks whose
removal makes one run of the wanted length, or nothing; it changes nothing itself (atomic: the
directory removes all of them or none).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from kvkeep.types import ChunkHash, Namespace, RowSpec, SlotId

_SEEDS = 8  # how many of the coldest chunks are tried as the middle of a window


class Chunk:
    """One resident chunk: a slot per (kv_rank, group) row of its layout."""

    __slots__ = (
        "children",
        "depth",
        "hash",
        "last_use",
        "linked",
        "parent",
        "queued",
        "rows",
        "size_bytes",
        "space",
        "specs",
        "stored",
    )

    def __init__(
        self,
        chunk_hash: ChunkHash,
        parent: ChunkHash,
        *,
        rows: tuple[SlotId, ...],
        specs: tuple[RowSpec, ...],
        size_bytes: int,
        space: Namespace,
        depth: int = 0,
        stored: int = 0,
    ) -> None:
        self.hash = chunk_hash
        self.parent = parent
        self.rows = rows  # row -> slot
        self.specs = specs  # the layout of `rows`; interned, so compared with `is`
        self.size_bytes = size_bytes  # arena bytes of all rows
        self.space = space
        self.depth = depth  # chunks of its prompt before it
        self.stored = stored  # bit n: backend n has all of it
        self.children = 0  # resident chunks whose parent this is
        self.last_use = 0  # the policy's clock
        self.queued = False  # the policy has it in its queue of candidates
        self.linked = True  # findable; False once dropped while readers remain

    @property
    def salt(self) -> str | None:
        """Of its namespace."""
        return self.space.salt


class Space(Protocol):
    """What a policy may ask about memory."""

    def idle(self, chunk: Chunk) -> bool:
        """True when nobody reads or pins the chunk."""

    def window(
        self, chunk: Chunk, bytes_needed: int, *, gaps_only: bool = False
    ) -> list[Chunk] | None:
        """Idle chunks around `chunk` whose removal makes a run of `bytes_needed`, or None.

        With `gaps_only` the gaps between them alone make up `bytes_needed`.
        """

    def lost_in_gaps(self, bytes_needed: int) -> bool:
        """True when much memory is free, but in gaps that are all shorter than `bytes_needed`."""


class EvictionPolicy(Protocol):
    """Chooses victims; a plug-in under `[policy] eviction`."""

    def added(self, chunk: Chunk) -> None:
        """The chunk became resident."""

    def used(self, chunks: Sequence[Chunk]) -> None:
        """The chunks were part of a hit, or were stored again; in order of their prefix."""

    def idle(self, chunk: Chunk) -> None:
        """The chunk's last reader left, or its last resident child did."""

    def removed(self, chunk: Chunk) -> None:
        """The chunk is no longer resident."""

    def evict(self, bytes_needed: int, space: Space) -> list[Chunk]:
        """Chunks to remove for one run of `bytes_needed`; empty when no seed leads to one."""

    def coldest(self, most: int, space: Space) -> list[Chunk]:
        """Up to `most` chunks that would go first; nothing changes."""


class PrefixLRU:
    """Least recently used first, and a chunk always before its ancestors.

    Only idle chunks without resident children are candidates. The heap has one entry per chunk,
    checked when it comes up: used since then, it goes further back. Exception, stated: when sizes
    are mixed, the neighbours that a window takes may include a chunk whose descendants stay; those
    then age out. After a shift of the mix, gaps too short for the new size are won back by evicting
    cold neighbours together.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._resident = 0
        self._heap: list[tuple[int, int, Chunk]] = []
        self._pushes = 0

    def added(self, chunk: Chunk) -> None:
        self._resident += 1
        self.used((chunk,))
        self.idle(chunk)

    def used(self, chunks: Sequence[Chunk]) -> None:
        clock = self._clock
        for chunk in chunks:
            clock += 1
            chunk.last_use = clock
        self._clock = clock

    def idle(self, chunk: Chunk) -> None:
        if chunk.children == 0:
            self._push(chunk)

    def removed(self, chunk: Chunk) -> None:
        self._resident -= 1

    def evict(self, bytes_needed: int, space: Space) -> list[Chunk]:
        best: list[Chunk] = []
        best_heat = -1
        seeds = []
        gaps = space.lost_in_gaps(bytes_needed)
        for chunk in self._coldest(space):
            seeds.append(chunk)
            if gaps:
                between = space.window(chunk, bytes_needed, gaps_only=True) or []
                warm = (seeds[0].last_use + self._clock) // 2  # only the colder half goes for gaps
                if between and all(victim.last_use <= warm for victim in between):
                    best = between
                    break
            victims = space.window(chunk, bytes_needed)
            if victims is not None:
                heat = max(victim.last_use for victim in victims)
                if not best or heat < best_heat:
                    best, best_heat = victims, heat
                if len(victims) == 1 and not gaps:
                    break  # the coldest chunk alone makes the room
            if len(seeds) >= _SEEDS:
                break
        for chunk in seeds:
            self._push(chunk)
        return best

    def coldest(self, most: int, space: Space) -> list[Chunk]:
        chunks = list(islice(self._coldest(space), most))
        for chunk in chunks:
            self._push(chunk)
        return chunks

    def _coldest(self, space: Space) -> Iterator[Chunk]:
        """Pop candidates, coldest first; the caller pushes back what stays."""
        while self._heap:
            last_use, _, chunk = heapq.heappop(self._heap)
            chunk.queued = False
            if chunk.linked and chunk.children == 0 and space.idle(chunk):
                if chunk.last_use == last_use:
                    yield chunk
                else:  # used since it was pushed: it has a place further back
                    self._push(chunk)

    def _push(self, chunk: Chunk) -> None:
        if chunk.queued:
            return
        chunk.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (chunk.last_use, self._pushes, chunk))
        if len(self._heap) > 2 * self._resident + 1024:  # mostly chunks that are gone
            self._heap = [entry for entry in self._heap if entry[2].linked]
            heapq.heapify(self._heap)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": PrefixLRU}
