"""Hash lists and the longest usable prefix, straight from the words of the design."""

from collections.abc import Sequence

from kvkeep.types import HASH_BYTES, ChunkHash, GroupKind, RowSpec


def pack(hashes: Sequence[bytes]) -> bytes:
    """Hashes as the wire carries them."""
    return b"".join(hashes)


def split(packed: bytes) -> list[ChunkHash]:
    """Packed hashes as a list."""
    return [ChunkHash(packed[i : i + HASH_BYTES]) for i in range(0, len(packed), HASH_BYTES)]


def longest(rows: Sequence[RowSpec], held: Sequence[bool]) -> int:
    """The longest usable length, straight from the words of DESIGN section 4."""
    for length in range(len(held), 0, -1):
        if all(_usable(spec, held, length) for spec in rows):
            return length
    return 0


def _usable(spec: RowSpec, held: Sequence[bool], length: int) -> bool:
    match spec.kind:
        case GroupKind.FULL_ATTENTION:
            return all(held[:length])
        case GroupKind.SLIDING_WINDOW:
            return all(held[max(0, length - spec.window_chunks) : length])
        case GroupKind.RECURRENT:
            return held[length - 1]
