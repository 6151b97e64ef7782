"""Decides stores: takes extents to write, publishes them, or gives them back.

A key that a live owner is staging is skipped (`IN_PROGRESS`); the first publisher wins and the
loser's extents are freed. A parent with a staged child is not evicted for it.
"""

from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.leases import Session, WriteLease
from kvkeep.core.lookup import columns_of
from kvkeep.types import ChunkHash, CommitOutcome, LeaseId, SlotId, SlotState, StageOutcome

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory


class Stager:
    """stage, commit and abort of DESIGN section 4."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory
        self._latest: dict[ChunkHash, WriteLease] = {}

    def stage(self, event: ev.Stage, now_s: float) -> ev.Staged:
        """One outcome per chunk; after `NO_ROOM` the rest of an item is not tried."""
        session = self._d.sessions.get(event.session)
        outcomes: list[StageOutcome] = []
        granted: list[WriteLease] = []
        for item in event.items:
            parent, full = item.parent, False
            for chunk_hash in self._d.split(item.hashes):
                outcome = self._refusal(session, chunk_hash, now_s)
                if full and outcome is None:
                    outcome = StageOutcome.NO_ROOM
                if outcome is None:
                    assert session is not None
                    lease = self._take(session, item, chunk_hash, parent, now_s)
                    outcome = StageOutcome.NO_ROOM if lease is None else StageOutcome.GRANTED
                    granted += [lease] if lease else []
                full = full or outcome in (StageOutcome.NO_ROOM, StageOutcome.OVER_CAP)
                outcomes.append(outcome)
                self._d.counters[f"stage_{outcome.name.lower()}"] += 1
                parent = chunk_hash
        rows = len(session.all_rows) if session else 0
        columns = tuple(columns_of(self._d, [w.slots[r] for w in granted]) for r in range(rows))
        free = self._d.arena.largest_free_bytes()
        return ev.Staged(tuple(outcomes), tuple(w.id for w in granted), columns, free)

    def commit(self, event: ev.Commit) -> ev.Committed:
        """Publish; a key that is resident by now frees the loser's extents."""
        session = self._d.sessions.get(event.session)
        outcomes = []
        for lease_id in event.leases:
            lease = session.writes_open.get(lease_id) if session else None
            if session is None or lease is None:
                outcome = CommitOutcome.UNKNOWN_LEASE
            elif lease.hash in self._d.residents.index:
                self.finish(session, lease)
                for slot in lease.slots:
                    self._d.slots.move(slot, SlotState.FREE)
                outcome = CommitOutcome.ALREADY_RESIDENT
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
                    salt=lease.salt,
                )
                residents.publish(chunk)
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

    def lose(self, session: Session, lease: WriteLease, *, confirmed: bool, now_s: float) -> None:
        """End a write lease without publishing."""
        self.finish(session, lease)
        for slot, writer in zip(lease.slots, lease.writers, strict=True):
            self._d.give_up(slot, writer, confirmed=confirmed, now_s=now_s)

    def finish(self, session: Session, lease: WriteLease) -> None:
        """The lease is over, whatever became of its extents."""
        del session.writes_open[lease.id]
        session.staging_bytes -= session.chunk_bytes
        if self._latest.get(lease.hash) is lease:
            del self._latest[lease.hash]
        self._d.residents.detach(lease.parent)

    def _refusal(
        self, session: Session | None, chunk_hash: ChunkHash, now_s: float
    ) -> StageOutcome | None:
        if session is None or not session.ready:
            return StageOutcome.NOT_READY
        if not session.writes:
            return StageOutcome.READ_ONLY
        chunk = self._d.residents.index.get(chunk_hash)
        if chunk is not None and chunk.specs is not session.all_rows:
            return StageOutcome.LAYOUT_MISMATCH
        if chunk is not None:
            self._d.residents.policy.used(chunk)
            return StageOutcome.RESIDENT
        other = self._latest.get(chunk_hash)
        limits = self._d.limits
        if other is not None and now_s - other.since_s < limits.in_progress_after_s:
            return StageOutcome.IN_PROGRESS
        cap = limits.staging_fraction * self._d.arena.populated_bytes
        bytes_in = self._d.slots.bytes_in
        staged = sum(
            bytes_in[s] for s in (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED)
        )
        mine = session.staging_bytes + session.chunk_bytes
        if staged + session.chunk_bytes > cap or mine > cap * limits.session_staging_fraction:
            return StageOutcome.OVER_CAP
        return None

    def _take(
        self,
        session: Session,
        item: ev.StageItem,
        chunk_hash: ChunkHash,
        parent: ChunkHash,
        now_s: float,
    ) -> WriteLease | None:
        taken: list[SlotId] = []
        for spec in session.all_rows:
            slot = self._d.residents.stage(spec.object_bytes, protect=parent)
            if slot is None:
                for unused in taken:
                    self._d.slots.move(unused, SlotState.FREE)
                return None
            taken.append(slot)
        writers = tuple(session.workers[rank] for rank in session.row_ranks)
        lease = WriteLease(
            id=LeaseId(self._d.new_id()),
            session=session.id,
            request=item.request,
            hash=chunk_hash,
            parent=parent,
            salt=item.salt,
            slots=tuple(taken),
            writers=writers,
            since_s=now_s,
        )
        session.writes_open[lease.id] = lease
        session.staging_bytes += session.chunk_bytes
        self._latest[chunk_hash] = lease
        self._d.residents.attach(parent)
        return lease
