"""Decides what an order to clear or forget has condemned, and takes it out of L1 a part at a time.

From the order's moment on nobody finds what was resident before: whatever an event looks at is
unlinked first when it is condemned, the rest by `Sweep` events. One walk over the index serves all
orders; an order is through after one whole round. A chunk published meanwhile is remembered as born
after the orders of that time, and stays.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.index import SHARDS, ChunkIndex
from kvkeep.core.leases import Session
from kvkeep.types import ChunkHash, Fingerprint, LeaseId, Reason

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

UNLINK_COST = 20  # looks that take as long as unlinking one chunk does
_AT_ONCE = 64  # chunks taken from the index in one go
_STALE_AT_ONCE = 16  # shards freed in one go


class Walk:
    """Every chunk, some at a time, round and round, while chunks come and go."""

    def __init__(self, index: ChunkIndex) -> None:
        self.finished = 0  # shards that were walked to their end
        self._index = index
        self._started = 0
        self._rest: list[Chunk] = []  # of the shard that is being walked

    def take(self, most: int) -> list[Chunk]:
        """The next chunks of one shard; some may have left L1 since the walk entered it."""
        if not self._rest:
            self._rest = list(self._index.shards[self._started % SHARDS].values())
            self._started += 1
        part = self._rest[-most:]
        del self._rest[-most:]
        if not self._rest:
            self.finished = self._started
        return part

    def whole_round(self) -> int:
        """The value of `finished` at which everything that is there now was walked over."""
        return self._started + SHARDS


@dataclass(eq=False, slots=True)
class _Order:
    """Everything of a layout (None: of all) that was resident when the order came."""

    id: int
    fingerprint: Fingerprint | None
    until: int  # where the walk has seen everything
    chunks: int = 0  # unlinked for it
    told: bool = True  # its end is said by an effect


class Sweeper:
    """The orders that are not through."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory
        self._walk = Walk(directory.residents.index)
        self._orders: dict[int, _Order] = {}  # oldest first
        self._of: dict[Fingerprint | None, list[_Order]] = {}
        # Published since the oldest order -> the newest order then. In shards, like the index.
        self._born: list[dict[ChunkHash, int]] = [{} for _ in range(SHARDS)]
        self._stale: list[dict[ChunkHash, int]] = []  # of orders that are through
        self._reads: deque[tuple[Session, LeaseId]] = deque()  # to be revoked
        self._ends: deque[tuple[Session, LeaseId, int]] = deque()  # and the rank whose part ends
        self._last_id = 0

    @property
    def active(self) -> bool:
        """Something is condemned, or may be."""
        return bool(self._orders)

    @property
    def busy(self) -> bool:
        """There is something to carry on."""
        return bool(self._orders or self._stale or self._ends)

    # ---- orders

    def order(self, fingerprint: Fingerprint | None, *, force: bool, sliced: bool) -> ev.Reply:
        """Condemn what is resident. `force`: end the reads that may end, too.

        Sliced, the answer says which effect `Swept` tells the end; else all of it happens now.
        """
        self._last_id += 1
        order = _Order(self._last_id, fingerprint, self._walk.whole_round(), told=sliced)
        self._orders[order.id] = order
        self._of.setdefault(fingerprint, []).append(order)
        if force:
            for session in self._d.sessions.values():
                if session.recompute:
                    self._reads.extend((session, lease) for lease in session.reads_open)
        if sliced:
            return ev.Sweeping(order.id)
        while order.id in self._orders:
            self.sweep(_AT_ONCE * UNLINK_COST)
        return ev.Done(order.chunks)

    def sweep(self, budget: int) -> int:
        """Carry on for about as long as `budget` looks at chunks take; what is left of it."""
        del self._stale[-_STALE_AT_ONCE:]
        while budget > 0 and self._ends:
            budget -= self._end_next()
        while budget > 0 and self._orders:
            if self._reads:
                budget -= self._revoke_next()
                continue
            part = self._walk.take(_AT_ONCE)
            budget -= 1 + len(part)
            for chunk in part:
                if chunk.linked and (order := self._order_of(chunk)) is not None:
                    self._unlink(chunk, order)
                    budget -= UNLINK_COST
            self._end_orders()
        return budget

    def _revoke_next(self) -> int:
        """End one read; what that cost."""
        session, lease_id = self._reads.popleft()
        lease = session.reads_open.get(lease_id)
        if lease is None:
            return 1
        chunks = len(lease.chunks)
        self._d.revoke(session, lease)
        return 1 + chunks * UNLINK_COST // 2

    def end_reads(self, session: Session, ranks: Iterable[int]) -> None:
        """Nobody reads for these ranks any more: some reads end at once, the others by and by."""
        chunks_left = self._d.limits.end_reads_chunks
        for rank in ranks:
            for lease in list(session.reads_open.values()):
                chunks_left -= len(lease.chunks)
                if chunks_left >= 0:
                    self._d.end_part(session, lease, rank)
                else:
                    self._ends.append((session, lease.id, rank))

    def _end_next(self) -> int:
        """End one part of a read; what that cost."""
        session, lease_id, rank = self._ends.popleft()
        lease = session.reads_open.get(lease_id)
        if lease is None:
            return 1
        chunks = len(lease.chunks)
        self._d.end_part(session, lease, rank)
        self._d.membership.forget_if_empty(session)
        return 1 + chunks * UNLINK_COST // 10

    def _end_orders(self) -> None:
        while self._orders:
            order = next(iter(self._orders.values()))
            if order.until > self._walk.finished:
                return
            del self._orders[order.id]
            self._of[order.fingerprint].remove(order)
            if not self._of[order.fingerprint]:
                del self._of[order.fingerprint]
            name = "cleared" if order.fingerprint is None else "forgotten"
            self._d.counters[name] += order.chunks
            if order.told:
                self._d.effects.append(ev.Swept(order.id, order.chunks))
        if any(self._born):
            self._stale += self._born
            self._born = [{} for _ in range(SHARDS)]

    # ---- what an event meets

    def meet(self, event: ev.Event) -> None:
        """Before the event: what it would find and must not, it does not find."""
        d = self._d
        match event:
            case ev.Lookup() | ev.Drop():
                self.touch(d.split(event.hashes))
            case ev.Stage():
                for item in event.items:
                    self.touch(d.split(item.hashes))
            case ev.Probed() | ev.Expire():
                ticket = d.fetcher.tickets.get(event.ticket)
                if ticket is not None:
                    self.touch(ticket.hashes)
            case ev.Commit():
                session = d.sessions.get(event.session)
                for lease_id in event.leases if session is not None else ():
                    assert session is not None
                    lease = session.writes_open.get(lease_id)
                    if lease is not None:
                        self._renew(lease.hash)
            case ev.Fetched():
                fetch = d.fetcher.flights.fetches.get(event.transfer)
                if fetch is not None:
                    self._renew(fetch.hash)
            case _:
                pass

    def touch(self, hashes: Iterable[ChunkHash]) -> None:
        """Unlink what is condemned of these."""
        if not self._orders:
            return
        for chunk in self._d.residents.index.find(hashes):
            if chunk is not None and (order := self._order_of(chunk)) is not None:
                self._unlink(chunk, order)

    def _renew(self, chunk_hash: ChunkHash) -> None:
        """The key is about to be published: what is there of it from now on was born now."""
        self.touch((chunk_hash,))
        self._born[chunk_hash[0]][chunk_hash] = self._last_id

    def condemned(self, chunk: Chunk) -> bool:
        """Whether nobody may find the chunk any more."""
        return bool(self._orders) and self._order_of(chunk) is not None

    def forgotten(self, chunk: Chunk) -> bool:
        """Whether its layout is what condemns it."""
        order = self._order_of(chunk)
        return order is not None and order.fingerprint is not None

    def gone(self, chunk: Chunk) -> None:
        """The chunk left L1."""
        self._born[chunk.hash[0]].pop(chunk.hash, None)

    def _order_of(self, chunk: Chunk) -> _Order | None:
        """The oldest order that condemns the chunk."""
        born = self._born[chunk.hash[0]].get(chunk.hash, 0)
        oldest: _Order | None = None
        for key in (None, chunk.space.fingerprint):
            for order in self._of.get(key, ()):
                if born < order.id:
                    if oldest is None or order.id < oldest.id:
                        oldest = order
                    break
        return oldest

    def _unlink(self, chunk: Chunk, order: _Order) -> None:
        self._d.residents.unlink(chunk, Reason.EVICTED)
        self._d.persister.left(chunk, forgotten=order.fingerprint is not None)
        self.gone(chunk)
        order.chunks += 1
