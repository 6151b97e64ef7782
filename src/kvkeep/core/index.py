"""Finds a resident chunk by its hash, in 256 shards by the hash's first byte.

One dict of a million entries takes 60 ms to grow; a shard of a 256th of them never takes long, and
a sweep over everything can go shard by shard. Hashes are digests, so the shards fill evenly.
Parents that are not resident are counted the same way.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from kvkeep.core.eviction import Chunk
from kvkeep.types import ChunkHash

SHARDS = 256


class ChunkIndex:
    """ChunkHash -> Chunk. Iterating while it changes is an error, as with a dict."""

    __slots__ = ("_count", "shards")

    def __init__(self) -> None:
        self.shards: list[dict[ChunkHash, Chunk]] = [{} for _ in range(SHARDS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ChunkHash]:
        return chain.from_iterable(self.shards)

    def __contains__(self, chunk_hash: ChunkHash) -> bool:
        return self.get(chunk_hash) is not None

    def __getitem__(self, chunk_hash: ChunkHash) -> Chunk:
        return self.shards[chunk_hash[0]][chunk_hash]

    def __setitem__(self, chunk_hash: ChunkHash, chunk: Chunk) -> None:
        shard = self.shards[chunk_hash[0]]
        before = len(shard)
        shard[chunk_hash] = chunk
        self._count += len(shard) - before

    def __delitem__(self, chunk_hash: ChunkHash) -> None:
        del self.shards[chunk_hash[0]][chunk_hash]
        self._count -= 1

    def get(self, chunk_hash: ChunkHash) -> Chunk | None:
        """The chunk, or None; the empty hash (a parent nobody has named) is never there."""
        return self.shards[chunk_hash[0]].get(chunk_hash) if chunk_hash else None

    def find(self, hashes: Iterable[ChunkHash]) -> list[Chunk | None]:
        """What is resident of these, in their order."""
        shards = self.shards
        return [shards[h[0]].get(h) for h in hashes]

    def values(self) -> Iterator[Chunk]:
        """Every chunk, shard by shard."""
        for shard in self.shards:
            yield from shard.values()


class AbsentParents:
    """Chunks that are not resident but have children that are, or that are staged: how many."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: list[dict[ChunkHash, tuple[ChunkHash, int]]] = [{} for _ in range(SHARDS)]

    def __iter__(self) -> Iterator[tuple[ChunkHash, int]]:
        return chain.from_iterable(shard.values() for shard in self._shards)

    def add(self, parent: ChunkHash, children: int = 1) -> None:
        """So many children more."""
        shard = self._shard(parent)
        name, before = shard.get(parent, (parent, 0))
        shard[parent] = name, before + children

    def remove(self, parent: ChunkHash) -> None:
        """One child less."""
        shard = self._shard(parent)
        name, children = shard[parent]
        if children > 1:
            shard[parent] = name, children - 1
        else:
            del shard[parent]

    def pop(self, parent: ChunkHash) -> int:
        """The children of a chunk that becomes resident."""
        found = self._shard(parent).pop(parent, None)
        return found[1] if found else 0

    def name(self, parent: ChunkHash) -> ChunkHash:
        """The one copy of these bytes that all children share."""
        return self._shard(parent)[parent][0]

    def _shard(self, parent: ChunkHash) -> dict[ChunkHash, tuple[ChunkHash, int]]:
        return self._shards[parent[0] if parent else 0]
