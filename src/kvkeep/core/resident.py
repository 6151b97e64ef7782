"""Owns what is resident in L1: the index of chunks, their tree, who was evicted, and making room.

Decides which resident bytes go when an extent is wanted. Never touches staged, read or protected
chunks; evicting is all or nothing for one run.
"""

from collections.abc import Callable, Container, Iterable

from kvkeep.core.eviction import Chunk, EvictionPolicy
from kvkeep.core.ghosts import Ghosts
from kvkeep.core.index import AbsentParents, ChunkIndex
from kvkeep.core.slots import SlotTable
from kvkeep.types import ChunkHash, Namespace, Reason, SlotId, SlotState

GAPS_PART = 64  # more than 1/64 of L1 in gaps that are too short: cold neighbours go together
GHOSTS = 32_768  # evicted chunks whose reason is remembered
_LOOK = 2_048  # extents looked at in one call when no cold chunk leads to a long enough run


class Residents:
    """Chunks by hash, with the counts that keep a parent longer than its children."""

    def __init__(
        self, slots: SlotTable, policy: EvictionPolicy, evicted: Callable[[Chunk], None]
    ) -> None:
        """`evicted` is told of every chunk that leaves to make room."""
        self.slots = slots
        self.policy = policy
        self.evicted = evicted
        self.index = ChunkIndex()
        self.unlinked: set[Chunk] = set()  # dropped while somebody still reads
        self.usage_bytes: dict[str | None, int] = {}  # per salt
        self.objects = 0  # of the chunks in the index
        self.evicted_chunks = 0
        self.evicted_bytes = 0
        self.absent = AbsentParents()
        self._chunk_at: list[Chunk | None] = []  # by slot
        self._spaces: dict[Namespace, tuple[Namespace, int]] = {}  # one copy each, and its chunks
        self._ghosts = Ghosts(GHOSTS)
        self._protected: Container[ChunkHash] = ()
        self._cursor = 0  # where the search through the arena goes on

    def why_absent(self, chunk_hash: ChunkHash, unknown: Reason = Reason.NEVER_STORED) -> Reason:
        """Why a chunk that is not in the index is not there; `unknown` when it left no trace."""
        return self._ghosts.get(chunk_hash, unknown)

    def attach(self, parent: ChunkHash) -> None:
        """One more (staged or resident) child of `parent`."""
        chunk = self.index.get(parent)
        if chunk is None:
            self.absent.add(parent)
            return
        chunk.children += 1
        if chunk.children == 1:
            self.policy.extended(chunk)

    def detach(self, parent: ChunkHash) -> None:
        """One child of `parent` less."""
        chunk = self.index.get(parent)
        if chunk is not None:
            chunk.children -= 1
            if chunk.children == 0 and self.idle(chunk):
                self.policy.idle(chunk)
            return
        self.absent.remove(parent)

    def publish(self, chunk: Chunk) -> None:
        """Make a chunk's staged slots resident and findable; its parent is attached already."""
        assert chunk.hash not in self.index
        for slot in chunk.rows:
            self.slots.move(slot, SlotState.RESIDENT)
        self._share(chunk)
        self.usage_bytes[chunk.salt] = self.usage_bytes.get(chunk.salt, 0) + chunk.size_bytes
        self.index[chunk.hash] = chunk
        self.objects += len(chunk.rows)
        chunk.children = self.absent.pop(chunk.hash)
        self._ghosts.forget(chunk.hash)
        self.policy.added(chunk)

    def unlink(self, chunk: Chunk, reason: Reason) -> None:
        """Nobody finds the chunk any more; its extents are freed with its last reader."""
        del self.index[chunk.hash]
        self.objects -= len(chunk.rows)
        chunk.linked = False
        if chunk.children:
            self.absent.add(chunk.hash, chunk.children)
        self._ghosts.add(chunk.hash, reason)
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
            self.policy.unlimit(chunk.salt)
        space, chunks = self._spaces.pop(chunk.space)
        if chunks > 1:
            self._spaces[space] = space, chunks - 1
        for slot in chunk.rows:
            self._chunk_at[slot] = None
            self.slots.move(slot, SlotState.FREE)

    def _share(self, chunk: Chunk) -> None:
        """Find it by its slots; what other chunks have too is kept once."""
        at = self._chunk_at
        for slot in chunk.rows:
            while len(at) <= slot:
                at.append(None)
            at[slot] = chunk
        above = self.index.get(chunk.parent)
        chunk.parent = above.hash if above is not None else self.absent.name(chunk.parent)
        chunk.space, chunks = self._spaces.get(chunk.space, (chunk.space, 0))
        self._spaces[chunk.space] = chunk.space, chunks + 1

    # ---- making room

    def evict_and_stage(self, size_bytes: int, protect: Container[ChunkHash]) -> SlotId | None:
        """A staged slot, made free by evicting idle chunks but never `protect`; None: no room."""
        self._protected = protect
        victims = self._victims(size_bytes)
        self._protected = ()
        for chunk in victims:
            self.evict(chunk)
        return self.slots.stage(size_bytes) if victims else None

    def evict_of(
        self, salt: str | None, bytes_needed: int, protect: Container[ChunkHash] = ()
    ) -> bool:
        """Evict the salt's coldest idle chunks, `bytes_needed` of them, never `protect`; or none.

        False as well for a moment after the salt's limit was set, while its chunks are looked for.
        """
        self._protected = protect
        victims = self.policy.evict_of(salt, bytes_needed, self)
        self._protected = ()
        for chunk in victims:
            self.evict(chunk)
        return bool(victims) or bytes_needed <= 0

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

    def may_go(self, chunk: Chunk) -> bool:
        """Idle, and not what the memory is wanted for."""
        return chunk.hash not in self._protected and self.idle(chunk)

    def parent(self, chunk: Chunk) -> Chunk | None:
        """The chunk before it, when that is resident."""
        return self.index.get(chunk.parent)

    def window(
        self, chunk: Chunk, bytes_needed: int, *, gaps_only: bool = False
    ) -> list[Chunk] | None:
        """Idle chunks around `chunk` that make one run of `bytes_needed`, or None."""
        if chunk.hash in self._protected:
            return None
        slots, fewest = self.slots, None
        for slot in chunk.rows:  # rows differ in size: one may do alone where another needs more
            found = slots.arena.window(
                slots.extent[slot], bytes_needed, self._movable, gaps_only=gaps_only
            )
            if found is None:
                continue
            victims = self._chunks(found)
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

    def _movable(self, slot: int) -> bool:
        chunk = self._chunk_at[slot] if slot < len(self._chunk_at) else None
        return chunk is not None and chunk.linked and self.may_go(chunk)

    def _chunks(self, slots: Iterable[int]) -> list[Chunk]:
        """Whose slots these are."""
        return list(dict.fromkeys(c for s in slots if (c := self._chunk_at[s]) is not None))

    def _victims(self, size_bytes: int) -> Iterable[Chunk]:
        if self.slots.arena.fits(size_bytes):
            size_bytes = 1  # memory is there, only a slot is wanted
        movable = self.slots.bytes_in[SlotState.RESIDENT] - self.slots.reserved_bytes
        if self.slots.arena.free_bytes + movable < size_bytes:
            return []
        # Where no cold chunk leads to a long enough run, any idle one may (rare; mixed sizes only).
        return self.policy.evict(size_bytes, self) or self._anywhere(size_bytes)

    def _anywhere(self, size_bytes: int) -> list[Chunk]:
        """Idle chunks side by side that make the run; part of a large arena is seen per call."""
        whole_round = self._cursor == 0
        found = self._search(size_bytes)
        if not found and not whole_round and self._cursor == 0:  # the end: what comes before?
            found = self._search(size_bytes)
        return self._chunks(found)

    def _search(self, size_bytes: int) -> list[int]:
        found, self._cursor = self.slots.arena.search(
            size_bytes, self._movable, cursor=self._cursor, most=_LOOK
        )
        return found
