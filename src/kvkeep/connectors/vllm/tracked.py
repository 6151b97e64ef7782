"""The scheduler side's view of one request: its chunk hashes, block table and pending lookup."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.client import Call
from kvkeep.core.keys import extend_chain
from kvkeep.types import ChunkHash
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False, slots=True)
class Tracked:
    """One live request (or a finished one that a staged chunk still refers to)."""

    request: "Request"
    bypass: str | None = None  # why it is neither looked up nor stored
    root: ChunkHash | None = None
    hashes: list[ChunkHash] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # block table, once scheduled
    next_chunk: int = 0  # first chunk not staged yet
    retry_at_s: float = 0.0  # no staging before this (the server had no room)
    tainted: bool = False  # shares a block of a failed load: never stored again
    local_tokens: int = 0  # vLLM's own prefix hit at the last lookup
    lookup: Call | None = None
    asked_chunks: int = 0
    found: m.Found | None = None  # answered and still reserved
    found_epoch: int = 0

    @property
    def id(self) -> str:
        """vLLM's request id."""
        return str(self.request.request_id)

    def chain(self, root: ChunkHash, chunks: int, chunk_tokens: int) -> Sequence[ChunkHash]:
        """Hashes of the first `chunks` chunks; known tokens only. Starts over under a new root."""
        if root != self.root:
            self.root, self.hashes = root, []
        have = len(self.hashes)
        if have < chunks:
            parent = self.hashes[-1] if self.hashes else root
            tokens = self.request.all_token_ids[have * chunk_tokens : chunks * chunk_tokens]
            self.hashes += extend_chain(parent, tokens, chunk_tokens)
        return self.hashes[:chunks]


@dataclass(eq=False, slots=True)
class Staged:
    """One staged chunk until every rank reported its copy. Holds its request alive."""

    lease: int
    tracked: Tracked
    reported: int = 0
    failed: bool = False


@dataclass(eq=False, slots=True)
class Loading:
    """One dispatched load until every rank reported it."""

    lease: int
    tracked: Tracked
    hashes: list[ChunkHash]
    tokens: int
    local_tokens: int
