"""The one door to the core's state: `Directory.handle(event, now_s)` -> (reply, effects).

Decides every lookup, staging, publish, release and reclaim. The shell (server/service.py) turns
messages into events and carries replies and effects out; it decides nothing.
"""

from collections import Counter, deque
from collections.abc import Callable
from typing import cast

import msgspec

from kvkeep.core import events as ev
from kvkeep.core.arena import Arena
from kvkeep.core.eviction import EvictionPolicy, PrefixLRU
from kvkeep.core.leases import Peer, ReadLease, Session
from kvkeep.core.lookup import Finder
from kvkeep.core.membership import Membership
from kvkeep.core.resident import Residents
from kvkeep.core.slots import Generations, SlotTable
from kvkeep.core.staging import Stager
from kvkeep.types import ChunkHash, LeaseId, Reason, RowSpec, SlotId, SlotState


class Limits(msgspec.Struct, frozen=True):
    """Bounds the core keeps. Fractions are of the populated capacity."""

    staging_fraction: float = 0.5
    session_staging_fraction: float = 0.25  # of the staging bound
    session_reserve_fraction: float = 0.5
    in_progress_after_s: float = 2.0  # after this a second staging of one key is allowed
    quarantine_s: float = 5.0  # for extents of a dead owner with DMA


class Directory:
    """All state of one server epoch. `new_id` gives random non-zero 64-bit ids."""

    def __init__(
        self,
        generations: Generations,
        new_id: Callable[[], int],
        *,
        limits: Limits | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.arena = Arena()
        self.slots = SlotTable(self.arena, generations)
        self.residents = Residents(self.slots, policy or PrefixLRU())
        self.sessions: dict[str, Session] = {}
        self.peers: dict[int, Peer] = {}
        self.counters: Counter[str] = Counter()
        self.quarantine: deque[tuple[float, SlotId]] = deque()
        self.effects: list[ev.Effect] = []
        self.layouts: dict[tuple[RowSpec, ...], tuple[RowSpec, ...]] = {}  # interned
        self.new_id = new_id
        self._finder = Finder(self)
        self.stager = Stager(self)
        self._membership = Membership(self)

    def handle(self, event: ev.Event, now_s: float) -> tuple[ev.Reply, list[ev.Effect]]:
        """Apply one event. A refused event changes nothing."""
        reply = self._apply(event, now_s)
        effects, self.effects = self.effects, []
        return reply, effects

    def _apply(self, event: ev.Event, now_s: float) -> ev.Reply:
        match event:
            case ev.Lookup():
                return self._finder.lookup(event, now_s)
            case ev.End():
                return self._end(event)
            case ev.Stage():
                return self.stager.stage(event, now_s)
            case ev.Commit():
                return self.stager.commit(event)
            case ev.Abort():
                return self.stager.abort(event, now_s)
            case ev.Drop():
                return self._drop(event)
            case ev.Join():
                return self._membership.join(event, now_s)
            case ev.PeerClosed():
                return self._membership.closed(event.peer, now_s)
            case ev.PeerGone():
                return self._membership.gone(event.peer, now_s=now_s, confirmed=event.confirmed)
            case ev.Grown():
                self.arena.grow(event.populated_bytes)
                return ev.Done(1)
            case ev.Revoke():
                return self._revoke(event.lease)
            case ev.Clear():
                return self._clear(force=event.force)
            case ev.Tick():
                return self._tick(now_s)

    # ---- readers

    def _end(self, event: ev.End) -> ev.Reply:
        session = self.sessions.get(event.session)
        lease = session.reads_open.get(event.lease) if session else None
        ended = 0
        for rank in event.ranks:
            if session is not None and lease is not None and self.end_part(session, lease, rank):
                ended += 1
            else:
                self.counters["end_again"] += 1
        if ended:
            self.counters[f"ended_{event.outcome.name.lower()}"] += ended
        return ev.Done(ended)

    def end_part(self, session: Session, lease: ReadLease, rank: int) -> bool:
        """End one rank's part; the last part ends the lease. False: it had ended before."""
        if rank not in lease.live_ranks:
            return False
        lease.live_ranks.discard(rank)
        mine = [i for i, r in enumerate(session.row_ranks) if r == rank]
        last = not lease.live_ranks
        for chunk in reversed(lease.chunks):
            became_idle = False
            for row in mine:
                became_idle |= self.slots.unhold(chunk.rows[row])
            if last:
                session.release(chunk)
            if became_idle and (chunk.children == 0 or not chunk.linked):
                self.residents.settle(chunk)
        if last:
            del session.reads_open[lease.id]
        return True

    def _revoke(self, lease_id: LeaseId) -> ev.Reply:
        for session in self.sessions.values():
            lease = session.reads_open.get(lease_id)
            if lease is not None and session.recompute:
                for rank in list(lease.live_ranks):
                    self.end_part(session, lease, rank)
                self.counters["revoked"] += 1
                self.effects.append(ev.LeaseRevoked(session.id, lease_id))
                return ev.Done(1)
        return ev.Done(0)

    # ---- leaving L1

    def _drop(self, event: ev.Drop) -> ev.Reply:
        dropped = 0
        for chunk_hash in self.split(event.hashes):
            chunk = self.residents.index.get(chunk_hash)
            if chunk is not None and event.session in self.sessions:
                self.residents.unlink(chunk, Reason.CORRUPT)
                dropped += 1
        self.counters["dropped"] += dropped
        return ev.Done(dropped)

    def _clear(self, *, force: bool) -> ev.Reply:
        if force:
            for session in list(self.sessions.values()):
                for lease_id in list(session.reads_open):
                    self._revoke(lease_id)
        chunks = list(self.residents.index.values())
        for chunk in chunks:
            self.residents.unlink(chunk, Reason.EVICTED)
        self.counters["cleared"] += len(chunks)
        return ev.Done(len(chunks))

    def _tick(self, now_s: float) -> ev.Reply:
        freed = 0
        while self.quarantine and self.quarantine[0][0] <= now_s:
            self.slots.move(self.quarantine.popleft()[1], SlotState.FREE)
            freed += 1
        return ev.Done(freed)

    def give_up(self, slot: SlotId, writer: int, *, confirmed: bool, now_s: float) -> None:
        """A staged extent loses its owner: free it, quarantine it, or wait for its process."""
        peer = self.peers.get(writer)
        if confirmed or peer is None or (peer.gone and not peer.dma):
            self.slots.move(slot, SlotState.FREE)
        elif peer.gone:
            self.slots.move(slot, SlotState.QUARANTINED)
            self.quarantine.append((now_s + self.limits.quarantine_s, slot))
        else:
            self.slots.move(slot, SlotState.ORPHANED)
            peer.orphans.add(slot)

    @staticmethod
    def split(packed: bytes) -> list[ChunkHash]:
        """Packed hashes as a list; a ragged tail is ignored."""
        return cast("list[ChunkHash]", [packed[i : i + 32] for i in range(0, len(packed) - 31, 32)])
