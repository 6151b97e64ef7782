"""Every message of the control protocol, as two tagged unions: what clients and servers send.

docs/PROTOCOL.md explains them. Columns of handles are packed native u64 (both ends share a host).
A call carries `seq` and gets exactly one reply with the same `seq`; notices carry none.
"""

import msgspec

from kvkeep.core.events import Columns
from kvkeep.types import EndOutcome, GroupKind, Role, RowSpec

__all__ = ["Columns", "GroupKind", "RowSpec"]

VERSIONS = (2, 1)  # protocol versions this build speaks, newest first; 1 knows no pending lookup


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


# ---- client to server


class Hello(_Message, frozen=True, tag="hello"):
    """First message of a connection. `layout` is a readable description for `status`."""

    versions: tuple[int, ...]
    session: str
    role: Role
    rank: int = 0
    world: int = 1
    rows: tuple[RowSpec, ...] = ()
    fingerprint: bytes = b""
    model: str = ""
    writes: bool = True
    dma: bool = False
    recompute: bool = True
    wants_arena: bool = True
    confirms: int = 0
    client: str = ""  # e.g. "kvkeep 0.1.0 vllm 0.32.0"
    chunk_tokens: int = 0  # 0: unknown; only for what people see


class Lookup(_Message, frozen=True, tag="lookup"):
    """Call: find and reserve. Answer: Found, or Pending and later the push Resolved.

    `wait_ms`: how long it may wait for L2; negative: as long as the server is set to. `fetch`
    False: only what is in L1 now.
    """

    seq: int
    request: str
    hashes: bytes  # 32 bytes per chunk
    salt: str | None = None
    near: bool = True
    prompt_tokens: int = 0
    fetch: bool = True
    wait_ms: float = -1.0


class Cancel(_Message, frozen=True, tag="cancel"):
    """Notice: nobody waits for this pending lookup any more; what it reserved is given back."""

    ticket: int


class StageItem(_Message, frozen=True):
    """Consecutive chunks of one request; `first` chunks of its prompt come before them."""

    request: str
    parent: bytes
    hashes: bytes
    salt: str | None = None
    first: int = 0


class Stage(_Message, frozen=True, tag="stage"):
    """Call: take extents to write, for all ranks. Answer: Granted."""

    seq: int
    items: tuple[StageItem, ...]


class Commit(_Message, frozen=True, tag="commit"):
    """Call: publish staged chunks. Answer: Committed."""

    seq: int
    leases: tuple[int, ...]


class Abort(_Message, frozen=True, tag="abort"):
    """Notice: staged chunks are given back; `confirmed`: nobody will touch them any more."""

    leases: tuple[int, ...]
    confirmed: bool = True


class End(_Message, frozen=True, tag="end"):
    """Notice: parts of a read lease ended, and how the load went (for `explain`)."""

    lease: int
    ranks: tuple[int, ...]
    outcome: EndOutcome
    request: str = ""
    device_tokens: int = 0
    loaded_tokens: int = 0
    load_ms: float = 0.0
    saved_ms: float | None = None


class Drop(_Message, frozen=True, tag="drop"):
    """Notice: these chunks failed to load; nobody may find them again."""

    hashes: bytes


class Forget(_Message, frozen=True, tag="forget"):
    """Call: nobody may find anything of this session's layout any more. Answer: Forgotten."""

    seq: int


class Note(_Message, frozen=True, tag="note"):
    """Notice: one line for the timeline of a request."""

    request: str
    event: str
    prompt_tokens: int = 0


class Ping(_Message, frozen=True, tag="ping"):
    """Call: are you there? Answer: Pong."""

    seq: int
    max_wait_ms: float = 0.0  # longest wait of any engine step so far


class Query(_Message, frozen=True, tag="query"):
    """Call by an operator, such as status, leases, explain or clear. Answer: Answer.

    The answer of wait_persisted (argument: seconds) comes when nothing waits for L2 any more.
    """

    seq: int
    what: str
    argument: str = ""


class Bye(_Message, frozen=True, tag="bye"):
    """Notice before a clean end: this process has unmapped the arena."""


ClientMessage = (
    Hello | Lookup | Cancel | Stage | Commit | Abort | End | Drop | Forget | Note | Ping | Query
    | Bye
)  # fmt: skip

# ---- server to client


class Welcome(_Message, frozen=True, tag="welcome"):
    """Answer to Hello. Descriptors ride along: arena, then generation table."""

    version: int
    epoch: int
    peer: int
    arena_bytes: int
    populated_bytes: int
    slots: int
    has_arena: bool
    writable: bool
    server: str = ""
    backends: tuple[str, ...] = ()  # names of L2 backends; a tier n > 0 is the n-th of them
    lookup_wait_ms: float = 500.0  # what a lookup waits for L2 at most, unless it says itself


class Refused(_Message, frozen=True, tag="refused"):
    """Answer to Hello: no, with one sentence that names the mismatch and the fix."""

    text: str


class Found(_Message, frozen=True, tag="found"):
    """Answer to Lookup, final. One Columns per row; one reason byte per chunk beyond the hit.

    `tiers`: one byte per chunk of the hit, where it came from: 0 is L1, n the n-th backend.
    """

    seq: int
    lease: int
    chunks: int
    columns: tuple[Columns, ...]
    reasons: bytes
    tiers: bytes = b""


class Pending(_Message, frozen=True, tag="pending"):
    """Answer to Lookup: L2 may have more. Resolved with this ticket is pushed later."""

    seq: int
    ticket: int


class Granted(_Message, frozen=True, tag="granted"):
    """Answer to Stage: one outcome byte per chunk; leases and columns of the granted, in order."""

    seq: int
    outcomes: bytes
    leases: tuple[int, ...]
    columns: tuple[Columns, ...]
    largest_free_bytes: int


class Committed(_Message, frozen=True, tag="committed"):
    """Answer to Commit: one outcome byte per lease."""

    seq: int
    outcomes: bytes


class Forgotten(_Message, frozen=True, tag="forgotten"):
    """Answer to Forget: so many chunks were in L1. `done`: and no L2 has any of them.

    Not done: the session is not ready, or a backend failed; until it works nothing of the layout
    is served from it, but a server that starts meanwhile would find the old objects.
    """

    seq: int
    chunks: int
    done: bool = True


class Pong(_Message, frozen=True, tag="pong"):
    """Answer to Ping."""

    seq: int


class Answer(_Message, frozen=True, tag="answer"):
    """Answer to Query: JSON text."""

    seq: int
    body: str


class Failed(_Message, frozen=True, tag="failed"):
    """Answer to a call that could not be served; the text is for a person."""

    seq: int
    text: str


class Ready(_Message, frozen=True, tag="ready"):
    """Push: every rank is there. Keys start from this fingerprint; objects have these rows."""

    fingerprint: bytes
    world: int
    rows: tuple[RowSpec, ...]


class Unready(_Message, frozen=True, tag="unready"):
    """Push: a rank left; lookups answer `not_ready` until it is back."""

    why: str


class Grown(_Message, frozen=True, tag="grown"):
    """Push: so much of the arena is populated."""

    populated_bytes: int


class Resolved(_Message, frozen=True, tag="resolved"):
    """Push: the final answer of a pending lookup, with the fields of Found."""

    ticket: int
    lease: int
    chunks: int
    columns: tuple[Columns, ...]
    reasons: bytes
    tiers: bytes = b""


class Revoked(_Message, frozen=True, tag="revoked"):
    """Push: this read lease ended against the reader's will."""

    lease: int


class Problem(_Message, frozen=True, tag="problem"):
    """Push: a notice could not be served."""

    text: str


ServerMessage = (
    Welcome | Refused | Found | Pending | Granted | Committed | Forgotten | Pong | Answer | Failed
    | Ready | Unready | Grown | Resolved | Revoked | Problem
)  # fmt: skip
