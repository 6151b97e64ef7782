"""Remembers, for a bounded number of chunks that have left L1, why they did.

In 256 shards by the hash's first byte, each forgetting its oldest first: one table of 32,768
entries takes milliseconds each time that it is made anew, a shard never takes long.
"""

from kvkeep.types import ChunkHash, Reason

SHARDS = 256


class Ghosts:
    """Reasons by hash."""

    def __init__(self, most: int) -> None:
        self._most = -(-most // SHARDS)  # of one shard
        self._shards: list[dict[ChunkHash, Reason]] = [{} for _ in range(SHARDS)]

    def get(self, chunk_hash: ChunkHash, unknown: Reason) -> Reason:
        """Why it left; `unknown` when nobody remembers."""
        return self._shards[chunk_hash[0]].get(chunk_hash, unknown)

    def add(self, chunk_hash: ChunkHash, reason: Reason) -> None:
        """It left."""
        shard = self._shards[chunk_hash[0]]
        shard[chunk_hash] = reason
        if len(shard) > self._most:
            del shard[next(iter(shard))]

    def forget(self, chunk_hash: ChunkHash) -> None:
        """It is there again."""
        self._shards[chunk_hash[0]].pop(chunk_hash, None)
