"""An engine's block pool as vLLM on a CPU has it, without an engine: layer-major random bytes.

One request's source blocks, as many target blocks, and one contiguous buffer pair of the same bytes
to compare with plain memcpy. Needs torch; never imported without it.
"""

import random
import time

import torch

from kvkeep.bench.shapes import Shape
from kvkeep.connectors.blocks import DeviceBlocks

_WORD = torch.int64
_SPARE = 1.25  # blocks of the pool that belong to nobody, over those of the request


class Pool:
    """Blocks [layers, num_blocks, words]; `source` and `target` are lists of block ids per chunk.

    `scattered` spreads a request's blocks at random over the pool (the worst case); else they lie
    side by side. `shuffle` gives the same blocks to other chunks, so that bytes left over from an
    earlier round are wrong ones.
    """

    def __init__(self, shape: Shape, chunks: int, *, scattered: bool, seed: int) -> None:
        torch.set_num_threads(1)  # one copying thread, as in an engine that computes meanwhile
        self._random = random.Random(seed)
        self._per_chunk = shape.blocks_per_chunk
        self._scattered = scattered
        blocks = chunks * shape.blocks_per_chunk
        count = 2 * blocks + int(_SPARE * blocks)
        words = shape.block_bytes // _WORD.itemsize
        self.memory = torch.empty(shape.layers, count, words, dtype=_WORD)
        self.memory.random_(generator=torch.Generator().manual_seed(seed))
        ids = list(range(count))
        if scattered:
            self._random.shuffle(ids)
        self._sources, self._targets = ids[:blocks], ids[blocks : 2 * blocks]
        self.device = DeviceBlocks.from_kv_caches(
            {f"layers.{i}": self.memory[i] for i in range(shape.layers)}
        )
        self.bytes = blocks * shape.block_bytes * shape.layers
        self._from = torch.ones(self.bytes, dtype=torch.uint8)
        self._to = torch.zeros(self.bytes, dtype=torch.uint8)
        self._to.copy_(self._from)

    def shuffle(self) -> None:
        """Other chunks get these blocks, and the targets hold nothing of use."""
        self._sources, self._targets = self._mixed(self._sources), self._mixed(self._targets)
        self.memory.index_fill_(1, torch.tensor(self._targets), -1)

    @property
    def source(self) -> list[list[int]]:
        """Block ids of each chunk to store."""
        return self._split(self._sources)

    @property
    def target(self) -> list[list[int]]:
        """Block ids that each chunk is retrieved into."""
        return self._split(self._targets)

    def memcpy_s(self) -> float:
        """Seconds that torch needs to copy one warmed contiguous buffer of the same bytes."""
        started = time.perf_counter()
        self._to.copy_(self._from)
        return time.perf_counter() - started

    def equal(self) -> bool:
        """Whether every target block holds its source block's bytes in every layer."""
        source, target = torch.tensor(self._sources), torch.tensor(self._targets)
        return all(
            torch.equal(plane.index_select(0, source), plane.index_select(0, target))
            for plane in self.memory
        )

    def _mixed(self, ids: list[int]) -> list[int]:
        """Another order: of blocks where they are scattered, else of whole chunks."""
        parts = [[block] for block in ids] if self._scattered else self._split(ids)
        self._random.shuffle(parts)
        return [block for part in parts for block in part]

    def _split(self, ids: list[int]) -> list[list[int]]:
        step = self._per_chunk
        return [ids[start : start + step] for start in range(0, len(ids), step)]
