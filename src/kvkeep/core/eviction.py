"""Decides which chunks leave L1: the policy interface and prefix-aware LRU.

A policy is told when a chunk becomes resident, used, idle, a parent or gone. `evict` names chunks
whose removal makes one run of the wanted length, or nothing; it changes nothing itself (atomic: the
directory removes all of them or none). A call looks at a bounded number of chunks.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

from kvkeep.core.candidates import Candidates
from kvkeep.types import ChunkHash, Namespace, RowSpec, SlotId

_SEEDS = 8  # how many of the coldest chunks are tried as the middle of a window
_LOOK = 1_024  # candidates looked at in one call: those being read are passed over
_CATCH_UP = 8_192  # older candidates looked through for one salt in one call
_CATCH_UP_OWN = 1_024  # and at most so many of them are its own


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
        self.children = 0  # staged and resident chunks whose parent this is
        self.last_use = 0  # the policy's clock
        self.queued = False  # it is one of the policy's candidates
        self.linked = True  # findable; False once dropped while readers remain

    @property
    def salt(self) -> str | None:
        """Of its namespace."""
        return self.space.salt


class Space(Protocol):
    """What a policy may ask about memory."""

    def idle(self, chunk: Chunk) -> bool:
        """True when nobody reads or pins the chunk."""

    def may_go(self, chunk: Chunk) -> bool:
        """True when it is idle, and not what the memory is wanted for."""

    def parent(self, chunk: Chunk) -> Chunk | None:
        """The chunk before it, when that is resident."""

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
        """The chunk's last reader left, or its last child did."""

    def extended(self, chunk: Chunk) -> None:
        """The chunk got its first child, staged or resident: its suffix goes before it."""

    def removed(self, chunk: Chunk) -> None:
        """The chunk is no longer resident."""

    def evict(self, bytes_needed: int, space: Space) -> list[Chunk]:
        """Chunks to remove for one run of `bytes_needed`; empty when no seed leads to one."""

    def coldest(self, most: int, space: Space) -> list[Chunk]:
        """Up to `most` chunks that would go first; nothing changes."""

    def limit(self, salt: str | None) -> None:
        """Chunks of this salt may be asked for by `evict_of`; again is no change."""

    def unlimit(self, salt: str | None) -> None:
        """They are not, for now."""

    def evict_of(self, salt: str | None, bytes_needed: int, space: Space) -> list[Chunk]:
        """The coldest chunks of one salt that add up to `bytes_needed`, or none at all.

        A chunk comes before its ancestors: removed in this order, no suffix is left behind.
        """


class _OfSalt:
    """The candidates of one salt; those from before its limit are sorted in by and by."""

    def __init__(self, until: int) -> None:
        self.candidates = Candidates()
        self.seen = 0  # last use up to which older candidates were looked through
        self.until = until


class PrefixLRU:
    """Least recently used first, and a chunk always before its ancestors.

    Candidates are chunks without children; one that is being read is taken out when it comes up,
    and comes back when its last reader leaves. Exception, stated: when sizes are mixed, the
    neighbours that a window takes may include a chunk whose descendants stay; those then age out.
    After a shift of the mix, gaps too short for the new size are won back by evicting cold
    neighbours together.
    """

    def __init__(self) -> None:
        self._clock = 0
        self._candidates = Candidates()
        self._salts: dict[str | None, _OfSalt] = {}

    def added(self, chunk: Chunk) -> None:
        self.used((chunk,))
        self.idle(chunk)

    def used(self, chunks: Sequence[Chunk]) -> None:
        clock = self._clock
        for chunk in chunks:
            clock += 1
            if chunk.queued:
                self._take_out(chunk)
                chunk.last_use = clock
                self._put_in(chunk)
            else:
                chunk.last_use = clock
        self._clock = clock

    def idle(self, chunk: Chunk) -> None:
        if chunk.children == 0 and not chunk.queued:
            self._put_in(chunk)

    def extended(self, chunk: Chunk) -> None:
        if chunk.queued:
            self._take_out(chunk)

    def removed(self, chunk: Chunk) -> None:
        if chunk.queued:
            self._take_out(chunk)

    def evict(self, bytes_needed: int, space: Space) -> list[Chunk]:
        best: list[Chunk] = []
        best_heat = -1
        coldest = -1
        gaps = space.lost_in_gaps(bytes_needed)
        for chunk in islice(self._coldest(self._candidates, space), _SEEDS):
            if coldest < 0:
                coldest = chunk.last_use
            if gaps:
                between = space.window(chunk, bytes_needed, gaps_only=True) or []
                warm = (coldest + self._clock) // 2  # only the colder half goes for gaps
                if between and all(victim.last_use <= warm for victim in between):
                    return between
            victims = space.window(chunk, bytes_needed)
            if victims is not None:
                heat = max(victim.last_use for victim in victims)
                if not best or heat < best_heat:
                    best, best_heat = victims, heat
                if len(victims) == 1 and not gaps:
                    break  # the coldest chunk alone makes the room
        return best

    def coldest(self, most: int, space: Space) -> list[Chunk]:
        return list(islice(self._coldest(self._candidates, space), most))

    def limit(self, salt: str | None) -> None:
        if salt not in self._salts:
            self._salts[salt] = _OfSalt(self._clock)

    def unlimit(self, salt: str | None) -> None:
        self._salts.pop(salt, None)

    def evict_of(self, salt: str | None, bytes_needed: int, space: Space) -> list[Chunk]:
        self.limit(salt)
        own = self._salts[salt]
        self._catch_up(salt, own)
        victims: list[Chunk] = []
        taken_of: dict[Chunk, int] = {}  # victims that are children of it
        bare: list[tuple[int, Chunk]] = []  # parents whose children are all victims
        leaves = self._coldest(own.candidates, space)
        leaf = next(leaves, None)
        while bytes_needed > 0 and (leaf or bare):
            if leaf is None or (bare and bare[0][0] < leaf.last_use):
                _, chunk = heapq.heappop(bare)
            else:
                chunk, leaf = leaf, next(leaves, None)
            if not space.may_go(chunk):
                continue
            victims.append(chunk)
            bytes_needed -= chunk.size_bytes
            parent = space.parent(chunk)
            if parent is not None:
                taken = taken_of[parent] = taken_of.get(parent, 0) + 1
                if taken == parent.children:
                    heapq.heappush(bare, (parent.last_use, parent))
        return [] if bytes_needed > 0 else victims

    def _catch_up(self, salt: str | None, own: _OfSalt) -> None:
        """Sort in some candidates from before the limit."""
        if own.seen >= own.until:
            return
        part = self._candidates.part(own.seen, _CATCH_UP)
        found = [chunk for chunk in part if chunk.space.salt == salt][:_CATCH_UP_OWN]
        for chunk in found:
            if chunk not in own.candidates:
                own.candidates.add(chunk)
        if len(found) == _CATCH_UP_OWN:
            own.seen = found[-1].last_use
        else:
            own.seen = part[-1].last_use if len(part) == _CATCH_UP else own.until

    def _coldest(self, candidates: Candidates, space: Space) -> Iterator[Chunk]:
        """Idle candidates, coldest first."""
        for chunk in islice(candidates.after(0), _LOOK):
            if space.idle(chunk):
                yield chunk
            else:
                self._take_out(chunk)

    def _put_in(self, chunk: Chunk) -> None:
        chunk.queued = True
        self._candidates.add(chunk)
        if self._salts and (own := self._salts.get(chunk.salt)) is not None:
            own.candidates.add(chunk)

    def _take_out(self, chunk: Chunk) -> None:
        chunk.queued = False
        self._candidates.remove(chunk)
        own = self._salts.get(chunk.salt) if self._salts else None
        if own is not None and (chunk.last_use > own.until or chunk in own.candidates):
            own.candidates.remove(chunk)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": PrefixLRU}
