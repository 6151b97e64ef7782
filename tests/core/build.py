"""A directory with sessions in it, and short words for the events of the tests.

Every event goes through `do`, which verifies the invariants after it.
"""

from array import array
from collections.abc import Sequence
from itertools import count

from kvkeep.core import events as ev
from kvkeep.core.audit import check
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.keys import chunk_hash, root_hash, token_bytes
from kvkeep.types import (
    ChunkHash,
    EndOutcome,
    Fingerprint,
    GroupKind,
    LeaseId,
    PeerId,
    Role,
    RowSpec,
    StageOutcome,
)

PAGE = 4096
FULL = (RowSpec(0, GroupKind.FULL_ATTENTION, PAGE),)
NO_CAPS = Limits(staging_fraction=9.0, session_staging_fraction=1.0, session_reserve_fraction=1.0)


def row(pages: int, kind: GroupKind = GroupKind.FULL_ATTENTION, window: int = 0) -> RowSpec:
    """A row whose object takes exactly `pages` pages."""
    return RowSpec(0, kind, pages * PAGE, window)


def chain(name: str, chunks: int, salt: str | None = None) -> list[ChunkHash]:
    """Root and hashes of a prompt; prompts with a common beginning of `name` share that prefix.

    Letter i of `name` decides chunk i; the last letter repeats.
    """
    hashes = [root_hash(Fingerprint(b"f" * 32), salt)]
    for position in range(chunks):
        letter = ord(name[min(position, len(name) - 1)])
        hashes.append(chunk_hash(hashes[-1], token_bytes([letter])))
    return hashes


def alone(name: str, chunks: int = 1) -> list[ChunkHash]:
    """Root and hashes of a prompt that shares nothing with one of another name."""
    hashes = [root_hash(Fingerprint(b"f" * 32))]
    for position in range(chunks):
        hashes.append(chunk_hash(hashes[-1], f"{name} {position}".encode()))
    return hashes


def words(packed: bytes) -> list[int]:
    """A column as numbers."""
    return list(array("Q", packed))


class World:
    """One directory, its generation table, a clock, and a scheduler-and-worker per session."""

    def __init__(
        self, pages: int, *, slots: int = 4096, limits: Limits = NO_CAPS, check_every: int = 1
    ) -> None:
        self.generations = [0] * slots
        self._check_every = check_every
        self._events = 0
        self._ids = count(1)
        self.directory = Directory(self.generations, lambda: next(self._ids), limits=limits)
        self.now_s = 100.0
        self.effects: list[ev.Effect] = []
        self.peers: dict[str, PeerId] = {}
        self.do(ev.Grown(pages * PAGE))

    def do(self, event: ev.Event) -> ev.Reply:
        reply, self.effects = self.directory.handle(event, self.now_s)
        self._events += 1
        if self._events % self._check_every == 0:
            check(self.directory)
        return reply

    def join(
        self,
        session: str,
        rows: tuple[RowSpec, ...] = FULL,
        *,
        writes: bool = True,
        dma: bool = False,
        recompute: bool = True,
    ) -> PeerId:
        """A world of one whose only process is scheduler and worker."""
        peer = PeerId(next(self._ids))
        event = ev.Join(
            session, peer, Role.BOTH, 0, 1, rows, Fingerprint(b"f" * 32), writes, dma, recompute
        )
        assert isinstance(self.do(event), ev.Joined)
        self.peers[session] = peer
        return peer

    def join_rank(
        self, session: str, rank: int | None, world: int, rows: tuple[RowSpec, ...] = FULL
    ) -> ev.Reply:
        """One worker, or the scheduler for rank None."""
        peer = PeerId(next(self._ids))
        self.peers[f"{session}/{rank}"] = peer
        if rank is None:
            return self.do(ev.Join(session, peer, Role.SCHEDULER, 0, world))
        mark = Fingerprint(bytes([rank]) * 32)
        return self.do(ev.Join(session, peer, Role.WORKER, rank, world, rows, mark))

    def stage(
        self,
        session: str,
        hashes: Sequence[ChunkHash],
        first: int = 0,
        last: int | None = None,
        *,
        salt: str | None = None,
    ) -> ev.Staged:
        """Stage chunks first..last of a `chain`."""
        end = len(hashes) if last is None else last + 1
        item = ev.StageItem("r", hashes[first], b"".join(hashes[first + 1 : end]), salt)
        reply = self.do(ev.Stage(session, (item,)))
        assert isinstance(reply, ev.Staged)
        return reply

    def commit(self, session: str, leases: Sequence[LeaseId]) -> ev.Committed:
        reply = self.do(ev.Commit(session, tuple(leases)))
        assert isinstance(reply, ev.Committed)
        return reply

    def abort(self, session: str, leases: Sequence[LeaseId], confirmed: bool = True) -> int:
        reply = self.do(ev.Abort(session, tuple(leases), confirmed))
        assert isinstance(reply, ev.Done)
        return reply.changed

    def store(
        self, session: str, hashes: Sequence[ChunkHash], *, salt: str | None = None
    ) -> list[StageOutcome]:
        """Stage and commit a chain one chunk at a time, as an engine does over its steps.

        Stops at the first chunk that got no memory: what follows would not be found.
        """
        outcomes: list[StageOutcome] = []
        for position in range(len(hashes) - 1):
            staged = self.stage(session, hashes, position, position + 1, salt=salt)
            self.commit(session, staged.leases)
            outcomes += staged.outcomes
            if staged.outcomes[0] in (StageOutcome.NO_ROOM, StageOutcome.OVER_CAP):
                break
        return outcomes

    def lookup(
        self,
        session: str,
        hashes: Sequence[ChunkHash],
        *,
        salt: str | None = None,
        near: bool = True,
    ) -> ev.Hit:
        reply = self.do(ev.Lookup(session, "r", b"".join(hashes[1:]), salt, near))
        assert isinstance(reply, ev.Hit)
        return reply

    def end(
        self,
        session: str,
        lease: LeaseId,
        ranks: tuple[int, ...] = (0,),
        outcome: EndOutcome = EndOutcome.USED,
    ) -> int:
        reply = self.do(ev.End(session, lease, ranks, outcome))
        assert isinstance(reply, ev.Done)
        return reply.changed

    def touch(self, session: str, hashes: Sequence[ChunkHash]) -> int:
        """Look a chain up and release it; returns the hit."""
        hit = self.lookup(session, hashes)
        if hit.lease:
            self.end(session, hit.lease)
        return hit.chunks

    def resident(self, hashes: Sequence[ChunkHash]) -> list[bool]:
        """Which chunks of a chain are findable, without touching them."""
        return [h in self.directory.residents.index for h in hashes[1:]]

    @property
    def counters(self) -> dict[str, int]:
        return dict(self.directory.counters)
