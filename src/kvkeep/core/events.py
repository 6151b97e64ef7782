"""What may happen to the directory, what it answers, and what it asks the shell to do.

Every event is a value; `now_s` is a monotonic time given by the caller. Hash lists are packed bytes
(32 per chunk). Replies and effects are values too: the core never calls anybody.
"""

import msgspec

from kvkeep.types import (
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    LeaseId,
    PeerId,
    Reason,
    Role,
    RowSpec,
    SlotId,
    StageOutcome,
)


class _Value(msgspec.Struct, frozen=True, gc=False):
    pass


# ---- events


class Join(_Value, frozen=True):
    """A connection said Hello. A worker brings its rows and fingerprint."""

    session: str
    peer: PeerId
    role: Role
    rank: int = 0
    world: int = 1
    rows: tuple[RowSpec, ...] = ()
    fingerprint: Fingerprint = Fingerprint(b"")
    writes: bool = True  # False: a pure consumer, never given a handle for writing
    dma: bool = False  # its device may still write after the process is gone
    recompute: bool = True  # its engine recomputes after a failed load, so its reads are revocable
    confirms: PeerId = PeerId(0)  # an earlier connection of this process whose copies have ended


class PeerClosed(_Value, frozen=True):
    """The connection ended. Its process may still touch memory."""

    peer: PeerId


class PeerGone(_Value, frozen=True):
    """The process behind the connection is provably gone, or confirmed that it touches nothing."""

    peer: PeerId
    confirmed: bool = False  # said by itself: no quarantine for DMA


class Grown(_Value, frozen=True):
    """More of the arena is populated."""

    populated_bytes: int


class Lookup(_Value, frozen=True):
    """Find and reserve the longest common prefix of `hashes`."""

    session: str
    request: str
    hashes: bytes
    salt: str | None = None
    near: bool = True  # about to be scheduled: answer with what fits under the cap, reserved


class End(_Value, frozen=True):
    """Readers of `ranks` are done with their parts of a lease."""

    session: str
    lease: LeaseId
    ranks: tuple[int, ...]
    outcome: EndOutcome = EndOutcome.USED


class StageItem(_Value, frozen=True):
    """Consecutive chunks of one request that are to be stored."""

    request: str
    parent: ChunkHash
    hashes: bytes
    salt: str | None = None


class Stage(_Value, frozen=True):
    """Take extents to write, for all ranks; one per engine step."""

    session: str
    items: tuple[StageItem, ...]


class Commit(_Value, frozen=True):
    """Every rank reported its copy and the output of the copying step was processed: publish."""

    session: str
    leases: tuple[LeaseId, ...]


class Abort(_Value, frozen=True):
    """Give staged extents back. `confirmed`: no rank will touch them any more."""

    session: str
    leases: tuple[LeaseId, ...]
    confirmed: bool = True


class Drop(_Value, frozen=True):
    """These chunks failed to load: nobody may find them again."""

    session: str
    hashes: bytes


class Revoke(_Value, frozen=True):
    """End a read lease against its reader's will (operator, later memory pressure)."""

    lease: LeaseId


class Clear(_Value, frozen=True):
    """Make every resident chunk unfindable; `force` also revokes what is being read."""

    force: bool = False


class Tick(_Value, frozen=True):
    """Time passed: end quarantines."""


Event = (
    Join | PeerClosed | PeerGone | Grown | Lookup | End | Stage | Commit | Abort | Drop | Revoke
    | Clear | Tick
)  # fmt: skip

# ---- replies


class Joined(_Value, frozen=True):
    """The connection belongs to the session now."""


class JoinRefused(_Value, frozen=True):
    """The connection may not join; `text` is a sentence for a person."""

    text: str


NO_SLOT = SlotId(2**64 - 1)  # in a column: the hit does not need this row of this chunk


class Columns(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Handles of one row: packed native u64, one per chunk (the session knows epoch and length).

    A chunk that is not resident has `NO_SLOT`, offset 0 and generation 0. That happens only when
    no row needs every chunk: a model of sliding windows or recurrent state alone.
    """

    slots: bytes
    offsets: bytes
    generations: bytes


class Hit(_Value, frozen=True):
    """Answer to Lookup: `chunks` are reserved under `lease`; one reason for each of the rest."""

    lease: LeaseId
    chunks: int
    columns: tuple[Columns, ...]
    reasons: tuple[Reason, ...]


class Staged(_Value, frozen=True):
    """Answer to Stage: one outcome per chunk; leases and columns of the granted ones, in order."""

    outcomes: tuple[StageOutcome, ...]
    leases: tuple[LeaseId, ...]
    columns: tuple[Columns, ...]
    largest_free_bytes: int


class Committed(_Value, frozen=True):
    """Answer to Commit, one outcome per lease."""

    outcomes: tuple[CommitOutcome, ...]


class Done(_Value, frozen=True):
    """Done; `changed` counts what it applied to."""

    changed: int


Reply = Joined | JoinRefused | Hit | Staged | Committed | Done

# ---- effects


class SessionReady(_Value, frozen=True):
    """Every rank and the scheduler are there."""

    session: str
    fingerprint: Fingerprint
    world: int
    rows: tuple[RowSpec, ...]


class SessionUnready(_Value, frozen=True):
    """A rank or the scheduler left; the session's lookups answer `not_ready`."""

    session: str
    why: str


class LeaseRevoked(_Value, frozen=True):
    """Tell the session: this read lease ended, and its copies are worth nothing."""

    session: str
    lease: LeaseId


Effect = SessionReady | SessionUnready | LeaseRevoked
