"""Owns what is resident in L1: the index of chunks, their tree, who was evicted, and making room.

Decides which resident bytes go when an extent is wanted. Never touches staged, read or protected
chunks; evicting is all or nothing for one run.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

from kvkeep.core.eviction import Chunk, EvictionPolicy
from kvkeep.core.slots import SlotTable
from kvkeep.types import ChunkHash, Reason, SlotId, SlotState

GAPS_PART = 64  # more than 1/64 of L1 in gaps that are too short: cold neighbours go together
GHOSTS = 32_768  # evicted chunks whose reason is remembered


class Residents:
    """Chunks by hash, with the counts that keep a parent longer than its children."""

    def __init__(
        self, slots: SlotTable, policy: EvictionPolicy, evicted: Callable[[Chunk], None]
    ) -> None:
        """`evicted` is told of every chunk that leaves to make room."""
        self.slots = slots
        self.policy = policy
        self.evicted = evicted
        self.index: dict[ChunkHash, Chunk] = {}
        self.unlinked: set[Chunk] = set()  # dropped while somebody still reads
        self.usage_bytes: dict[str | None, int] = {}  # per salt
        self.evicted_chunks = 0
        self.evicted_bytes = 0
        self._at: dict[int, Chunk] = {}  # extent offset -> chunk
        self.absent: dict[ChunkHash, int] = {}  # children of chunks that are not resident
        self._ghosts: OrderedDict[ChunkHash, Reason] = OrderedDict()
        self._protected: Container[ChunkHash] = ()

    def why_absent(self, chunk_hash: ChunkHash, unknown: Reason = Reason.NEVER_STORED) -> Reason:
        """Why a chunk that is not in the index is not there; `unknown` when it left no trace."""
        return self._ghosts.get(chunk_hash, unknown)

    def attach(self, parent: ChunkHash) -> None:
        """One more (staged or resident) child of `parent`."""
        chunk = self.index.get(parent)
        if chunk is not None:
            chunk.children += 1
        else:
            self.absent[parent] = self.absent.get(parent, 0) + 1

    def detach(self, parent: ChunkHash) -> None:
        """One child of `parent` less."""
        chunk = self.index.get(parent)
        if chunk is not None:
            chunk.children -= 1
            if chunk.children == 0 and self.idle(chunk):
                self.policy.idle(chunk)
            return
        left = self.absent[parent] - 1
        if left:
            self.absent[parent] = left
        else:
            del self.absent[parent]

    def publish(self, chunk: Chunk) -> None:
        """Make a chunk's staged slots resident and findable; its parent is attached already."""
        assert chunk.hash not in self.index
        for slot in chunk.rows:
            self.slots.move(slot, SlotState.RESIDENT)
            self._at[self.slots.offset[slot]] = chunk
        self.usage_bytes[chunk.salt] = self.usage_bytes.get(chunk.salt, 0) + chunk.size_bytes
        self.index[chunk.hash] = chunk
        chunk.children = self.absent.pop(chunk.hash, 0)
        self._ghosts.pop(chunk.hash, None)
        self.policy.added(chunk)

    def unlink(self, chunk: Chunk, reason: Reason) -> None:
        """Nobody finds the chunk any more; its extents are freed with its last reader."""
        del self.index[chunk.hash]
        chunk.linked = False
        if chunk.children:
            self.absent[chunk.hash] = chunk.children
        self._ghosts[chunk.hash] = reason
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        self.policy.removed(chunk)
        self.detach(chunk.parent)
        self.unlinked.add(chunk)
        self.settle(chunk)

    def settle(self, chunk: Chunk) -> None:
        """A reader left: free an unlinked chunk, or tell the policy that a linked one is idle."""
        if not self.idle(chunk):
            return
        if chunk.linked:
            self.policy.idle(chunk)
            return
        self.unlinked.discard(chunk)
        left = self.usage_bytes[chunk.salt] - chunk.size_bytes
        if left:
            self.usage_bytes[chunk.salt] = left
        else:
            del self.usage_bytes[chunk.salt]
        for slot in chunk.rows:
            del self._at[self.slots.offset[slot]]
            self.slots.move(slot, SlotState.FREE)

    # ---- making room

    def evict_and_stage(self, size_bytes: int, protect: Container[ChunkHash]) -> SlotId | None:
        """A staged slot, made free by evicting idle chunks but never `protect`; None: no room."""
        self._protected = protect
        victims = self._victims(size_bytes)
        self._protected = ()
        for chunk in victims:
            self.evict(chunk)
        return self.slots.stage(size_bytes) if victims else None

    def evict(self, chunk: Chunk) -> None:
        """An idle chunk leaves L1."""
        self.evicted_chunks += 1
        self.evicted_bytes += chunk.size_bytes
        self.evicted(chunk)
        self.unlink(chunk, Reason.EVICTED)

    def idle(self, chunk: Chunk) -> bool:
        """Nobody reads any of its rows."""
        readers = self.slots.readers
        return not readers[chunk.rows[0]] and not any(readers[slot] for slot in chunk.rows[1:])

    def window(
        self, chunk: Chunk, bytes_needed: int, *, gaps_only: bool = False
    ) -> list[Chunk] | None:
        """Idle chunks around `chunk` that make one run of `bytes_needed`, or None."""
        if chunk.hash in self._protected:
            return None
        fewest: list[Chunk] | None = None
        for slot in chunk.rows:  # rows differ in size: one may do alone where another needs more
            found = self.slots.arena.window(
                self.slots.offset[slot], bytes_needed, self._movable, gaps_only=gaps_only
            )
            if found is None:
                continue
            victims = list({id(c): c for c in (self._at[o] for o in found)}.values())
            if fewest is None or len(victims) < len(fewest):
                fewest = victims
            if len(victims) == 1:
                break
        return fewest

    def lost_in_gaps(self, bytes_needed: int) -> bool:
        """Whether free memory is a notable part of L1, and enough, but no run is long enough."""
        arena = self.slots.arena
        if arena.free_bytes < max(bytes_needed, arena.populated_bytes // GAPS_PART):
            return False
        return not arena.fits(bytes_needed)

    def _movable(self, offset: int) -> bool:
        chunk = self._at.get(offset)
        return (
            chunk is not None
            and chunk.linked
            and chunk.hash not in self._protected
            and self.idle(chunk)
        )

    def _victims(self, size_bytes: int) -> Iterable[Chunk]:
        if self.slots.arena.fits(size_bytes):
            size_bytes = 1  # memory is there, only a slot is wanted
        movable = self.slots.bytes_in[SlotState.RESIDENT] - self.slots.reserved_bytes
        if self.slots.arena.free_bytes + movable < size_bytes:
            return []
        victims = self.policy.evict(size_bytes, self)
        if victims:
            return victims
        # No cold chunk leads to a long enough run: any idle chunk may (rare; mixed sizes only).
        for chunk in list(self.index.values()):
            if self.idle(chunk) and (found := self.window(chunk, size_bytes)) is not None:
                return found
        return []
