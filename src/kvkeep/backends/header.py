"""The page in front of every object in L2: what the payload is, so that nothing is taken on trust.

A page names the namespace and the key of its object and the payload's length and checksum, and ends
with a checksum of itself: no byte of it can change unseen. Whoever reads an object compares the
page with what it asked for; a file that was cut, moved, mixed up or written for another layout is
told apart here and named by one word. The magic, the version and the place of the page's own
checksum stay where they are in later versions, so that an older kvkeep recognises a newer page.
The page of an encrypted object also says how it is sealed; its checksum is then the seal's tag, so
that nothing on the disk follows from the content alone.
"""

import re
import struct
from dataclasses import dataclass
from enum import StrEnum

from blake3 import blake3
from xxhash import xxh3_128_digest

from kvkeep.backends.base import HEADER_BYTES
from kvkeep.types import HASH_BYTES, ChunkHash, Fingerprint, IoOutcome, Namespace, ObjectKey

MAGIC = b"kvkeepL2"
VERSION = 1
CODEC_PLAIN = 0
CODEC_SEALED = 1  # AES-256-GCM, see encrypted.py
CHECKSUM_BYTES = 16
NONCE_BYTES = 12
KEY_CHECK_BYTES = 8
KEY_ID_BYTES = 32
MODEL_MAX_BYTES = 512
LABEL_DIGITS = 32
SALT_DIGITS = 16
MAX_U32 = (1 << 32) - 1

_SALT_DOMAIN = "kvkeep 2026 L2 namespace salt"
_SEALED = HEADER_BYTES - CHECKSUM_BYTES
# magic, version, codec, world, rank, group, depth | length, created | checksum, fingerprint,
# chunk, has salt, salt digest, model size; the model's name follows, then zeros.
_FIELDS = struct.Struct("<8sHHIIII Qd 16s32s32sB32sH")
_GUARD_AT = struct.calcsize("<8sHHIIII Qd")
# nonce, key check, key id: just before the page's checksum, zeros for a plain object.
_SEAL = struct.Struct(f"<{NONCE_BYTES}s{KEY_CHECK_BYTES}s{KEY_ID_BYTES}s")
_SEAL_AT = _SEALED - _SEAL.size
_NUMBER = "(0|[1-9][0-9]{0,9})"
_STEM = re.compile(rf"([0-9a-f]{{{2 * HASH_BYTES}}})\.{_NUMBER}-{_NUMBER}\.{_NUMBER}")


class HeaderProblem(StrEnum):
    """Why an object is not the one asked for, as one word for counters and people."""

    BAD_MAGIC = "bad_magic"
    HEADER_CHECKSUM = "header_checksum"
    VERSION = "version"
    WRONG_KEY = "wrong_key"
    OTHER_FINGERPRINT = "other_fingerprint"
    OTHER_LENGTH = "other_length"
    TRUNCATED = "truncated"
    TOO_LONG = "too_long"
    PAYLOAD_CHECKSUM = "payload_checksum"
    TAG = "tag"  # it does not decrypt: other bytes, another key of this name, or another place
    NO_KEY = "no_key"  # encrypted under a key that this server does not have
    NOT_ENCRYPTED = "not_encrypted"  # and this server takes nothing else

    @property
    def outcome(self) -> IoOutcome:
        """What the reader answers: sound bytes of another layout are no corruption."""
        if self.unreadable:
            return IoOutcome.MISSING
        return IoOutcome.LAYOUT_MISMATCH if self in _OF_ANOTHER_LAYOUT else IoOutcome.CORRUPT

    @property
    def unreadable(self) -> bool:
        """Nothing is wrong with the object, only we cannot use it: it is a miss, and stays."""
        return self in (HeaderProblem.NO_KEY, HeaderProblem.NOT_ENCRYPTED)


_OF_ANOTHER_LAYOUT = frozenset(
    (HeaderProblem.VERSION, HeaderProblem.OTHER_FINGERPRINT, HeaderProblem.OTHER_LENGTH)
)


@dataclass(frozen=True, slots=True)
class Seal:
    """How an object is encrypted."""

    nonce: bytes
    key_check: bytes  # tells the key itself, whatever its name
    key_id: str  # for people


@dataclass(frozen=True, slots=True)
class Header:
    """What a sound page says about its object."""

    fingerprint: Fingerprint
    salt_digest: bytes | None  # None: no salt, which is not the empty salt
    key: ObjectKey
    length: int  # payload bytes
    checksum: bytes  # xxh3_128 of the payload; of a sealed object, its tag
    depth: int = 0
    model: str = ""
    created_s: float = 0.0  # wall clock
    seal: Seal | None = None

    @property
    def label(self) -> str:
        """The namespace this object belongs to, as `label()` writes it."""
        return _label(self.fingerprint, self.salt_digest)


@dataclass(frozen=True, slots=True)
class Verdict:
    """OK with the header, or the outcome and the word for what is wrong."""

    outcome: IoOutcome
    problem: HeaderProblem | None = None
    header: Header | None = None


def checksum(payload: memoryview) -> bytes:
    """The 16 bytes that guard a payload; lets other threads run while it reads."""
    return xxh3_128_digest(payload)


def salt_digest(salt: str | None) -> bytes | None:
    """32 bytes for a salt, None without one; the salt itself is never written anywhere."""
    if salt is None:
        return None
    text = salt.encode("utf-8", "surrogatepass")
    return blake3(text, derive_key_context=_SALT_DOMAIN).digest()


def encode(page: memoryview, header: Header) -> None:
    """Fill the whole page."""
    assert len(page) == HEADER_BYTES
    model = _cut(header.model)
    salt = header.salt_digest
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        CODEC_PLAIN if header.seal is None else CODEC_SEALED,
        header.key.world,
        header.key.rank,
        header.key.group,
        min(header.depth, MAX_U32),
        header.length,
        header.created_s,
        header.checksum,
        header.fingerprint,
        header.key.chunk,
        salt is not None,
        salt or b"",
        len(model),
    )
    page[:_SEALED] = (fields + model).ljust(_SEALED, b"\0")
    if header.seal is not None:
        seal = header.seal
        _SEAL.pack_into(page, _SEAL_AT, seal.nonce, seal.key_check, seal.key_id.encode())
    page[_SEALED:] = xxh3_128_digest(page[:_SEALED])


def decode(page: memoryview) -> Header | HeaderProblem:
    """Read a page; a problem when it is not one that this version wrote."""
    if len(page) < HEADER_BYTES:
        return HeaderProblem.TRUNCATED
    if page[: len(MAGIC)] != MAGIC:
        return HeaderProblem.BAD_MAGIC
    if page[_SEALED:HEADER_BYTES] != xxh3_128_digest(page[:_SEALED]):
        return HeaderProblem.HEADER_CHECKSUM
    _, version, codec, world, rank, group, *rest = _FIELDS.unpack_from(page)
    if version != VERSION or codec not in (CODEC_PLAIN, CODEC_SEALED):
        return HeaderProblem.VERSION
    depth, length, created_s, guard, fingerprint, chunk, salted, salt, model_size = rest
    model = page[_FIELDS.size : _FIELDS.size + min(model_size, MODEL_MAX_BYTES)]
    return Header(
        fingerprint=Fingerprint(fingerprint),
        salt_digest=salt if salted else None,
        key=ObjectKey(ChunkHash(chunk), world, rank, group),
        length=length,
        checksum=guard,
        depth=depth,
        model=bytes(model).decode("utf-8", "replace"),
        created_s=created_s,
        seal=_seal(page) if codec == CODEC_SEALED else None,
    )


def associated(page: memoryview) -> bytes:
    """What a seal vouches for besides the payload: the whole page but its tag and its checksum."""
    start, end = _GUARD_AT, _GUARD_AT + CHECKSUM_BYTES
    return b"".join((page[:start], bytes(CHECKSUM_BYTES), page[end:_SEALED]))


def _seal(page: memoryview) -> Seal:
    nonce, key_check, key_id = _SEAL.unpack_from(page, _SEAL_AT)
    return Seal(nonce, key_check, key_id.rstrip(b"\0").decode("ascii", "replace"))


def verdict(
    page: memoryview, space: Namespace, key: ObjectKey, *, length: int, size: int
) -> Verdict:
    """Compare a page with what was asked for; `size` is the payload size the backend reports.

    The payload's checksum is the caller's part, with `header.checksum` of an OK.
    """
    found = decode(page)
    if isinstance(found, HeaderProblem):
        # What ends inside its own page cannot have a sound one: the cut is the reason.
        problem = HeaderProblem.TRUNCATED if size <= 0 else found
        return Verdict(problem.outcome, problem)
    mismatch = _foreign(found, space, key) or size_problem(found, size)
    if mismatch is None and found.length != length:
        mismatch = HeaderProblem.OTHER_LENGTH
    if mismatch is not None:
        return Verdict(mismatch.outcome, mismatch)
    return Verdict(IoOutcome.OK, None, found)


def size_problem(header: Header, size: int) -> HeaderProblem | None:
    """Whether the stored payload has the length its header gives."""
    if size == header.length:
        return None
    return HeaderProblem.TRUNCATED if size < header.length else HeaderProblem.TOO_LONG


def _foreign(found: Header, space: Namespace, key: ObjectKey) -> HeaderProblem | None:
    # The chunk hash covers the fingerprint: under another layout both differ, and that says why.
    if found.fingerprint != space.fingerprint:
        return HeaderProblem.OTHER_FINGERPRINT
    if found.key != key or found.salt_digest != salt_digest(space.salt):
        return HeaderProblem.WRONG_KEY
    return None


def label(space: Namespace) -> str:
    """A name for the namespace that is safe as a directory and says nothing about the salt."""
    return _label(space.fingerprint, salt_digest(space.salt))


def fingerprint_label(space: Namespace) -> str:
    """The part that all labels of one fingerprint begin with; without a salt, the whole label."""
    return space.fingerprint.hex()[:LABEL_DIGITS]


def _label(fingerprint: Fingerprint, salt: bytes | None) -> str:
    first = fingerprint.hex()[:LABEL_DIGITS]
    return first if salt is None else f"{first}-{salt.hex()[:SALT_DIGITS]}"


def file_stem(key: ObjectKey) -> str:
    """The key as text: 64 hex digits, then world-rank and group."""
    return f"{key.chunk.hex()}.{key.world}-{key.rank}.{key.group}"


def parse_stem(text: str) -> ObjectKey | None:
    """The key whose `file_stem` is exactly this text; None if there is none."""
    match = _STEM.fullmatch(text)
    if match is None:
        return None
    world, rank, group = (int(match.group(n)) for n in (2, 3, 4))
    if max(world, rank, group) > MAX_U32:
        return None
    return ObjectKey(ChunkHash(bytes.fromhex(match.group(1))), world, rank, group)


def _cut(model: str) -> bytes:
    """The name in UTF-8, cut between two characters if it is too long."""
    encoded = model.encode("utf-8", "replace")[:MODEL_MAX_BYTES]
    return encoded.decode("utf-8", "ignore").encode()
