"""Any order of events with L2: what backends say and when I/O returns, legal or not.

The same engines as in test_machine, and shells that answer twice, late, or what nobody asked.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.core.build import PAGE
from tests.core.machine_engines import ENGINES
from tests.core.model import Model, split
from tests.core.model_l2 import ModelL2
from tests.core.test_machine import DirectoryMachine, picks, prompts, rarely, seats

from kvkeep.core import events as ev
from kvkeep.core.directory import Limits
from kvkeep.types import (
    IoOutcome,
    Reason,
    StorePolicy,
    TicketId,
    TransferId,
)

OK = IoOutcome.OK
ends = st.sampled_from([OK] * 8 + list(IoOutcome))


class L2Machine(DirectoryMachine):
    """One directory with backends, and its model."""

    model: ModelL2

    @initialize(
        pages=st.sampled_from([24, 60, 120]),
        caps=st.sampled_from([(0.5, 0.25, 0.5), (2.0, 1.0, 1.0), (1.0, 0.5, 0.2)]),
        cast=st.permutations(sorted(ENGINES)),
        backends=st.sampled_from([1, 2]),
        most=st.integers(1, 3),
        fetch=st.sampled_from([0.1, 0.5, 1.0]),
        policy=st.sampled_from(StorePolicy),
        queue=st.sampled_from([4 * PAGE, 1 << 20]),
        eager=st.booleans(),
    )
    def start(
        self,
        pages: int,
        caps: tuple[float, float, float],
        cast: list[str],
        backends: int,
        most: int,
        fetch: float,
        policy: StorePolicy,
        queue: int,
        eager: bool,
    ) -> None:
        self.eager = eager  # the backends' answers come at once
        self.seed(cast, 500)
        self.begin(
            Limits(
                *caps,
                backends=backends,
                fetch_fraction=fetch,
                fetches_per_backend=most,
                persists_per_backend=most,
                persist_queue_bytes=queue,
                persist_tries=2,
                low_water_fraction=0.5,
                store_policy=policy,
            )
        )
        self.do(ev.Grown(pages * PAGE))

    def make_model(self, limits: Limits) -> Model:
        model = ModelL2(self.generations, limits)
        model.start(self.directory)
        return model

    # ---- following

    def do(self, event: ev.Event) -> ev.Reply:
        if isinstance(event, ev.Relieve):
            waits = self.directory.fetcher.lacks_room
            waits = waits if waits is not None and waits.queue else None
            self.room_wanted_s = waits.since_s if waits is not None else None
            sessions = self.directory.sessions.values()
            self.began_s = {int(r.id): r.since_s for s in sessions for r in s.reads_open.values()}
        return super().do(event)

    def before_l2(self, effects: list[ev.Effect]) -> None:
        began = any(isinstance(e, ev.Fetch | ev.Persist) for e in effects)
        self.model.disturbed = began or bool(self.directory.fetcher.queued)  # room was looked for
        for effect in effects:
            if isinstance(effect, ev.Answered) and left_with(effect.hit, Reason.NOT_READY):
                self.model.ended(effect)
        self.probes = [effect for effect in effects if isinstance(effect, ev.Probe)]

    def explain_l2(self, event: ev.Event, reply: ev.Reply) -> None:
        model = self.model
        match event, reply:
            case ev.Lookup(), ev.Pending():
                (probe,) = self.probes
                model.pending(event, reply, probe)
            case ev.Probed(), ev.Done():
                model.probed(event, reply)
            case ev.Expire(), ev.Done():
                model.expire(event, reply)
            case ev.Cancel(), ev.Done():
                model.cancel(event, reply)
            case ev.FetchLate(), ev.Done():
                model.late(event, reply)
            case ev.Fetched(), ev.Done():
                model.fetched(event, reply)
            case ev.Persisted(), ev.Done():
                model.persisted(event, reply)
            case ev.Forget(), ev.Done():
                model.forget(event, reply)
            case ev.Drain(), ev.Done():
                pass
            case _:
                super().explain_l2(event, reply)

    def may_end(self, event: ev.Relieve, ended: set[int]) -> None:
        """Of others, what began after the oldest lookup that waits for room."""
        sessions = self.directory.sessions.values()
        assert not any(ended & set(session.reads_open) for session in sessions)
        if self.room_wanted_s is None:
            super().may_end(event, ended)
            return
        for lease in ended:
            read = self.model.reads[lease]
            assert read.session in event.stopped or self.began_s[lease] > self.room_wanted_s

    def after_l2(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        model = self.model
        if isinstance(event, ev.Clear):
            model.doom()
        if isinstance(event, ev.Drop) and event.session in model.members:
            model.doom(split(event.hashes))
        for effect in effects:
            if isinstance(effect, ev.Answered) and effect.ticket in model.waiting:
                model.answer(effect)
        model.sync()
        for effect in effects:
            if isinstance(effect, ev.Persist):
                model.persist(effect)
        model.evicted()
        for effect in effects:
            if isinstance(effect, ev.Fetch):
                model.fetch(effect)
        model.sync()
        self.reads += model.answered
        model.answered.clear()
        assert set(model.waiting) == set(self.directory.fetcher.tickets)

    # ---- rules

    def pending(self, name: str, ticket: TicketId) -> None:
        if self.eager:
            self.answer_probe(ticket, 0)

    def answer_probe(self, ticket: TicketId, pick: int) -> None:
        """Mostly everything is there; `pick` decides where not."""
        waiting = self.model.waiting[ticket]
        every = (1 << self.model.limits.backends) - 1
        holders = [every & ~(pick >> 2 * n) for n in range(len(waiting.asked))]
        self.do(ev.Probed(ticket, tuple(holders), pick & 1))

    @rule(pick=picks, missing=st.sampled_from([0, 0, 0, 1, 4, 0xFFFF, 0x3FF0]))
    def probe(self, pick: int, missing: int) -> None:
        asked = [key for key, ticket in self.model.waiting.items() if not ticket.probed]
        if asked:
            self.answer_probe(TicketId(asked[pick % len(asked)]), missing)

    @rule(seat=seats, prompt=prompts, missing=st.sampled_from([0, 0, 0, 4, 0x3FF0]))
    def look_in_l2(self, seat: int, prompt: str, missing: int) -> None:
        """What L1 has of it is cleared first, half the time."""
        name = self.cast[seat]
        self.complete(name)
        chain = self.chain(name, prompt, None)
        if missing == 4:
            self.do(ev.Clear())
        reply = self.do(ev.Lookup(name, "r", b"".join(chain[1:]), wait_s=missing / 1e3))
        if isinstance(reply, ev.Pending):
            self.answer_probe(reply.ticket, missing)
        elif isinstance(reply, ev.Hit) and reply.lease:
            self.reads.append((name, reply.lease))

    @rule(seat=seats, prompt=prompts, pick=picks, end=ends, local=st.integers(0, 2), drop=rarely)
    def serve_from_l2(
        self, seat: int, prompt: str, pick: int, end: IoOutcome, local: int, drop: bool
    ) -> None:
        """L1 has the first chunks, backends the rest; one of the fetches may fail."""
        name = self.cast[seat]
        self.complete(name)
        chain = self.chain(name, prompt, None)
        self.do(ev.Drop(name, b"".join(chain[1 + local :])))
        reply = self.do(ev.Lookup(name, "r", b"".join(chain[1:])))
        if isinstance(reply, ev.Hit):
            self.reads += [(name, reply.lease)] if reply.lease else []
            return
        assert isinstance(reply, ev.Pending)
        self.answer_probe(reply.ticket, 0)
        for turn in range(10):
            if reply.ticket not in self.model.waiting or not self.model.flights:
                break
            if drop and turn == 1:
                self.do(ev.Drop(name, chain[1]))
            flying = list(self.model.flights)
            transfer = TransferId(flying[pick % len(flying)])
            rows = len(self.model.flights[transfer].write.extents)
            outcome = end if turn == pick % 3 else OK
            self.do(ev.Fetched(transfer, (OK,) * (rows - 1) + (outcome,)))

    @rule(pick=picks, many=st.integers(1, 4), end=ends, late=rarely)
    def fetches_return(self, pick: int, many: int, end: IoOutcome, late: bool) -> None:
        for _ in range(many):
            flying = list(self.model.flights)
            if not flying:
                return
            transfer = TransferId(flying[pick % len(flying)])
            if late:
                self.do(ev.FetchLate(transfer))
                return
            rows = len(self.model.flights[transfer].write.extents)
            self.do(ev.Fetched(transfer, (OK,) * (rows - 1) + (end,)))

    @rule(pick=picks, many=st.integers(1, 4), end=ends)
    def persists_return(self, pick: int, many: int, end: IoOutcome) -> None:
        for _ in range(many):
            running = list(self.model.persists)
            if not running:
                return
            transfer = TransferId(running[pick % len(running)])
            rows = len(self.model.persists[transfer][1].extents)
            self.do(ev.Persisted(transfer, (end,) * rows))

    @rule(pick=picks, early=st.booleans())
    def expire(self, pick: int, early: bool) -> None:
        waiting = list(self.model.waiting)
        if waiting:
            ticket = waiting[pick % len(waiting)]
            if not early:
                self.now_s = max(self.now_s, self.model.waiting[ticket].deadline_s)
            self.do(ev.Expire(TicketId(ticket)))

    @rule(pick=picks, wrong=rarely)
    def cancel(self, pick: int, wrong: bool) -> None:
        waiting = list(self.model.waiting)
        if waiting:
            ticket = waiting[pick % len(waiting)]
            name = "nobody" if wrong else self.model.waiting[ticket].session
            self.do(ev.Cancel(name, TicketId(ticket)))

    @rule(seat=seats, really=rarely)
    def forget(self, seat: int, really: bool) -> None:
        if really:
            self.do(ev.Forget(self.cast[seat]))

    @rule(really=rarely)
    def drain(self, really: bool) -> None:
        if really:
            self.do(ev.Drain())

    @rule(known=picks, stale=st.integers(0, 40))
    def a_shell_gone_mad(self, known: int, stale: int) -> None:
        """Answers to what nobody asked, and a second time to what is over."""
        ticket = TicketId(1000 + known % 200)
        if ticket not in self.model.waiting:
            self.do(ev.Probed(ticket, (1, 1)))
            self.do(ev.Expire(ticket))
            self.do(ev.Cancel(self.cast[0], ticket))
        elif self.model.waiting[ticket].probed:
            self.do(ev.Probed(ticket, (1,) * len(self.model.waiting[ticket].asked)))
        transfer = TransferId(stale)
        if transfer not in self.model.flights:
            self.do(ev.Fetched(transfer, (OK,)))
            self.do(ev.FetchLate(transfer))
        if transfer not in self.model.persists:
            self.do(ev.Persisted(transfer, (OK,)))

    # ---- the end

    def end_l2(self) -> None:
        assert self.model.waiting == {}, "the sessions are gone"
        for transfer, flight in list(self.model.flights.items()):
            self.do(ev.Fetched(TransferId(transfer), (OK,) * len(flight.write.extents)))
        self.do(ev.Clear())
        while self.model.persists:
            transfer = next(iter(self.model.persists))
            rows = len(self.model.persists[transfer][1].extents)
            self.do(ev.Persisted(TransferId(transfer), (OK,) * rows))
        self.now_s += 1000.0  # what waits for another try is gone
        self.do(ev.Tick())
        assert self.directory.persister.idle
        assert self.directory.fetcher.flights.staged_bytes == 0


def left_with(hit: ev.Hit, reason: Reason) -> bool:
    return bool(hit.reasons) and hit.reasons[0] is reason


TestDirectoryWithL2 = L2Machine.TestCase
TestDirectoryWithL2.settings = settings(max_examples=3 * settings().max_examples // 2)
