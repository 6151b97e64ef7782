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
from kvkeep.core.eviction import Chunk, EvictionPolicy, PrefixLRU
from kvkeep.core.fetching import Fetcher
from kvkeep.core.leases import Peer, ReadLease, Session
from kvkeep.core.lookup import Finder
from kvkeep.core.membership import Membership
from kvkeep.core.persisting import Persister
from kvkeep.core.pressure import Pressure
from kvkeep.core.quota import EVERYTHING, Quotas
from kvkeep.core.resident import Residents
from kvkeep.core.slots import Generations, SlotTable
from kvkeep.core.staging import Stager
from kvkeep.core.sweeping import Sweeper
from kvkeep.types import (
    Amount,
    ChunkHash,
    LeaseId,
    Reason,
    RowSpec,
    SlotId,
    SlotState,
    StorePolicy,
)


class Limits(msgspec.Struct, frozen=True):
    """Bounds the core keeps. Fractions are of the populated capacity."""

    staging_fraction: float = 0.5
    session_staging_fraction: float = 0.25  # of the staging bound
    session_reserve_fraction: float = 0.5
    in_progress_after_s: float = 2.0  # after this a second staging of one key is allowed
    quarantine_s: float = 5.0  # for extents of a dead owner with DMA
    # L2: how many backends there are, and what may be under way to and from them
    backends: int = 0
    lookup_wait_s: float = 0.5
    fetch_fraction: float = 0.25  # of L1, on its way from L2
    fetch_bytes: int = 1 << 30  # and never more than this
    fetches_per_backend: int = 8
    persists_per_backend: int = 4
    persist_queue_bytes: int = 1 << 30
    persist_queue_chunks: int = 1 << 15
    persist_tries: int = 5
    end_reads_chunks: int = 1 << 62  # of reads that end at once when somebody leaves
    low_water_fraction: float = 0.2  # of L1: with less free, write_back writes ahead
    store_policy: StorePolicy = StorePolicy.WRITE_THROUGH
    default_quota: Amount = EVERYTHING  # of L1, for a tenant without a limit of its own


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
        self.arena = Arena(most_taken=len(generations))
        self.slots = SlotTable(self.arena, generations)
        self.residents = Residents(self.slots, policy or PrefixLRU(), self._evicted)
        self.sessions: dict[str, Session] = {}
        self.peers: dict[int, Peer] = {}
        self.counters: Counter[str] = Counter()
        self.quarantine: deque[tuple[float, SlotId]] = deque()
        self.effects: list[ev.Effect] = []
        self.layouts: dict[tuple[RowSpec, ...], tuple[RowSpec, ...]] = {}  # interned
        self.objects: dict[tuple[RowSpec, ...], ev.ObjectRows] = {}  # of each layout
        self.new_id = new_id
        self.sweeper = Sweeper(self)
        self.quotas = Quotas(self, self.limits.default_quota)
        self.stager = Stager(self)
        self.fetcher = Fetcher(self)
        self.persister = Persister(self)
        self.finder = Finder(self)
        self.pressure = Pressure(self)
        self.membership = Membership(self)

    def handle(self, event: ev.Event, now_s: float) -> tuple[ev.Reply, list[ev.Effect]]:
        """Apply one event. A refused event changes nothing."""
        if self.sweeper.active:
            self.sweeper.meet(event)
        reply = self._apply(event, now_s)
        if self.fetcher.queued and not isinstance(event, ev.Probed | ev.Lookup):
            self.fetcher.pump()  # something may have become free
        if not self.persister.idle:
            self.persister.pump(now_s)
        effects, self.effects = self.effects, []
        return reply, effects

    @property
    def busy(self) -> bool:
        """Something is sliced that the next Sweep carries on."""
        return self.sweeper.busy or self.persister.walks

    def _apply(self, event: ev.Event, now_s: float) -> ev.Reply:
        match event:
            case ev.Lookup():
                return self.finder.lookup(event, now_s)
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
                return self.membership.join(event, now_s)
            case ev.PeerClosed():
                return self.membership.closed(event.peer, now_s)
            case ev.PeerGone():
                return self.membership.gone(event.peer, now_s=now_s, confirmed=event.confirmed)
            case ev.Revoke():
                return self._revoke(event.lease)
            case ev.Relieve():
                return self.pressure.relieve(event)
            case ev.Clear():
                self.fetcher.flights.doom()
                return self.sweeper.order(None, force=event.force, sliced=event.sliced)
            case ev.Forget():
                return self._forget(event)
            case ev.Sweep():
                self.persister.walk(self.sweeper.sweep(event.budget))
                return ev.Done(self.busy)
            case ev.Grown():
                self.arena.grow(event.populated_bytes)
                return ev.Done(1)
            case ev.SetQuota():
                return self.quotas.set(event)
            case ev.Tick():
                return self._tick(now_s)
            case _:
                return self._apply_io(event, now_s)

    def _apply_io(
        self,
        event: ev.Cancel
        | ev.Expire
        | ev.Probed
        | ev.Fetched
        | ev.FetchLate
        | ev.Persisted
        | ev.Drain,
        now_s: float,
    ) -> ev.Reply:
        """What concerns L2."""
        match event:
            case ev.Probed():
                return self.fetcher.probed(event, now_s)
            case ev.Fetched():
                return self.fetcher.fetched(event)
            case ev.FetchLate():
                return self.fetcher.late(event)
            case ev.Expire():
                return self.fetcher.expire(event, now_s)
            case ev.Cancel():
                return self.fetcher.cancel(event)
            case ev.Persisted():
                return self.persister.persisted(event, now_s)
            case ev.Drain():
                self.persister.drain(sliced=event.sliced)
                return ev.Done(1)

    def chunks_to_reserve(self, session: Session) -> int:
        """How many more chunks the session may reserve, what it waits for taken off."""
        cap = int(self.limits.session_reserve_fraction * self.arena.populated_bytes)
        promised = session.reserved_bytes + len(session.wanted) * session.chunk_bytes
        return (cap - promised) // session.chunk_bytes

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
            if became_idle:
                self.persister.settle(chunk)
        if last:
            del session.reads_open[lease.id]
            if lease.ticket:
                self.fetcher.lease_ended(lease.ticket)
        return True

    def _revoke(self, lease_id: LeaseId) -> ev.Reply:
        for session in self.sessions.values():
            lease = session.reads_open.get(lease_id)
            if lease is not None and session.recompute:
                self.revoke(session, lease)
                return ev.Done(1)
        return ev.Done(0)

    def revoke(self, session: Session, lease: ReadLease) -> None:
        """End a read; its session recomputes what it was reading."""
        for rank in list(lease.live_ranks):
            self.end_part(session, lease, rank)
        self.counters["revoked"] += 1
        self.effects.append(ev.LeaseRevoked(session.id, lease.id))

    # ---- leaving L1

    def _evicted(self, chunk: Chunk) -> None:
        self.persister.lost(chunk)
        self.sweeper.gone(chunk)

    def _drop(self, event: ev.Drop) -> ev.Reply:
        dropped = 0
        known = event.session in self.sessions
        for chunk_hash in self.split(event.hashes) if known else ():
            self.fetcher.flights.doom(chunk_hash)
            chunk = self.residents.index.get(chunk_hash)
            if chunk is None:
                continue
            self.residents.unlink(chunk, Reason.CORRUPT)
            self.persister.left(chunk)
            self.persister.doom(chunk_hash)
            self.sweeper.gone(chunk)
            if self.limits.backends:  # else every retry would fetch it again
                objects = self.objects[chunk.specs]
                self.effects.append(ev.Discard(chunk.space, objects, chunk_hash, True))
            dropped += 1
        self.counters["dropped"] += dropped
        return ev.Done(dropped)

    def _forget(self, event: ev.Forget) -> ev.Reply:
        """A layout's objects are wrong from now on (new weights, an operator's order)."""
        session = self.sessions.get(event.session)
        if session is None or not session.fingerprint:
            return ev.Done(0)
        space = session.space(None)
        self.fetcher.forget(space)
        self.persister.forget(space)
        for other in self.sessions.values():
            if other.fingerprint == space.fingerprint:
                for lease in other.writes_open.values():
                    lease.doomed = True
        if self.limits.backends:
            self.effects.append(ev.ForgetStored(space))
        return self.sweeper.order(space.fingerprint, force=False, sliced=event.sliced)

    def _tick(self, now_s: float) -> ev.Reply:
        freed = 0
        while self.quarantine and self.quarantine[0][0] <= now_s:
            self.slots.move(self.quarantine.popleft()[1], SlotState.FREE)
            freed += 1
        self.quotas.tick()
        self.persister.tick(now_s)
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
