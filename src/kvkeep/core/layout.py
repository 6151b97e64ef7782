"""Decides when two engines mean the same bytes: the layout fingerprint.

A fingerprint digests a canonical encoding of everything that gives an object's bytes their
meaning. Fields nobody knew of make a different fingerprint; a missing required field is an error,
never a guess (DESIGN section 3).
"""

from collections.abc import Mapping, Sequence

from blake3 import blake3

from kvkeep.core.keys import encode_field
from kvkeep.errors import ConfigError
from kvkeep.types import Fingerprint

_LAYOUT = b"kvkeep.layout.1\x00"

REQUIRED = (
    "model",
    "weights",
    "dtype",
    "kv_dtype",
    "quantization",
    "rope",
    "tensors",
    "block_tokens",
    "chunk_tokens",
    "world_size",
    "rank",
    "parallel",
)


def fingerprint(fields: Mapping[str, object]) -> Fingerprint:
    """Digest of `fields` (nested str/bytes/int/float/bool/None, lists and str-keyed maps).

    Raises ConfigError when a field of REQUIRED is missing or a value has another type.
    """
    missing = [name for name in REQUIRED if name not in fields]
    if missing:
        raise ConfigError(f"layout lacks {', '.join(missing)}: a fingerprint is never guessed")
    return Fingerprint(blake3(_LAYOUT + canonical(fields)).digest())


def canonical(value: object) -> bytes:
    """Unambiguous bytes of a nested value; maps are sorted by key, sequences keep their order."""
    match value:
        case bool():
            return b"T" if value else b"F"
        case float():
            return b"D" + encode_field(value.hex())
        case None | str() | bytes() | int():
            return encode_field(value)
        case Mapping():
            if not all(isinstance(key, str) for key in value):
                raise ConfigError("a layout map has a key that is no string")
            items = b"".join(encode_field(k) + canonical(value[k]) for k in sorted(value))
            return b"M" + len(value).to_bytes(4, "little") + items
        case Sequence():
            return b"L" + len(value).to_bytes(4, "little") + b"".join(map(canonical, value))
    raise ConfigError(f"a layout field of type {type(value).__name__} has no canonical form")
