"""Words that more than one room uses: ids, enums, and the shape of an object's rows.

Distinct types for distinct ints and bytes, so that a slot is never passed where a lease is meant.
Numbers of enums go over the wire and into files: they are only ever added to.
"""

import unicodedata
from enum import Enum, IntEnum
from typing import NewType

import msgspec

ChunkHash = NewType("ChunkHash", bytes)  # 32 bytes, names the whole prefix up to the chunk's end
Fingerprint = NewType("Fingerprint", bytes)  # 32 bytes, digest of the layout
Epoch = NewType("Epoch", int)  # 64 random bits per server start
LeaseId = NewType("LeaseId", int)  # 64 random bits, valid in one epoch and session; 0 = no lease
PeerId = NewType("PeerId", int)  # 64 random bits, one connection
SlotId = NewType("SlotId", int)  # index into the generation table

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


class CommitOutcome(IntEnum):
    """What became of one staged chunk."""

    COMMITTED = 0
    ALREADY_RESIDENT = 1
    UNKNOWN_LEASE = 2


class EndOutcome(IntEnum):
    """How a reader ended its part of a lease."""

    USED = 0
    UNUSED = 1
    FAILED = 2


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


def printable(text: str) -> str:
    r"""The text with control characters as \xNN: safe for a terminal and for a log line."""
    if text.isprintable():
        return text
    return "".join(f"\\x{ord(c):02x}" if unicodedata.category(c) == "Cc" else c for c in text)
