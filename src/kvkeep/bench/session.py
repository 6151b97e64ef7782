"""One bench session at a server: connect as an engine would, wait until it is warm, ask.

Calls go the engine's way (send, then wait in the caller's thread), with a budget that never ends a
measurement early.
"""

import os
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, TypeVar

from kvkeep.client import Budget, Client
from kvkeep.core.keys import root_hash
from kvkeep.errors import KVKeepError, ServerAway
from kvkeep.shm import Mapping
from kvkeep.types import (
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    GroupKind,
    Reason,
    Role,
    RowSpec,
    StageOutcome,
)
from kvkeep.wire import messages as m

WARM_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 10.0
_POLL_S = 0.01
_OVER_QUOTA = (
    "the bench's requests have no salt, and these may take no more: give them room, as in "
    'kvkeep quota set "" --l1 100%, or run without --socket'
)

Reply = TypeVar("Reply", bound=m.ServerMessage)


class BenchFailed(KVKeepError):
    """The server did not do what a bench needs; the text says which setting is in the way."""


class Handles(NamedTuple):
    """Where chunks lie, decoded."""

    lease: int  # of a lookup; 0 for staged chunks
    slots: Sequence[int]
    offsets: Sequence[int]
    generations: Sequence[int]


class Session:
    """Scheduler and worker of one engine in one connection."""

    def __init__(self, path: str, name: str, chunk_bytes: int) -> None:
        self._row = RowSpec(0, GroupKind.FULL_ATTENTION, chunk_bytes)
        layout = secrets.token_bytes(32)  # nobody else's: it is forgotten as a whole
        hello = m.Hello(
            m.VERSIONS,
            session=f"bench-{name}-{os.getpid()}",
            role=Role.BOTH,
            rows=(self._row,),
            fingerprint=layout,
            client="kvkeep bench object",
        )
        self.client = Client(path, hello, budget=Budget(step_s=ANSWER_TIMEOUT_S))

    def __enter__(self) -> Self:
        self.client.connect()
        self.client.start()
        try:
            self._await(lambda: self.client.ready is not None, "did not make the session ready")
            welcome = self.client.welcome
            assert welcome is not None
            self._await(
                lambda: self.mapping.touched_bytes >= welcome.arena_bytes,
                "did not populate its L1",
            )
        except BaseException:
            self.client.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def mapping(self) -> Mapping:
        """The arena; raises ServerAway when the server is gone."""
        mapping = self.client.mapping
        if mapping is None:
            raise ServerAway("the server left during the bench")
        return mapping

    def root(self, salt: str) -> ChunkHash:
        """Where a chain of keys starts; another salt gives other keys."""
        assert self.client.ready is not None
        return root_hash(Fingerprint(self.client.ready.fingerprint), salt)

    def ask(self, kind: type[Reply], make: Callable[[int], m.ClientMessage]) -> Reply:
        """One call and its answer, waiting as an engine does."""
        client = self.client
        client.begin_step()
        call = client.call(make)
        if call is None or not client.wait(call) or not isinstance(call.reply, kind):
            raise ServerAway(f"the server at {client.path} stopped answering during the bench")
        if call.abandoned:  # the client gave up waiting and hands back what the answer grants
            raise ServerAway("the server answered too late: this machine is too busy to measure")
        return call.reply

    def stage(self, root: ChunkHash, hashes: bytes) -> tuple[tuple[int, ...], Handles]:
        """Take extents for all chunks: (leases, handles)."""
        item = m.StageItem("bench", bytes(root), hashes)
        granted = self.ask(m.Granted, lambda seq: m.Stage(seq, (item,)))
        refused = [StageOutcome(code) for code in granted.outcomes if code]
        if refused:
            if StageOutcome.OVER_QUOTA in refused:
                raise BenchFailed(
                    f"the server granted {len(granted.leases)} of {len(granted.outcomes)} chunks "
                    f"(over_quota): {_OVER_QUOTA}"
                )
            raise BenchFailed(
                f"the server granted {len(granted.leases)} of {len(granted.outcomes)} chunks "
                f"({refused[0].name.lower()}): raise l1.size, and set l1.staging_fraction and "
                "l1.session_staging_fraction to 1, or run without --socket"
            )
        return granted.leases, _handles(0, granted.columns)

    def commit(self, leases: Sequence[int]) -> None:
        """Publish staged chunks."""
        committed = self.ask(m.Committed, lambda seq: m.Commit(seq, tuple(leases)))
        if any(code != CommitOutcome.COMMITTED for code in committed.outcomes):
            raise BenchFailed("the server did not publish every chunk that was staged")

    def lookup(self, hashes: bytes) -> Handles:
        """Find and reserve all chunks."""
        found = self.ask(m.Found, lambda seq: m.Lookup(seq, "bench", hashes))
        if len(found.reasons):
            if Reason.OVER_QUOTA in found.reasons:
                raise BenchFailed(f"the server may bring no more from L2: {_OVER_QUOTA}")
            raise BenchFailed(
                f"the server found {found.chunks} chunks and missed {len(found.reasons)}: raise "
                "l1.size and l1.session_reserve_fraction, or run without --socket"
            )
        return _handles(found.lease, found.columns)

    def release(self, lease: int) -> None:
        """End a lookup."""
        self.client.notify(m.End(lease, (0,), EndOutcome.USED))

    def forget(self) -> None:
        """Have this bench's chunks leave L1 and L2, so that the next round finds the same room."""
        self.ask(m.Forgotten, m.Forget)

    def _await(self, is_done: Callable[[], bool], lack: str) -> None:
        deadline = time.monotonic() + WARM_TIMEOUT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise BenchFailed(f"the server {lack} within {WARM_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)


def _handles(lease: int, columns: Sequence[m.Columns]) -> Handles:
    (column,) = columns
    return Handles(
        lease, array("Q", column.slots), array("Q", column.offsets), array("Q", column.generations)
    )
