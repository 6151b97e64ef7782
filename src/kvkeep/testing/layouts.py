"""What simulated engines serve: rows of several sizes and kinds, prompts, and who an engine is."""

import random
from dataclasses import dataclass

from blake3 import blake3

from kvkeep.core.keys import chunk_hash, combine_ranks, root_hash
from kvkeep.types import ChunkHash, Fingerprint, GroupKind, RowSpec

LONGEST_CHUNKS = 8

_FULL, _WINDOW = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW
_LAYOUTS: tuple[tuple[RowSpec, ...], ...] = (
    (RowSpec(0, _FULL, 4000),),
    (RowSpec(0, _FULL, 9001),),
    (RowSpec(0, _FULL, 4096), RowSpec(1, _WINDOW, 3000, 2)),
    (RowSpec(0, _WINDOW, 5000, 2),),
    (RowSpec(0, _FULL, 6000), RowSpec(1, GroupKind.RECURRENT, 8192)),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """What one engine instance says of itself."""

    session: str
    world: int
    rows: tuple[RowSpec, ...]  # of one rank
    both: bool  # one connection for the scheduler and rank 0
    one_process: bool
    writes: bool
    dma: bool
    recompute: bool

    def fingerprint(self, rank: int) -> Fingerprint:
        """Digest of what a rank's bytes mean."""
        text = f"{self.rows!r} rank {rank} of {self.world}"
        return Fingerprint(blake3(text.encode()).digest())

    def session_fingerprint(self) -> Fingerprint:
        """What the server must say when every rank is there."""
        return combine_ranks([self.fingerprint(rank) for rank in range(self.world)])

    def chain(self, rng: random.Random, salt: str | None) -> tuple[ChunkHash, list[ChunkHash]]:
        """(root, hashes) of a random prompt; prompts share beginnings often."""
        parent = root = root_hash(self.session_fingerprint(), salt)
        hashes: list[ChunkHash] = []
        for _ in range(rng.randint(1, LONGEST_CHUNKS)):
            parent = chunk_hash(parent, bytes([rng.choice((0, 0, 0, 0, 1, 2))]))
            hashes.append(parent)
        return root, hashes


def some_layouts(rng: random.Random) -> list[tuple[RowSpec, ...]]:
    """A few of the layouts; engines with the same one share what they store."""
    return rng.sample(_LAYOUTS, rng.randint(1, 3))
