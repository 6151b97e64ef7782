"""What may happen to the directory, what it answers, and what it asks the shell to do.

Every event is a value; `now_s` is a monotonic time given by the caller. Hash lists are packed bytes
(32 per chunk). Replies and effects are values too: the core never calls anybody.
"""

import msgspec

from kvkeep.types import (
    Amount,
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    IoOutcome,
    LeaseId,
    Namespace,
    PeerId,
    Reason,
    Role,
    RowSpec,
    SlotId,
    StageOutcome,
    TicketId,
    TransferId,
)


class _Value(msgspec.Struct, frozen=True, gc=False):
    pass


class ObjectRows(_Value, frozen=True):
    """The objects of one chunk: (rank, group, exact bytes) per row, of a model in `world` parts."""

    world: int
    rows: tuple[tuple[int, int, int], ...]


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
    model: str = ""  # for people


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
    fetch: bool = True  # L2 may extend the prefix
    wait_s: float | None = None  # for L2 at most; None: the server's limit


class Cancel(_Value, frozen=True):
    """Nobody waits for this lookup any more."""

    session: str
    ticket: TicketId


class Expire(_Value, frozen=True):
    """The alarm of a pending lookup rang."""

    ticket: TicketId


class Probed(_Value, frozen=True):
    """Which backends hold all objects of each chunk asked for (bit n: backend n).

    `down`: backends that could not be asked.
    """

    ticket: TicketId
    holders: tuple[int, ...]
    down: int = 0


class Fetched(_Value, frozen=True):
    """The I/O of a fetch has returned; one outcome per row. Its extents are touched no more."""

    transfer: TransferId
    outcomes: tuple[IoOutcome, ...]


class FetchLate(_Value, frozen=True):
    """The deadline of a fetch has passed and its I/O still runs."""

    transfer: TransferId


class Persisted(_Value, frozen=True):
    """The I/O of a persist has returned; one outcome per row."""

    transfer: TransferId
    outcomes: tuple[IoOutcome, ...]


class Drain(_Value, frozen=True):
    """What L2 does not have yet is to be persisted, whatever the policy.

    `sliced`: chunks are looked at, and queued, by Sweep events, as the queue has room.
    """

    sliced: bool = False


class Forget(_Value, frozen=True):
    """Nobody may find anything of this session's layout any more, in L1 or L2.

    `sliced`: its chunks leave L1 by and by, with Sweep events; nobody finds them from now on.
    """

    session: str
    sliced: bool = False


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
    first: int = 0  # chunks of the prompt before these


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
    """End a read lease against its reader's will (an operator's order)."""

    lease: LeaseId


class Relieve(_Value, frozen=True):
    """Somebody lacks memory: end reads that may end for that. `stopped`: sessions that hang."""

    stopped: frozenset[str] = frozenset()


class Clear(_Value, frozen=True):
    """Make every resident chunk unfindable; `force` also revokes what is being read.

    `sliced`: they leave L1 by and by, with Sweep events; nobody finds them from now on.
    """

    force: bool = False
    sliced: bool = False


class Sweep(_Value, frozen=True):
    """Carry on with what is sliced, for about as long as looking at so many chunks takes."""

    budget: int


class SetQuota(_Value, frozen=True):
    """A tenant may have so much of L1 from now on; None: what the default gives."""

    salt: str | None
    amount: Amount | None


class Tick(_Value, frozen=True):
    """Time passed: end quarantines."""


Event = (
    Join | PeerClosed | PeerGone | Grown | Lookup | Cancel | Expire | Probed | Fetched | FetchLate
    | End | Stage | Commit | Persisted | Abort | Drop | Revoke | Relieve | Clear | Forget
    | Drain | Sweep | SetQuota | Tick
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
    """Answer to Lookup: `chunks` are reserved under `lease`; one reason for each of the rest.

    `tiers`: for each chunk of a reserved hit 0 (it was in L1) or 1 + the backend it came from.
    """

    lease: LeaseId
    chunks: int
    columns: tuple[Columns, ...]
    reasons: tuple[Reason, ...]
    tiers: bytes = b""


class Pending(_Value, frozen=True):
    """Answer to Lookup: the hit is said later, by the effect Answered with this ticket."""

    ticket: TicketId


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


class Sweeping(_Value, frozen=True):
    """Answer to a sliced Clear or Forget: done when the effect Swept with this number comes."""

    sweep: int


Reply = Joined | JoinRefused | Hit | Pending | Staged | Committed | Done | Sweeping

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


class Answered(_Value, frozen=True):
    """The final answer of a pending lookup."""

    session: str
    ticket: TicketId
    hit: Hit


class Probe(_Value, frozen=True):
    """Ask every backend which of these chunks (packed hashes) it holds; then: Probed.

    When that cannot be said at once, Expire as well, at `deadline_s`.
    """

    ticket: TicketId
    space: Namespace
    objects: ObjectRows
    hashes: bytes
    deadline_s: float


class Alarm(_Value, frozen=True):
    """Ring at this time; then: Expire."""

    ticket: TicketId
    at_s: float


class Transfer(_Value, frozen=True):
    """One chunk between L1 and one backend: an arena offset per row."""

    id: TransferId
    backend: int
    space: Namespace
    objects: ObjectRows
    chunk: ChunkHash
    depth: int
    offsets: tuple[int, ...]


class Fetch(Transfer, frozen=True):
    """L2 -> L1, verified; then: Fetched (after FetchLate, where the deadline passes first)."""


class Persist(Transfer, frozen=True):
    """L1 -> L2, unless it is there already; then: Persisted."""


class Discard(_Value, frozen=True):
    """These chunks are not to be found in L2 any more; `broken` ones a person may look at."""

    space: Namespace
    objects: ObjectRows
    hashes: bytes
    broken: bool = False


class ForgetStored(_Value, frozen=True):
    """Nothing of this fingerprint is to be found in L2 any more."""

    space: Namespace


class ChunkPersisted(_Value, frozen=True):
    """One chunk of a request is in L2, or never will be."""

    session: str
    request: str
    backend: int
    outcome: IoOutcome


class Swept(_Value, frozen=True):
    """A sliced Clear or Forget is through; so many chunks left L1 for it."""

    sweep: int
    chunks: int


IoEffect = Probe | Alarm | Fetch | Persist | Discard | ForgetStored
Effect = (
    SessionReady | SessionUnready | LeaseRevoked | Answered | ChunkPersisted | Swept | IoEffect
)  # fmt: skip
