"""Names chunks: canonical, length-prefixed BLAKE3-256 chains.

Decides which requests may ever share KV. No two different inputs have the same encoding: every
field carries a type tag and a length, and every hash a domain tag. Equal over processes, Python
versions and PYTHONHASHSEED; golden vectors are in tests/core/test_keys.py.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise

from blake3 import blake3

from kvkeep.types import HASH_BYTES, ChunkHash, Fingerprint

PROTOCOL_GENERATION = 1  # changes when the meaning of a hash changes

_ROOT = b"kvkeep.root.1\x00"
_CHUNK = b"kvkeep.chunk.1\x00"
_RANKS = b"kvkeep.ranks.1\x00"

Scalar = str | bytes | int | None
ExtraKey = tuple[str, Scalar]  # (kind, value), e.g. ("prompt_embeds", digest)


def encode_field(value: Scalar) -> bytes:
    """One tagged, length-prefixed field; None, "" and b"" differ, and so do 1 and "1"."""
    match value:
        case None:
            tag, body = b"N", b""
        case str():
            tag, body = b"S", value.encode("utf-8", "surrogatepass")  # any str, even half a pair
        case bytes():
            tag, body = b"B", value
        case int():
            tag, body = b"I", str(int(value)).encode()
    return tag + len(body).to_bytes(4, "little") + body


def root_hash(
    fingerprint: Fingerprint, cache_salt: str | None = None, adapter: str | None = None
) -> ChunkHash:
    """The parent of every first chunk of one (layout, salt, adapter)."""
    fields = (PROTOCOL_GENERATION, bytes(fingerprint), cache_salt, adapter)
    return ChunkHash(blake3(_ROOT + b"".join(map(encode_field, fields))).digest())


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian; raises OverflowError for an id that is no u32."""
    packed = array("I", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def chunk_hash(parent: ChunkHash, tokens: bytes, extra: Sequence[ExtraKey] = ()) -> ChunkHash:
    """The hash of one chunk: parent, u32-LE tokens, then the extra keys in order."""
    parts = [_CHUNK, encode_field(bytes(parent)), encode_field(tokens)]
    for kind, value in extra:
        parts.append(encode_field(kind))
        parts.append(encode_field(value))
    return ChunkHash(blake3(b"".join(parts)).digest())


def extend_chain(parent: ChunkHash, token_ids: Sequence[int], chunk_tokens: int) -> list[ChunkHash]:
    """Hashes of every whole chunk in `token_ids`, each the parent of the next."""
    packed = token_bytes(token_ids)
    step = chunk_tokens * 4
    head = _CHUNK + b"B" + HASH_BYTES.to_bytes(4, "little")
    middle = b"B" + step.to_bytes(4, "little")
    hashes: list[ChunkHash] = []
    for start, end in pairwise(range(0, len(packed) + 1, step)):
        parent = ChunkHash(blake3(head + parent + middle + packed[start:end]).digest())
        hashes.append(parent)
    return hashes


def combine_ranks(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    """One fingerprint for a session, from its ranks' in rank order."""
    body = b"".join(encode_field(bytes(f)) for f in fingerprints)
    return Fingerprint(blake3(_RANKS + body).digest())
