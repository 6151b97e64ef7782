"""The KV shapes that `bench object` moves: layers, bytes of a block, tokens of a block."""

from dataclasses import dataclass

CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """One model's KV as blocks."""

    name: str
    layers: int
    block_bytes: int  # of one block in one layer
    block_tokens: int

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of one chunk in one layer."""
        return CHUNK_TOKENS // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk over all layers."""
        return self.layers * self.blocks_per_chunk * self.block_bytes


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("SmolLM2-135M", layers=30, block_bytes=24 << 10, block_tokens=32),
        Shape("8B", layers=32, block_bytes=64 << 10, block_tokens=32),
    )
}
