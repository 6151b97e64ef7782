"""What must be true of L2's part of the core, computed another way than the core computes it.

Follows the events and effects alone: which lookups are pending, which fetches and persists are
under way, what each of them may touch. Every ticket ends once, in time, with a hit that is there;
every transfer ends once, and its memory is nobody else's until then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.testing.sim_usable import longest, split
from kvkeep.types import (
    HASH_BYTES,
    ChunkHash,
    Fingerprint,
    IoOutcome,
    LeaseId,
    Reason,
    SlotId,
    SlotState,
    StorePolicy,
    TicketId,
    TransferId,
)

if TYPE_CHECKING:
    from kvkeep.testing.model import Model

_SOON_S = 1e-6  # timers and clocks differ in their last digits
_LEAVING = (ev.Join, ev.PeerClosed, ev.PeerGone)


@dataclass(slots=True)
class Asked:
    """A lookup that is pending."""

    session: str
    hashes: list[ChunkHash]
    near: bool
    deadline_s: float
    probed: bool = False
    somewhere: set[ChunkHash] = field(default_factory=set)  # L2 said that it has these


@dataclass(slots=True)
class Flight:
    """A fetch that began and has not ended."""

    hash: ChunkHash
    fingerprint: Fingerprint
    backend: int
    ranks: tuple[int, ...]
    slots: tuple[SlotId, ...]
    words: tuple[int, ...]  # their generations
    doomed: bool = False


@dataclass(slots=True)
class Writing:
    """A persist that began and has not ended."""

    chunk: Chunk
    backend: int
    words: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class L2Before:
    """What an event found."""

    held: dict[TicketId, dict[ChunkHash, Chunk]]  # reserved for a ticket
    awaited: dict[TicketId, set[ChunkHash]]
    makes_room: bool  # the event may begin a fetch
    publishes: Flight | None
    plans: TicketId | None  # the lookup that learns what L2 has
    exact: tuple[int, int] | None  # the hit when L2 has nothing


class L2Model:
    """The expectations of one epoch."""

    def __init__(self, model: "Model", counted: Callable[[str], None]) -> None:
        self._model = model
        self._d = model.directory
        self._counted = counted
        self.asked: dict[TicketId, Asked] = {}
        self.flights: dict[TransferId, Flight] = {}
        self.writes: dict[TransferId, Writing] = {}
        self.doomed_leases: set[LeaseId] = set()
        self.stored: dict[ChunkHash, set[int]] = {}  # resident chunks -> backends that have them
        self.resident_since_s: dict[ChunkHash, float] = {}
        self.forgotten_s: dict[Fingerprint, float] = {}
        self.woke_s = 0.0  # the server was stopped until then
        self._last_transfer = {ev.Fetch: 0, ev.Persist: 0}

    # ---- before an event

    def before(self, event: ev.Event) -> L2Before:
        """What is reserved and awaited, and what the event must publish."""
        fetcher = self._d.fetcher
        held: dict[TicketId, dict[ChunkHash, Chunk]] = {}
        awaited: dict[TicketId, set[ChunkHash]] = {}
        for ticket_id in self.asked:
            ticket = fetcher.tickets[ticket_id]
            chunks = ticket.lease.chunks if ticket.lease is not None else ()
            held[ticket_id] = {chunk.hash: chunk for chunk in chunks}
            awaited[ticket_id] = {ticket.hashes[i] for i in ticket.wanted()}
        publishes = self._published(event) if isinstance(event, ev.Fetched) else None
        exact = self._without_l2(event)
        wants_room = isinstance(event, ev.Stage | ev.Probed | ev.Expire | ev.Tick)  # Tick: quotas
        makes_room = bool(fetcher.queued) or wants_room
        plans = self._plans(event)
        return L2Before(held, awaited, makes_room, publishes, plans, exact)

    def _plans(self, event: ev.Event) -> TicketId | None:
        """The lookup that learns by this event what L2 has."""
        if not isinstance(event, ev.Probed | ev.Expire):
            return None
        asked = self.asked.get(event.ticket)
        return event.ticket if asked is not None and not asked.probed else None

    def _published(self, event: ev.Fetched) -> Flight | None:
        flight = self.flights.get(event.transfer)
        assert flight is not None, "a fetch ended that is not under way"
        good = all(outcome is IoOutcome.OK for outcome in event.outcomes)
        new = good and not flight.doomed and flight.hash not in self._model.resident
        return flight if new else None

    def _without_l2(self, event: ev.Event) -> tuple[int, int] | None:
        """The hit when no backend has anything and nothing is on its way: what the cap allows.

        At least with what is promised to other lookups of the session taken off, at most without.
        """
        match event:
            case ev.Probed() if not any(event.holders):
                asked = self.asked.get(event.ticket)
            case ev.Expire():  # no backend has said anything
                asked = self.asked.get(event.ticket)
            case _:
                return None
        if asked is None or not asked.near or asked.probed:
            return None
        flying = {flight.hash for flight in self.flights.values()}
        if flying & set(asked.hashes):
            return None
        session = self._d.sessions[asked.session]
        promised_bytes = len(session.wanted) * session.chunk_bytes
        return self._under_cap(asked, promised_bytes), self._under_cap(asked, 0)

    def _under_cap(self, asked: Asked, promised_bytes: int) -> int:
        """The hit of what is resident, as far as the session may reserve it."""
        session = self._d.sessions[asked.session]
        cap = self._cap_bytes()
        room, fits = cap - session.reserved_bytes - promised_bytes, 0
        found = [self._model.resident.get(h) for h in asked.hashes]
        reach = longest(session.all_rows, [chunk is not None for chunk in found])
        for chunk in found[:reach]:
            if chunk is not None and chunk not in session.held:
                room -= chunk.size_bytes
                if room < 0:
                    break
            fits += 1
        return longest(session.all_rows, [chunk is not None for chunk in found[:fits]])

    def _cap_bytes(self) -> int:
        return int(self._d.limits.session_reserve_fraction * self._d.arena.populated_bytes)

    def must_wait(self, event: ev.Lookup, usable: int) -> bool:
        """Whether a lookup of which L1 has so much is answered later."""
        more = usable < len(event.hashes) // HASH_BYTES
        wanted = event.fetch and event.wait_s != 0.0
        return more and wanted and self._d.limits.backends > 0

    # ---- after it: what ended

    def ended(self, event: ev.Event, reply: ev.Reply, now_s: float) -> None:
        """Transfers and tickets that the event itself ends."""
        match event:
            case ev.Lookup() if isinstance(reply, ev.Pending):
                self._asks(event, reply, now_s)
            case ev.Probed():
                asked = self.asked.get(event.ticket)
                if asked is not None:
                    self._probed(asked, event)
            case ev.Cancel():
                asked = self.asked.get(event.ticket)
                mine = asked is not None and asked.session == event.session
                assert reply == ev.Done(int(mine)), "a cancel that ended nothing, or another's"
                if mine:
                    del self.asked[event.ticket]
                    self._counted("lookup_cancelled")
            case ev.Fetched():
                self._fetched(event)
            case ev.Persisted():
                self._persisted(event)
            case ev.Drop() if event.session in self._d.sessions:
                dropped = split(event.hashes)
                for flight in self.flights.values():
                    flight.doomed |= flight.hash in dropped
            case ev.Clear():
                for flight in self.flights.values():
                    flight.doomed = True
            case ev.Forget():
                self._forgotten(event, now_s)

    def _asks(self, event: ev.Lookup, reply: ev.Pending, now_s: float) -> None:
        limit_s = self._d.limits.lookup_wait_s
        wait_s = limit_s if event.wait_s is None else event.wait_s
        assert reply.ticket not in self.asked
        self.asked[reply.ticket] = Asked(
            event.session, split(event.hashes), event.near, now_s + wait_s
        )

    def _probed(self, asked: Asked, event: ev.Probed) -> None:
        asked.probed = True
        flying = {flight.hash for flight in self.flights.values()}
        asked.somewhere = flying & set(asked.hashes)
        if any(event.holders):  # positions asked for are the core's: any of them may come
            asked.somewhere = set(asked.hashes)

    def _fetched(self, event: ev.Fetched) -> None:
        flight = self.flights.pop(event.transfer)
        worst = next((o for o in event.outcomes if o is not IoOutcome.OK), IoOutcome.OK)
        self._counted(f"fetched_{worst.name.lower()}")
        for slot in flight.slots:
            self._model.disown(slot)

    def _persisted(self, event: ev.Persisted) -> None:
        writing = self.writes.pop(event.transfer, None)
        assert writing is not None, "a persist ended that is not under way"
        worst = next((o for o in event.outcomes if o is not IoOutcome.OK), IoOutcome.OK)
        self._counted(f"persisted_{worst.name.lower()}")
        if worst is IoOutcome.OK:
            self.stored.setdefault(writing.chunk.hash, set()).add(writing.backend)

    def _forgotten(self, event: ev.Forget, now_s: float) -> None:
        session = self._d.sessions.get(event.session)
        if session is None or not session.fingerprint:
            return
        fingerprint = session.fingerprint
        self.forgotten_s[fingerprint] = now_s
        for flight in self.flights.values():
            flight.doomed |= flight.fingerprint == fingerprint
        for other in self._d.sessions.values():
            if other.fingerprint == fingerprint:
                self.doomed_leases |= set(other.writes_open)
        there = self._model.resident.values()  # findable; what is swept later is not
        assert not any(c.space.fingerprint == fingerprint for c in there), "forgotten, and there"
        self._counted("forgets")

    def expected_to_go(self, event: ev.Event) -> set[ChunkHash]:
        """Resident chunks that the event is meant to take away."""
        resident = self._model.resident
        match event:
            case ev.Drop():
                return set(split(event.hashes))
            case ev.Clear():
                return set(resident)
            case ev.Forget():
                session = self._d.sessions.get(event.session)
                print_ = session.fingerprint if session is not None else None
                return {h for h, c in resident.items() if c.space.fingerprint == print_}
            case _:
                return set()

    def may_evict(self, chunk: Chunk, before: L2Before) -> bool:
        """Memory was wanted; or the policy keeps nothing in L1 that L2 has."""
        return before.makes_room or (self.skips_l1 and bool(self.stored.get(chunk.hash)))

    @property
    def skips_l1(self) -> bool:
        """What L2 has leaves L1 with its last reader, even in the event that published it."""
        return self._d.limits.store_policy is StorePolicy.SKIP_L1

    def arrived(self, chunk_hash: ChunkHash, flight: Flight | None, now_s: float) -> None:
        """A chunk became resident."""
        self.resident_since_s[chunk_hash] = now_s
        self.stored[chunk_hash] = {flight.backend} if flight is not None else set()

    # ---- after it: what began, and what was answered

    def began(
        self, event: ev.Event, effects: list[ev.Effect], before: L2Before, now_s: float
    ) -> None:
        """Judge each effect, then what still runs."""
        for effect in effects:
            match effect:
                case ev.Fetch():
                    self._fetch(effect)
                case ev.Persist():
                    self._persist(effect)
                case ev.Answered():
                    self._answered(event, effect, before, now_s)
                case ev.Probe():
                    assert effect.ticket in self.asked, "a question for nobody"
                case ev.ForgetStored():
                    assert isinstance(event, ev.Forget)
        if isinstance(event, ev.Forget) and self._d.limits.backends:
            session = self._d.sessions.get(event.session)
            known = session is not None and bool(session.fingerprint)
            told = sum(isinstance(effect, ev.ForgetStored) for effect in effects)
            assert told == known, "L2 is told once"
        self._still_running()

    def _transfer(self, effect: ev.Fetch | ev.Persist) -> None:
        kind = type(effect)
        assert effect.id > self._last_transfer[kind], "two transfers have one name"
        self._last_transfer[kind] = effect.id
        assert 0 <= effect.backend < self._d.limits.backends

    def _fetch(self, effect: ev.Fetch) -> None:
        self._transfer(effect)
        flying = {flight.hash for flight in self.flights.values()}
        assert effect.chunk not in flying, "two fetches of one chunk"
        assert effect.chunk not in self._model.resident, "fetched, and in L1"
        slots = self._d.fetcher.flights.fetches[effect.id].slots
        table = self._d.slots
        assert effect.offsets == tuple(table.offset[slot] for slot in slots)
        sizes = tuple(size for _, _, size in effect.objects.rows)
        assert sizes == tuple(table.length[slot] for slot in slots)
        self.flights[effect.id] = Flight(
            effect.chunk,
            effect.space.fingerprint,
            effect.backend,
            tuple(rank for rank, _, _ in effect.objects.rows),
            slots,
            tuple(table.generations[slot] for slot in slots),
        )
        for slot in slots:
            self._model.owned_by_fetch(slot, effect.id)

    def _persist(self, effect: ev.Persist) -> None:
        self._transfer(effect)
        chunk = self._model.resident.get(effect.chunk)
        assert chunk is not None, "a persist of what is not resident"
        for other in self.writes.values():
            twice = other.chunk is chunk and other.backend == effect.backend
            assert not twice, "two persists of one chunk to one backend"
        table = self._d.slots
        assert effect.offsets == tuple(table.offset[slot] for slot in chunk.rows)
        words = tuple(table.generations[slot] for slot in chunk.rows)
        self.writes[effect.id] = Writing(chunk, effect.backend, words)

    def _still_running(self) -> None:
        """What transfers touch is theirs; a pending lookup can still be answered."""
        for flight in self.flights.values():
            self._untouched(flight.slots, flight.words, SlotState.STAGING)
        for writing in self.writes.values():
            self._untouched(writing.chunk.rows, writing.words, SlotState.RESIDENT)
        for asked in self.asked.values():
            session = self._d.sessions.get(asked.session)
            assert session is not None, "a lookup waits for a session that is gone"
            assert session.ready, "a lookup waits without every rank"
        cap = self._cap_bytes()
        for session in self._d.sessions.values():
            assert session.reserved_bytes <= cap, f"{session.id} reserves more than its cap"

    def _untouched(
        self, slots: tuple[SlotId, ...], words: tuple[int, ...], state: SlotState
    ) -> None:
        table = self._d.slots
        for slot, word in zip(slots, words, strict=True):
            same = table.state[slot] is state and table.generations[slot] == word
            assert same, f"slot {slot} was taken from a transfer that still runs"

    def filled(self, chunk_hash: ChunkHash) -> Flight:
        """I/O wrote into the extents of this chunk's fetch just now."""
        mine = [flight for flight in self.flights.values() if flight.hash == chunk_hash]
        assert mine, "I/O wrote into memory whose fetch has ended"
        return mine[0]

    # ---- answers

    def _answered(
        self, event: ev.Event, effect: ev.Answered, before: L2Before, now_s: float
    ) -> None:
        asked = self.asked.pop(effect.ticket, None)
        assert asked is not None, "a lookup is answered twice, or was cancelled"
        assert asked.session == effect.session
        late_s = now_s - max(asked.deadline_s, self.woke_s)
        assert late_s <= _SOON_S, f"a lookup is answered {late_s:g} s after its deadline"
        hit = effect.hit
        assert len(hit.reasons) == len(asked.hashes) - hit.chunks, "one reason for each chunk lost"
        if self._cut_short(event, asked, hit):
            self._counted("lookup_cut_short")
            return
        session = self._d.sessions[asked.session]
        least, most = self._bounds(event, effect, asked, before)
        assert least <= hit.chunks <= most, (
            f"a hit of {hit.chunks}, the model says {least} to {most}"
        )
        if hit.lease:
            self._model.check_columns(session, asked.hashes, hit)
            assert len(hit.tiers) in (0, hit.chunks), "one tier for each chunk, or all from L1"
            self._counted("lookup_late_hit")
        else:
            assert not hit.columns
            assert not hit.chunks or not asked.near, "found, but not reserved"
            self._counted("lookup_late_far" if hit.chunks else "lookup_late_miss")

    def _cut_short(self, event: ev.Event, asked: Asked, hit: ev.Hit) -> bool:
        """Whether the session, the lease or the layout ended under the lookup."""
        if hit.chunks:
            return False
        reasons = set(hit.reasons)
        match event:
            case ev.Revoke() | ev.Relieve() | ev.Clear() | ev.Sweep():
                return reasons == {Reason.REVOKED}
            case ev.Forget():
                session = self._d.sessions[asked.session]
                return session.fingerprint == self._d.sessions[event.session].fingerprint
            case _:
                return isinstance(event, _LEAVING) and reasons == {Reason.NOT_READY}

    def _bounds(
        self, event: ev.Event, effect: ev.Answered, asked: Asked, before: L2Before
    ) -> tuple[int, int]:
        """The shortest and the longest right hit."""
        rows = self._d.sessions[asked.session].all_rows
        resident = self._model.resident
        if before.plans == effect.ticket:
            if before.exact is not None:
                return before.exact
            may = {h for h in asked.hashes if h in resident}
            if not effect.hit.lease:
                may |= asked.somewhere
            return 0, longest(rows, [h in may for h in asked.hashes])
        held, awaited = before.held[effect.ticket], before.awaited[effect.ticket]
        sure = {h for h, chunk in held.items() if resident.get(h) is chunk}  # not dropped since
        if before.publishes is not None and before.publishes.hash in awaited:
            sure.add(before.publishes.hash)
        may = set(held) | {h for h in awaited if h in resident}
        least = longest(rows, [h in sure for h in asked.hashes])
        return least, longest(rows, [h in may for h in asked.hashes])
