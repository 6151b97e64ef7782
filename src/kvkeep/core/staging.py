"""Decides stores: takes extents to write, publishes them, or gives them back.

A key that a live owner is staging is skipped (`IN_PROGRESS`); the first publisher wins and the
loser's extents are freed. The chunks before a staged one are not evicted for it, so a prompt longer
than L1 keeps its beginning.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.leases import Session, WriteLease
from kvkeep.core.lookup import columns_of
from kvkeep.types import (
    HASH_BYTES,
    ChunkHash,
    CommitOutcome,
    LeaseId,
    SlotId,
    SlotState,
    StageOutcome,
)

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

_NOT_PUBLISHED = (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED)


class Stager:
    """stage, commit and abort of DESIGN section 4."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory
        self.latest: dict[ChunkHash, WriteLease] = {}  # being staged, by key

    def stage(self, event: ev.Stage, now_s: float) -> ev.Staged:
        """One outcome per chunk; after the first without memory an item's rest gets the same."""
        d = self._d
        session = d.sessions.get(event.session)
        outcomes: list[StageOutcome] = []
        granted: list[WriteLease] = []
        rows = 0
        if session is None or not session.ready:
            outcomes = _refuse(event, StageOutcome.NOT_READY)
        elif not session.writes:
            outcomes = _refuse(event, StageOutcome.READ_ONLY)
        else:
            rows = len(session.all_rows)
            batch = _Batch(d, session, self.latest, now_s)
            for item in event.items:
                batch.stage(item)
            outcomes, granted = batch.outcomes, batch.granted
        for outcome, times in Counter(outcomes).items():
            d.counters[f"stage_{outcome.name.lower()}"] += times
        columns = tuple(columns_of(d, [w.slots[r] for w in granted]) for r in range(rows))
        free = d.arena.largest_free_bytes()
        return ev.Staged(tuple(outcomes), tuple([w.id for w in granted]), columns, free)

    def commit(self, event: ev.Commit) -> ev.Committed:
        """Publish; a key that is resident by now frees the loser's extents."""
        session = self._d.sessions.get(event.session)
        outcomes = []
        for lease_id in event.leases:
            lease = session.writes_open.get(lease_id) if session else None
            if session is None or lease is None:
                outcome = CommitOutcome.UNKNOWN_LEASE
            elif lease.doomed or lease.hash in self._d.residents.index:
                self.finish(session, lease)
                for slot in lease.slots:
                    self._d.slots.move(slot, SlotState.FREE)
                gone = CommitOutcome.FORGOTTEN
                outcome = gone if lease.doomed else CommitOutcome.ALREADY_RESIDENT
            else:
                residents = self._d.residents
                residents.attach(lease.parent)  # before finish() detaches the staged child
                self.finish(session, lease)
                chunk = Chunk(
                    lease.hash,
                    lease.parent,
                    rows=lease.slots,
                    specs=session.all_rows,
                    size_bytes=session.chunk_bytes,
                    space=lease.space,
                    depth=lease.depth,
                )
                residents.publish(chunk)
                self._d.persister.committed(chunk, session.id, lease.request)
                outcome = CommitOutcome.COMMITTED
            outcomes.append(outcome)
            self._d.counters[f"commit_{outcome.name.lower()}"] += 1
        return ev.Committed(tuple(outcomes))

    def abort(self, event: ev.Abort, now_s: float) -> ev.Done:
        """Free staged extents, or orphan them until their writers are known to have stopped."""
        session = self._d.sessions.get(event.session)
        ended = 0
        for lease_id in event.leases:
            lease = session.writes_open.get(lease_id) if session else None
            if session is None or lease is None:
                self._d.counters["abort_again"] += 1
                continue
            self.lose(session, lease, confirmed=event.confirmed, now_s=now_s)
            ended += 1
        self._d.counters["aborted"] += ended
        return ev.Done(ended)

    def take(
        self, sizes_bytes: Sequence[int], protect: Callable[[], Container[ChunkHash]] = tuple
    ) -> list[SlotId] | None:
        """A staged slot per size, evicting idle chunks but never `protect`; or none at all."""
        taken: list[SlotId] = []
        for size_bytes in sizes_bytes:
            slot = self._d.slots.stage(size_bytes)
            if slot is None:
                slot = self._d.residents.evict_and_stage(size_bytes, protect())
            if slot is None:
                for unused in taken:
                    self._d.slots.move(unused, SlotState.FREE)
                return None
            taken.append(slot)
        return taken

    def lose(self, session: Session, lease: WriteLease, *, confirmed: bool, now_s: float) -> None:
        """End a write lease without publishing."""
        self.finish(session, lease)
        for slot, writer in zip(lease.slots, lease.writers, strict=True):
            self._d.give_up(slot, writer, confirmed=confirmed, now_s=now_s)

    def finish(self, session: Session, lease: WriteLease) -> None:
        """The lease is over, whatever became of its extents."""
        del session.writes_open[lease.id]
        session.staging_bytes -= session.chunk_bytes
        self._d.quotas.staged(lease.space.salt, -session.chunk_bytes)
        if self.latest.get(lease.hash) is lease:
            del self.latest[lease.hash]
        self._d.residents.detach(lease.parent)


def _refuse(event: ev.Stage, outcome: StageOutcome) -> list[StageOutcome]:
    return [outcome] * sum(len(item.hashes) // HASH_BYTES for item in event.items)


class _Batch:
    """One Stage event while it is being answered."""

    def __init__(
        self,
        directory: "Directory",
        session: Session,
        latest: dict[ChunkHash, WriteLease],
        now_s: float,
    ) -> None:
        self.outcomes: list[StageOutcome] = []
        self.granted: list[WriteLease] = []
        self._d = directory
        self._session = session
        self._latest = latest
        self._now_s = now_s
        self._writers = tuple([session.workers[rank] for rank in session.row_ranks])
        self._sizes = [spec.object_bytes for spec in session.all_rows]
        self._chunks_left = self._under_caps()
        self._line: set[ChunkHash] = set()  # see _ancestors

    def stage(self, item: ev.StageItem) -> None:
        """An outcome for every chunk of the item."""
        parent = item.parent
        refusal: StageOutcome | None = None  # of the item's rest
        self._line.clear()
        space = self._session.space(item.salt)
        for depth, chunk_hash in enumerate(self._d.split(item.hashes), start=item.first):
            outcome = self._known(chunk_hash)
            if outcome is None:
                outcome = refusal
            if outcome is None and self._chunks_left <= 0:
                outcome = refusal = StageOutcome.OVER_CAP
            protect = partial(self._ancestors, parent)
            if outcome is None and not self._admits(item.salt, protect):
                outcome = refusal = StageOutcome.OVER_QUOTA
            if outcome is None:
                slots = self._d.stager.take(self._sizes, protect)
                if slots is None:
                    outcome = refusal = StageOutcome.NO_ROOM
                    self._d.pressure.not_staged(self._session.chunk_bytes)
                else:
                    outcome = StageOutcome.GRANTED
                    lease = WriteLease(
                        LeaseId(self._d.new_id()),
                        self._session.id,
                        item.request,
                        chunk_hash,
                        parent,
                        space,
                        depth,
                        tuple(slots),
                        self._writers,
                        self._now_s,
                    )
                    self._grant(lease)
            if outcome is StageOutcome.OVER_QUOTA:
                self._d.quotas.refuse(item.salt)
            self.outcomes.append(outcome)
            parent = chunk_hash
            if self._line:
                self._line.add(parent)

    def _under_caps(self) -> int:
        """How many chunks the bounds on staged bytes still allow."""
        limits, session = self._d.limits, self._session
        cap = limits.staging_fraction * self._d.arena.populated_bytes
        not_published = sum(self._d.slots.bytes_in[state] for state in _NOT_PUBLISHED)
        all_left = cap - (
            not_published - self._d.fetcher.flights.staged_bytes
        )  # fetches: a bound of theirs
        mine_left = cap * limits.session_staging_fraction - session.staging_bytes
        return int(min(all_left, mine_left) // session.chunk_bytes)

    def _admits(self, salt: str | None, protect: Callable[[], Container[ChunkHash]]) -> bool:
        return self._d.quotas.admits(salt, self._session.chunk_bytes, protect)

    def _known(self, chunk_hash: ChunkHash) -> StageOutcome | None:
        """The outcome for a chunk that somebody stored or is storing."""
        chunk = self._d.residents.index.get(chunk_hash)
        if chunk is not None:
            if chunk.specs is not self._session.all_rows:
                return StageOutcome.LAYOUT_MISMATCH
            self._d.residents.policy.used((chunk,))
            self._d.persister.stored_again(chunk, self._session.id)
            return StageOutcome.RESIDENT
        if self._d.fetcher.flights.coming(chunk_hash):
            return StageOutcome.IN_PROGRESS
        other = self._latest.get(chunk_hash)
        if other is not None and self._now_s - other.since_s < self._d.limits.in_progress_after_s:
            return StageOutcome.IN_PROGRESS
        return None

    def _grant(self, lease: WriteLease) -> None:
        session = self._session
        session.writes_open[lease.id] = lease
        session.staging_bytes += session.chunk_bytes
        self._d.quotas.staged(lease.space.salt, session.chunk_bytes)
        self._latest[lease.hash] = lease
        self._d.residents.attach(lease.parent)
        self.granted.append(lease)
        self._chunks_left -= 1

    def _ancestors(self, parent: ChunkHash) -> set[ChunkHash]:
        """The chunks before the one being staged: none of them is evicted for it.

        Walked once per item, then extended by `stage`.
        """
        at: ChunkHash | None = None if self._line else parent
        while at is not None and at not in self._line:
            self._line.add(at)
            before = self._d.residents.index.get(at) or self._latest.get(at)
            at = before.parent if before else None
        return self._line
