"""Decides fetches: which lookups wait for L2, what is fetched for whom, and when they are answered.

One fetch per chunk, whoever waits for it; verified bytes are published and reserved for the waiters
in one event. Without room a wanted chunk waits until its lookup's deadline. An extent of a fetch is
reused only after its I/O has returned, however late that is (DESIGN section 4).
"""

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.flights import Fetching, Flights
from kvkeep.core.leases import NO_TICKET, ReadLease, Session
from kvkeep.core.lookup import Asked, answer
from kvkeep.core.tickets import Place, Ticket, needed_from
from kvkeep.types import ChunkHash, LeaseId, Namespace, Reason, TicketId

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory


class Fetcher:
    """Pending lookups (tickets) and the fetches they wait for."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory
        self.flights = Flights(directory)
        self.tickets: dict[TicketId, Ticket] = {}
        self.queued: OrderedDict[TicketId, Ticket] = OrderedDict()  # with something not begun
        self.lacks_room: Ticket | None = None  # the oldest that waits for memory

    # ---- one lookup

    def begin(
        self,
        event: ev.Lookup,
        session: Session,
        hashes: list[ChunkHash],
        now_s: float,
    ) -> ev.Pending:
        """Ask the backends about what is not here."""
        d = self._d
        wait_s = d.limits.lookup_wait_s if event.wait_s is None else event.wait_s
        ticket = Ticket(
            TicketId(d.new_id()),
            session,
            event.request,
            hashes,
            event.salt,
            event.near,
            now_s,
            now_s + wait_s,
            places=[Place.UNKNOWN] * len(hashes),
        )
        self.tickets[ticket.id] = ticket
        index = d.residents.index
        ticket.asked = [i for i, chunk_hash in enumerate(hashes) if chunk_hash not in index]
        packed = b"".join([hashes[i] for i in ticket.asked])
        space = session.space(event.salt)
        question = ev.Probe(ticket.id, space, session.objects, packed, ticket.deadline_s)
        d.effects.append(question)
        return ev.Pending(ticket.id)

    def probed(self, event: ev.Probed, now_s: float) -> ev.Done:
        """The backends have answered: plan, reserve, and fetch what is missing."""
        ticket = self.tickets.get(event.ticket)
        if ticket is None or ticket.probed:
            return ev.Done(0)
        ticket.probed = True
        d, session = self._d, ticket.session
        if session.leading_run and not self._extends(ticket, event):
            in_l2 = {p for p, held in zip(ticket.asked, event.holders, strict=True) if held}
            asked = Asked(
                ticket.request, ticket.hashes, ticket.near, in_l2, Reason.L2_MISS, event.down != 0
            )
            self._answer(ticket, d.finder.local(session, asked, now_s))
            return ev.Done(1)
        for position, holders in zip(ticket.asked, event.holders, strict=True):
            if holders:
                ticket.holders[position] = holders
            elif event.down:
                ticket.reasons[position] = Reason.L2_ERROR
            else:
                why = d.residents.why_absent(ticket.hashes[position], Reason.L2_MISS)
                ticket.reasons[position] = why
        found = [d.residents.index.get(h) for h in ticket.hashes]
        seen: set[ChunkHash] = set()
        for position, (chunk_hash, chunk) in enumerate(zip(ticket.hashes, found, strict=True)):
            coming = self.flights.by_hash.get(chunk_hash)
            if chunk_hash in seen:  # no honest chain has a hash twice
                ticket.places[position] = Place.LOST
            elif chunk is not None and chunk.specs is session.all_rows:
                ticket.places[position] = Place.HELD
            elif position in ticket.holders or (coming is not None and not coming.late):
                ticket.places[position] = Place.WANTED
            else:
                ticket.places[position] = Place.LOST
                if coming is not None:
                    ticket.reasons[position] = Reason.L2_TIMEOUT
            seen.add(chunk_hash)
        self._keep_to_caps(ticket, found)
        if ticket.id not in self.tickets:  # answered: nothing fits yet, and it is not near
            return ev.Done(1)
        self._reserve(ticket, found, now_s)
        ticket.queue.extend(ticket.wanted())
        session.wanted.update(ticket.hashes[i] for i in ticket.queue)
        if ticket.queue:
            self.queued[ticket.id] = ticket
            self.pump()
        if ticket.id in self.tickets and not self._finish_if_done(ticket):
            d.effects.append(ev.Alarm(ticket.id, ticket.deadline_s))
        return ev.Done(1)

    def _extends(self, ticket: Ticket, event: ev.Probed) -> bool:
        """Whether L2 has, or is bringing, the first chunk that L1 does not have."""
        index = self._d.residents.index
        for position, chunk_hash in enumerate(ticket.hashes):
            if chunk_hash not in index:
                told = zip(ticket.asked, event.holders, strict=True)
                holders = next((held for asked, held in told if asked == position), 0)
                return holders != 0 or chunk_hash in self.flights.by_hash
        return False

    def _keep_to_caps(self, ticket: Ticket, found: list[Chunk | None]) -> None:
        """Give up positions that this session may not reserve, and those no hit needs."""
        session = ticket.session
        reach = ticket.reachable()
        room = self._d.chunks_to_reserve(session)
        first = needed_from(session.all_rows, reach)
        for position in range(reach):
            chunk = found[position]
            wanted = ticket.places[position] is Place.WANTED
            if wanted and position < first:
                ticket.places[position] = Place.LOST
                continue
            counted = ticket.hashes[position] in session.wanted if wanted else chunk in session.held
            if counted or (chunk is None and not wanted):
                continue
            room -= 1
            if room < 0:
                if not ticket.near:  # the answer stands, the reservation comes later
                    reasons = _reasons(self._d, ticket, found, reach)
                    self._answer(ticket, ev.Hit(LeaseId(0), reach, (), reasons))
                    return
                for beyond in range(position, reach):
                    ticket.places[beyond] = Place.LOST
                    ticket.reasons[beyond] = Reason.NO_ROOM
                break
        for position in self._needless(ticket):  # not counted as wanted yet
            ticket.places[position] = Place.LOST

    def _needless(self, ticket: Ticket) -> list[int]:
        """Wanted positions that no reachable hit needs."""
        reach = ticket.reachable()
        first = needed_from(ticket.session.all_rows, reach)
        return [position for position in ticket.wanted() if not first <= position < reach]

    def _trim(self, ticket: Ticket) -> None:
        """What no reachable hit needs is not wanted any more."""
        for position in self._needless(ticket):
            self._unwant(ticket, position)
            ticket.places[position] = Place.LOST

    def _reserve(self, ticket: Ticket, found: list[Chunk | None], now_s: float) -> None:
        """Hold what is resident within reach, so that it stays while the rest is fetched."""
        session = ticket.session
        ranks = set(session.row_ranks)
        lease = ReadLease(
            LeaseId(self._d.new_id()), session.id, ticket.request, [], ranks, now_s, ticket.id
        )
        ticket.lease = session.reads_open[lease.id] = lease
        for position in range(ticket.reachable()):
            chunk = found[position]
            if ticket.places[position] is Place.HELD and chunk is not None:
                self._hold(ticket, position, chunk)

    def _hold(self, ticket: Ticket, position: int, chunk: Chunk) -> None:
        assert ticket.lease is not None
        self._d.slots.hold(chunk.rows)
        ticket.session.hold((chunk,))
        ticket.lease.chunks.append(chunk)
        ticket.places[position] = Place.HELD
        ticket.chunks[position] = chunk
        self._d.residents.policy.used((chunk,))

    # ---- fetches

    def pump(self) -> None:
        """Begin what is wanted and fits, oldest lookup first."""
        self.lacks_room = None
        for ticket in list(self.queued.values()):
            room = self._begin_queued(ticket)
            if not ticket.queue:
                self.queued.pop(ticket.id, None)
            self._finish_if_done(ticket)
            if not room:
                self.lacks_room = ticket
                break  # nobody overtakes: a large prefix must not starve

    def _begin_queued(self, ticket: Ticket) -> bool:
        """Begin what can be; False: memory is what is missing."""
        d = self._d
        while ticket.queue:
            position = ticket.queue[0]
            chunk_hash = ticket.hashes[position]
            chunk, coming = d.residents.index.get(chunk_hash), self.flights.by_hash.get(chunk_hash)
            if chunk is not None:
                self._arrived(ticket, position, chunk, None)
            elif coming is not None and not coming.late:
                coming.waiters[ticket] = position
            elif coming is not None:  # one fetch per key: the late one must return first
                self._lose(ticket, position, Reason.L2_TIMEOUT)
            elif not (holders := ticket.holders.get(position, 0)):
                self._lose(ticket, position, Reason.L2_MISS)  # it was coming, and did not arrive
            else:
                backend = self.flights.backend_for(holders, ticket.session.chunk_bytes)
                if backend is None:
                    return True
                if not d.quotas.admits(ticket.salt, ticket.session.chunk_bytes):
                    d.quotas.refuse(ticket.salt)
                    self._lose(ticket, position, Reason.OVER_QUOTA)
                    continue
                if not self.flights.start(ticket, position, backend):
                    return False
            if ticket.queue and ticket.queue[0] == position:
                ticket.queue.popleft()
        return True

    def late(self, event: ev.FetchLate) -> ev.Done:
        """Nobody waits for this I/O any more; its extents stay staged until it has returned."""
        fetch = self.flights.late(event.transfer)
        if fetch is not None:
            self._tell(fetch, None, Reason.L2_TIMEOUT)
        return ev.Done(fetch is not None)

    def fetched(self, event: ev.Fetched) -> ev.Done:
        """Hold the chunk for everyone who waits, or tell them why it did not come."""
        returned = self.flights.returned(event)
        if returned is not None:
            self._tell(*returned)
        return ev.Done(returned is not None)

    def _tell(self, fetch: Fetching, chunk: Chunk | None, reason: Reason) -> None:
        waiters, fetch.waiters = fetch.waiters, {}
        for ticket, position in waiters.items():
            if ticket.places[position] is not Place.WANTED:
                continue
            if chunk is not None:
                fetched = chunk.rows is fetch.slots  # else an engine committed it meanwhile
                self._arrived(ticket, position, chunk, fetch.backend if fetched else None)
            elif not self._elsewhere(ticket, position, fetch):
                self._lose(ticket, position, reason)
        for ticket in waiters:  # only now: whoever gives it back must not be its last reader
            self._finish_if_done(ticket)

    def _elsewhere(self, ticket: Ticket, position: int, fetch: Fetching) -> bool:
        """Another backend has what this one did not bring: it is tried next."""
        holders = ticket.holders.get(position, 0) & ~(1 << fetch.backend)
        ticket.holders[position] = holders
        if not holders or fetch.late or fetch.doomed:
            return False
        ticket.queue = deque(sorted((*ticket.queue, position)))
        self.queued[ticket.id] = ticket
        return True

    def _arrived(self, ticket: Ticket, position: int, chunk: Chunk, backend: int | None) -> None:
        self._unwant(ticket, position)
        if chunk.specs is not ticket.session.all_rows:
            ticket.places[position] = Place.LOST
            ticket.reasons[position] = Reason.LAYOUT_MISMATCH
            self._trim(ticket)
            return
        if backend is not None:
            ticket.tiers[position] = 1 + backend
        self._hold(ticket, position, chunk)

    def _lose(self, ticket: Ticket, position: int, reason: Reason) -> None:
        self._unwant(ticket, position)
        ticket.places[position] = Place.LOST
        ticket.reasons[position] = reason
        self._trim(ticket)

    def _unwant(self, ticket: Ticket, position: int) -> None:
        """The ticket does not wait for this position any more."""
        chunk_hash, wanted = ticket.hashes[position], ticket.session.wanted
        if chunk_hash in wanted:
            wanted[chunk_hash] -= 1
            if not wanted[chunk_hash]:
                del wanted[chunk_hash]
        if position in ticket.queue:
            ticket.queue.remove(position)
        fetch = self.flights.by_hash.get(chunk_hash)
        if fetch is not None:
            fetch.waiters.pop(ticket, None)

    # ---- the end of a lookup

    def _finish_if_done(self, ticket: Ticket) -> bool:
        """Answer when nothing is awaited; True: it is answered."""
        if ticket.id in self.tickets and not ticket.wanted():
            self._finish(ticket)
        return ticket.id not in self.tickets

    def expire(self, event: ev.Expire, now_s: float) -> ev.Done:
        """The deadline: answer with what is there."""
        ticket = self.tickets.get(event.ticket)
        if ticket is None:
            return ev.Done(0)
        if now_s < ticket.deadline_s:  # clocks differ in their last digits
            self._d.effects.append(ev.Alarm(ticket.id, ticket.deadline_s))
            return ev.Done(0)
        if not ticket.probed:  # no backend has even said what it has
            self.probed(ev.Probed(ticket.id, (0,) * len(ticket.asked), ~0), now_s)
            if ticket.id not in self.tickets:
                return ev.Done(1)
        for position in ticket.wanted():
            chunk = self._d.residents.index.get(ticket.hashes[position])
            if chunk is not None:  # an engine committed it meanwhile
                self._arrived(ticket, position, chunk, None)
                continue
            queued = position in ticket.queue
            self._unwant(ticket, position)
            ticket.places[position] = Place.LOST
            ticket.reasons[position] = Reason.NO_ROOM if queued else Reason.L2_TIMEOUT
        self._d.counters["lookups_expired"] += 1
        self._finish(ticket)
        return ev.Done(1)

    def _finish(self, ticket: Ticket) -> None:
        """Hand the lease over with the common prefix of what it holds; give the rest back."""
        d, session, lease = self._d, ticket.session, ticket.lease
        d.sweeper.touch(ticket.hashes)  # what is condemned is not part of the hit
        for position, chunk in ticket.chunks.items():
            if not chunk.linked:  # dropped or cleared while the rest was awaited
                ticket.places[position] = Place.LOST
        hit = ticket.reached()
        lost = [p for p in ticket.chunks if p >= hit or ticket.places[p] is Place.LOST]
        if lease is not None:
            for position in lost:
                chunk = ticket.chunks.pop(position)
                lease.chunks.remove(chunk)
                session.release(chunk)
                d.persister.release(chunk)
            lease.chunks = [ticket.chunks[p] for p in sorted(ticket.chunks)]
            lease.ticket = NO_TICKET
            if not hit:
                del session.reads_open[lease.id]
        found = [d.residents.index.get(h) for h in ticket.hashes]
        reasons = _reasons(d, ticket, found, hit)
        if not hit or lease is None:
            self._answer(ticket, ev.Hit(LeaseId(0), 0, (), reasons))
            return
        prefix = [ticket.chunks.get(p) for p in range(hit)]
        tiers = bytes([ticket.tiers.get(p, 0) for p in range(hit)])
        self._answer(ticket, answer(d, lease, prefix, reasons, tiers))

    def _answer(self, ticket: Ticket, hit: ev.Hit) -> None:
        del self.tickets[ticket.id]
        self.queued.pop(ticket.id, None)
        self._d.effects.append(ev.Answered(ticket.session.id, ticket.id, hit))

    # ---- before its time

    def cancel(self, event: ev.Cancel) -> ev.Done:
        """Nobody waits for the lookup: give back what it reserved; fetches run to their end."""
        ticket = self.tickets.get(event.ticket)
        if ticket is None or ticket.session.id != event.session:
            self._d.counters["cancel_again"] += 1
            return ev.Done(0)
        self._drop(ticket)
        del self.tickets[ticket.id]
        self._d.counters["cancelled"] += 1
        return ev.Done(1)

    def unready(self, session: Session) -> None:
        """A rank or the scheduler left, or the layout changed: its lookups end with nothing."""
        self._end_with(session, Reason.NOT_READY)

    def lease_ended(self, ticket_id: TicketId) -> None:
        """A pending lookup's own lease was revoked."""
        ticket = self.tickets.get(ticket_id)
        if ticket is not None:
            ticket.lease = None
            self._end_one(ticket, Reason.REVOKED)

    def forget(self, space: Namespace) -> None:
        """Nothing of this fingerprint may be found: neither what waits nor what is on its way."""
        for fetch in self.flights.fetches.values():
            fetch.doomed |= fetch.space.fingerprint == space.fingerprint
        mark = space.fingerprint
        for ticket in [t for t in self.tickets.values() if t.session.fingerprint == mark]:
            self._end_one(ticket, Reason.EVICTED)

    def _end_with(self, session: Session, reason: Reason) -> None:
        for ticket in [t for t in self.tickets.values() if t.session is session]:
            self._end_one(ticket, reason)

    def _end_one(self, ticket: Ticket, reason: Reason) -> None:
        self._drop(ticket)
        self._answer(ticket, ev.Hit(LeaseId(0), 0, (), (reason,) * len(ticket.hashes)))

    def _drop(self, ticket: Ticket) -> None:
        """End its lease and its waiting."""
        for position in ticket.wanted():
            self._unwant(ticket, position)
            ticket.places[position] = Place.LOST
        self.queued.pop(ticket.id, None)
        lease, ticket.lease = ticket.lease, None
        if lease is not None:
            lease.ticket = NO_TICKET
            for rank in list(lease.live_ranks):
                self._d.end_part(ticket.session, lease, rank)


def _reasons(
    directory: "Directory", ticket: Ticket, found: list[Chunk | None], hit: int
) -> tuple[Reason, ...]:
    """Why each chunk from `hit` on is not part of it."""
    reasons: list[Reason] = []
    for position in range(hit, len(ticket.hashes)):
        reason = ticket.reasons.get(position)
        if reason is None and found[position] is None and position not in ticket.holders:
            reason = directory.residents.why_absent(ticket.hashes[position])
        reasons.append(reason or Reason.BEHIND)
    return tuple(reasons)
