"""The scheduler side's view of one request: its chunk hashes, block table and pending lookup."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.client import Call
from kvkeep.connectors.vllm.params import Params
from kvkeep.core.keys import extend_chain
from kvkeep.types import ChunkHash
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(eq=False, slots=True)
class Tracked:
    """One live request (or a finished one that a staged chunk still refers to)."""

    request: "Request"
    params: Params = field(default_factory=Params)
    bypass: str | None = None  # why it is neither looked up nor stored
    root: ChunkHash | None = None
    hashes: list[ChunkHash] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # block table, once scheduled
    next_chunk: int = 0  # first chunk not staged yet
    retry_at_s: float = 0.0  # no staging before this (the server had no room)
    tainted: bool = False  # shares a block of a failed load: never stored again
    unstored: bool = False  # computed at least in part before a reset: not stored after it
    local_tokens: int = 0  # vLLM's own prefix hit at the last lookup
    arrived_s: float = field(default_factory=time.monotonic)
    lookup: Call | None = None
    asked: bool = False  # looked up at least once
    gave_up: bool = False  # a pending lookup outlasted its limit: L2 is not asked again
    revoked: int = 0  # reservations lost before they were used
    found: m.Found | None = None  # answered and still reserved
    found_epoch: int = 0
    admitted: bool = False  # blocks were allocated once
    device_tokens: int = 0  # vLLM's own prefix hit when it was admitted
    loaded_tokens: dict[str, int] = field(default_factory=dict)  # by tier, really loaded

    @property
    def id(self) -> str:
        """vLLM's request id."""
        return str(self.request.request_id)

    @property
    def may_store(self) -> bool:
        """Whether its chunks may be staged."""
        return not (self.tainted or self.unstored or self.bypass or self.params.no_store)

    def told(self) -> dict[str, Any]:
        """What its answer says about kvkeep: tokens that were really there, by tier."""
        loaded = self.loaded_tokens
        l2 = {t.removeprefix("l2:"): n for t, n in loaded.items() if t.startswith("l2:")}
        hits = {"device": self.device_tokens, "l1": loaded.get("l1", 0), "l2": l2}
        told: dict[str, Any] = {"request_id": self.id, "hit_tokens": hits}
        if self.params.problem is not None:
            told["refused"] = self.params.problem
        return {"kvkeep": told}

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
    chunk_tokens: list[int]  # tokens of each chunk that this load brings
    tiers: list[str]  # where each came from
    local_tokens: int
