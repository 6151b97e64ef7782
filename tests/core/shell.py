"""A directory with L2: effects are kept until a test answers them, in the order it likes.

`holds` is what each backend has. A fetch or persist is under way until `bring`, `late` or `kept`.
`rest` ends everything and looks at what is left: memory is free or resident, and nobody waits.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from tests.core.build import NO_CAPS, World

from kvkeep.core import events as ev
from kvkeep.core.audit import check
from kvkeep.types import ChunkHash, IoOutcome, SlotState, StorePolicy, TicketId, TransferId

OK = IoOutcome.OK


class Shell(World):
    """`changes` are fields of the limits; without a policy nothing is persisted by itself."""

    def __init__(self, pages: int = 64, *, backends: int = 1, **changes: Any) -> None:
        self.holds: list[set[ChunkHash]] = [set() for _ in range(backends)]
        self.probes: dict[TicketId, ev.Probe] = {}
        self.alarms: dict[TicketId, float] = {}
        self.answers: dict[TicketId, list[ev.Hit]] = {}
        self.fetches: dict[ChunkHash, ev.Fetch] = {}
        self.persists: dict[TransferId, ev.Persist] = {}
        self.told: list[ev.Effect] = []  # all the rest
        changes = {"store_policy": StorePolicy.WRITE_BACK, "low_water_fraction": 0.0, **changes}
        super().__init__(
            pages, limits=msgspec.structs.replace(NO_CAPS, backends=backends, **changes)
        )

    def do(self, event: ev.Event) -> ev.Reply:
        reply = super().do(event)
        for effect in self.effects:
            match effect:
                case ev.Probe():
                    self.probes[effect.ticket] = effect
                case ev.Alarm():
                    self.alarms[effect.ticket] = effect.at_s
                case ev.Answered():
                    self.answers.setdefault(effect.ticket, []).append(effect.hit)
                case ev.Fetch():
                    assert effect.chunk not in self.fetches, "two fetches of one chunk"
                    self.fetches[effect.chunk] = effect
                case ev.Persist():
                    self.persists[effect.id] = effect
                case _:
                    self.told.append(effect)
        return reply

    def did(self, event: ev.Event) -> int:
        """What a Done counted."""
        reply = self.do(event)
        assert isinstance(reply, ev.Done)
        return reply.changed

    # ---- lookups

    def put(self, hashes: Iterable[ChunkHash], backend: int = 0) -> None:
        """A backend has these chunks."""
        self.holds[backend].update(hashes)

    def ask(
        self,
        session: str,
        hashes: Sequence[ChunkHash],
        *,
        near: bool = True,
        wait_s: float | None = None,
        probe: bool = True,
    ) -> TicketId:
        """A lookup that must wait; its question is answered at once unless `probe` is False."""
        event = ev.Lookup(session, "r", b"".join(hashes[1:]), near=near, wait_s=wait_s)
        reply = self.do(event)
        assert isinstance(reply, ev.Pending), reply
        if probe:
            self.answer(reply.ticket)
        return reply.ticket

    def answer(self, ticket: TicketId, *, down: int = 0) -> None:
        """The backends say what they hold."""
        asked = self.directory.split(self.probes.pop(ticket).hashes)
        holders = [sum((h in held) << n for n, held in enumerate(self.holds)) for h in asked]
        self.do(ev.Probed(ticket, tuple(holders), down))

    def hit(self, ticket: TicketId) -> ev.Hit:
        """The one answer of a lookup."""
        (hit,) = self.answers[ticket]
        return hit

    def waits(self, ticket: TicketId) -> bool:
        return ticket not in self.answers

    def ring(self, ticket: TicketId) -> None:
        """Its deadline."""
        self.now_s = max(self.now_s, self.alarms[ticket])
        assert self.did(ev.Expire(ticket)) == 1

    # ---- transfers

    def bring(self, *chunks: ChunkHash, outcome: IoOutcome = OK) -> None:
        """The I/O of these fetches returns; without any: of all, and of those that follow."""
        for chunk in chunks:
            self._returns(self.fetches.pop(chunk), outcome)
        while not chunks and self.fetches:
            self._returns(self.fetches.pop(next(iter(self.fetches))), outcome)

    def _returns(self, fetch: ev.Fetch, outcome: IoOutcome) -> None:
        assert self.did(ev.Fetched(fetch.id, (outcome,) * len(fetch.offsets))) == 1

    def late(self, chunk: ChunkHash) -> None:
        """The deadline of a fetch passes."""
        assert self.did(ev.FetchLate(self.fetches[chunk].id)) == 1

    def kept(self, *transfers: TransferId, outcome: IoOutcome = OK) -> None:
        """The I/O of these persists returns; without any: of all that run now."""
        for transfer in transfers or list(self.persists):
            persist = self.persists.pop(transfer)
            if outcome is OK:
                self.holds[persist.backend].add(persist.chunk)
            done = ev.Persisted(transfer, (outcome,) * len(persist.offsets))
            assert self.did(done) == 1

    def bytes_in(self, state: SlotState) -> int:
        return self.directory.slots.bytes_in[state]

    # ---- the end

    def rest(self) -> None:
        """Everything that is under way ends."""
        for ticket in list(self.probes):
            self.answer(ticket)
        self.bring()
        while self.directory.fetcher.tickets:
            self.ring(next(iter(self.directory.fetcher.tickets)))
        self.bring()
        for session in list(self.directory.sessions.values()):
            ranks = tuple(range(session.world))
            for lease in list(session.reads_open):
                self.do(ev.End(session.id, lease, ranks))
            self.abort(session.id, list(session.writes_open))
        while self.persists:
            self.kept()
        check(self.directory)
        directory = self.directory
        assert directory.fetcher.flights.fetches == {}
        assert directory.slots.reserved_bytes == 0
        assert self.bytes_in(SlotState.STAGING) == 0
        resident = sum(chunk.size_bytes for chunk in directory.residents.index.values())
        assert resident + directory.arena.free_bytes == directory.arena.populated_bytes
        assert all(len(hits) == 1 for hits in self.answers.values()), "answered twice"
