"""Words that more than one room uses: ids, enums, and the shape of an object's rows.

Distinct types for distinct ints and bytes, so that a slot is never passed where a lease is meant.
Numbers of enums go over the wire and into files: they are only ever added to.
"""

import unicodedata
from collections.abc import Iterable
from enum import Enum, IntEnum
from fractions import Fraction
from typing import NamedTuple, NewType

import msgspec

ChunkHash = NewType("ChunkHash", bytes)  # 32 bytes, names the whole prefix up to the chunk's end
Fingerprint = NewType("Fingerprint", bytes)  # 32 bytes, digest of the layout
Epoch = NewType("Epoch", int)  # 64 random bits per server start
LeaseId = NewType("LeaseId", int)  # 64 random bits, valid in one epoch and session; 0 = no lease
PeerId = NewType("PeerId", int)  # 64 random bits, one connection
TicketId = NewType("TicketId", int)  # 64 random bits, one pending lookup
TransferId = NewType("TransferId", int)  # one fetch or persist of a chunk
SlotId = NewType("SlotId", int)  # index into the generation table

Amount = Fraction | int  # a share of some capacity, or bytes

HASH_BYTES = 32
NO_LEASE = LeaseId(0)


class Tier(Enum):
    """Where bytes come from."""

    DEVICE = "device"
    L1 = "l1"
    L2 = "l2"


class Reason(IntEnum):
    """Why a chunk was not part of a hit (DESIGN section 4)."""

    NEVER_STORED = 1
    EVICTED = 2
    L2_MISS = 3
    L2_TIMEOUT = 4
    L2_ERROR = 5
    CORRUPT = 6
    LAYOUT_MISMATCH = 7
    RANK_SHORT = 8
    GROUP_SHORT = 9
    NO_ROOM = 10
    COST_GATE = 11
    POLICY = 12
    NOT_READY = 13
    REVOKED = 14
    BEHIND = 15  # it is there, but a chunk before it is not
    OVER_QUOTA = 16  # L2 has it, and its tenant may have no more in L1


class SlotState(IntEnum):
    """What a populated extent is used for; exactly one at a time (invariant 1)."""

    FREE = 0
    STAGING = 1
    RESIDENT = 2
    ORPHANED = 3
    QUARANTINED = 4


class StageOutcome(IntEnum):
    """The server's answer for one chunk that a client wants to store."""

    GRANTED = 0
    RESIDENT = 1
    IN_PROGRESS = 2
    NO_ROOM = 3
    OVER_CAP = 4
    NOT_READY = 5
    READ_ONLY = 6
    LAYOUT_MISMATCH = 7
    OVER_QUOTA = 8  # its tenant may have no more


class CommitOutcome(IntEnum):
    """What became of one staged chunk."""

    COMMITTED = 0
    ALREADY_RESIDENT = 1
    UNKNOWN_LEASE = 2
    FORGOTTEN = 3  # its layout was reset meanwhile: not published, its extents are free


class EndOutcome(IntEnum):
    """How a reader ended its part of a lease."""

    USED = 0
    UNUSED = 1
    FAILED = 2


class IoOutcome(IntEnum):
    """How the transfer of one object between L1 and L2 ended."""

    OK = 0
    MISSING = 1  # the backend does not have it
    CORRUPT = 2  # its bytes, length or key are not what was stored
    LAYOUT_MISMATCH = 3  # another fingerprint or length under this key
    TIMEOUT = 4  # the deadline passed; the I/O may still run
    ERROR = 5
    FULL = 6  # a put that the backend has no room for
    REFUSED = 7  # not tried: the backend's breaker is open, or it cannot take a put yet
    CANCELLED = 8  # given up before it began


def worst_of(outcomes: Iterable[IoOutcome]) -> IoOutcome:
    """OK when all are; else the first that is not: a chunk counts as one."""
    return next((outcome for outcome in outcomes if outcome is not IoOutcome.OK), IoOutcome.OK)


class StorePolicy(Enum):
    """When a committed chunk goes to L2."""

    WRITE_THROUGH = "write_through"  # as soon as it is committed
    WRITE_BACK = "write_back"  # before it would be evicted
    SKIP_L1 = "skip_l1"  # at once, and it leaves L1


class Role(IntEnum):
    """What one connection is for."""

    SCHEDULER = 0
    WORKER = 1
    BOTH = 2
    OPERATOR = 3


class GroupKind(IntEnum):
    """What a KV group needs at a prefix length (DESIGN section 4, common prefix)."""

    FULL_ATTENTION = 0
    SLIDING_WINDOW = 1
    RECURRENT = 2


class RowSpec(msgspec.Struct, frozen=True, array_like=True):
    """One KV group as one rank holds it.

    `window_chunks` counts trailing chunks a sliding window needs; ignored for the other kinds.
    `object_bytes` is the exact size of one (chunk, kv_rank, group) object.
    """

    group: int
    kind: GroupKind
    object_bytes: int
    window_chunks: int = 0


class Namespace(msgspec.Struct, frozen=True):
    """Whose objects: one layout of one model under one salt. `fingerprint` is the session's."""

    fingerprint: Fingerprint
    salt: str | None = None
    model: str = ""  # for people; it is part of the fingerprint already


class ObjectKey(NamedTuple):
    """One object in its namespace. The chunk hash covers fingerprint, salt and adapter too."""

    chunk: ChunkHash
    world: int
    rank: int
    group: int


def printable(text: str) -> str:
    r"""The text with control characters as \xNN: safe for a terminal and for a log line."""
    if text.isprintable():
        return text
    return "".join(f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" else c for c in text)
