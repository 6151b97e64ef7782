"""The simulator uses L2 in earnest, and finds what is planted in its part of the tree."""

from collections.abc import Callable
from typing import Any

import pytest

from kvkeep.backends.checked import Store
from kvkeep.backends.guarded import Late
from kvkeep.core import events as ev
from kvkeep.core.fetching import Fetcher
from kvkeep.core.flights import Fetching, Flights
from kvkeep.core.persisting import Job, Persister
from kvkeep.core.tickets import Place, Ticket
from kvkeep.server.io import Io
from kvkeep.testing import simulate
from kvkeep.testing.fake_client import FakeClient
from kvkeep.types import IoOutcome, Namespace, SlotState, TransferId

SEEDS = 60
SEEDS_FOR_A_BUG = 100

Patch = pytest.MonkeyPatch
pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
def test_l2_is_met_in_sixty_seeds() -> None:
    """What is never met is never judged."""
    result = simulate.run(SEEDS, 100, jobs=2)
    assert result["failures"] == []
    copies = result["copies"]
    for what in (
        "fetched_ok",
        "fetched_corrupt",
        "fetched_missing",
        "fetched_timeout",
        "persisted_ok",
        "persisted_full",
        "persisted_error",
        "persisted_refused",
        "lookup_late_hit",
        "lookup_late_miss",
        "lookup_cut_short",
        "lookup_cancelled",
        "forgets",
    ):
        assert copies.get(what, 0) > 0, what
    assert copies["fetched_ok"] > 100
    assert copies["persisted_ok"] > 500


# ---- planted bugs


def bytes_are_published_unverified(patch: Patch) -> None:
    async def believe(self: Store, items: Any, verdicts: Any) -> None:
        pass

    patch.setattr(Store, "_check_payloads", believe)


def a_cancelled_lookup_keeps_its_chunks(patch: Patch) -> None:
    def forget_only(self: Fetcher, event: ev.Cancel) -> ev.Done:
        ticket = self.tickets.pop(event.ticket, None)
        if ticket is not None:
            self.queued.pop(ticket.id, None)
        return ev.Done(int(ticket is not None))

    patch.setattr(Fetcher, "cancel", forget_only)


def a_late_fetch_frees_its_extents(patch: Patch) -> None:
    late = Flights.late

    def free(self: Flights, transfer: TransferId) -> Fetching | None:
        fetch = late(self, transfer)
        if fetch is not None:
            outcomes = (IoOutcome.TIMEOUT,) * len(fetch.slots)
            self.returned(ev.Fetched(transfer, outcomes))
        return fetch

    patch.setattr(Flights, "late", free)


def io_does_not_wait_for_what_hangs(patch: Patch) -> None:
    async def gone(self: Io, effect: ev.Fetch) -> None:
        try:
            outcomes = await self.stores[effect.backend].get(self._wanted(effect))
        except Late:
            outcomes = [IoOutcome.TIMEOUT] * len(effect.offsets)
        self._apply(ev.Fetched(effect.id, tuple(outcomes)))

    patch.setattr(Io, "_fetch", gone)


def a_persist_does_not_hold_its_chunk(patch: Patch) -> None:
    begin, release = Persister._begin, Persister.release
    not_held: list[Any] = []  # a chunk for each persist of it that runs

    def loose(self: Persister, job: Job) -> None:
        begin(self, job)
        not_held.append(job.chunk)
        for slot in job.chunk.rows:
            self._d.slots.unhold(slot)

    def held_again(self: Persister, chunk: Any) -> None:
        if chunk not in not_held:  # a lookup gives it back
            release(self, chunk)
            return
        not_held.remove(chunk)
        if self._d.slots.state[chunk.rows[0]] is SlotState.RESIDENT:
            self._d.slots.hold(chunk.rows)
            release(self, chunk)

    patch.setattr(Persister, "_begin", loose)
    patch.setattr(Persister, "release", held_again)


def a_chunk_is_fetched_twice(patch: Patch) -> None:
    class Blind(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            return None

        def __delitem__(self, key: Any) -> None:
            self.pop(key, None)

    init = Flights.__init__

    def blind(self: Flights, directory: Any) -> None:
        init(self, directory)
        self.by_hash = Blind()

    patch.setattr(Flights, "__init__", blind)


def no_answer_at_the_deadline(patch: Patch) -> None:
    patch.setattr(Fetcher, "expire", lambda self, event, now_s: ev.Done(0))


def an_answer_before_the_chunk_is_there(patch: Patch) -> None:
    def hopeful(self: Ticket) -> int:
        return self.reachable()

    patch.setattr(Ticket, "reached", hopeful)
    patch.setattr(Ticket, "wanted", lambda self: [])


def a_dropped_chunk_is_handed_out(patch: Patch) -> None:
    finish = Fetcher._finish

    def blind(self: Fetcher, ticket: Ticket) -> None:
        chunks = list(ticket.chunks.values())
        linked = [chunk.linked for chunk in chunks]
        for chunk in chunks:
            chunk.linked = True
        finish(self, ticket)
        for chunk, was in zip(chunks, linked, strict=True):
            chunk.linked = was

    patch.setattr(Fetcher, "_finish", blind)


def forgotten_fetches_are_published(patch: Patch) -> None:
    def only_tickets(self: Fetcher, space: Namespace) -> None:
        for session in self._d.sessions.values():
            if session.fingerprint == space.fingerprint:
                self.unready(session)

    patch.setattr(Fetcher, "forget", only_tickets)


def forgotten_persists_stay_in_l2(patch: Patch) -> None:
    forget_one = Io._forget_one

    async def hasty(self: Io, where: Any, space: Namespace, *, again: bool) -> bool:
        self._puts.pop(where, None)
        return await forget_one(self, where, space, again=again)

    patch.setattr(Io, "_forget_one", hasty)
    patch.setattr(Persister, "forget", lambda self, space: None)


def a_late_answer_is_kept(patch: Patch) -> None:
    resolved = FakeClient._resolved

    def keep(self: FakeClient, message: Any) -> None:
        if message.ticket in self.pending:
            resolved(self, message)

    patch.setattr(FakeClient, "_resolved", keep)


def a_lost_rank_leaves_lookups_waiting(patch: Patch) -> None:
    patch.setattr(Fetcher, "unready", lambda self, session: None)


def caps_ignore_what_is_on_its_way(patch: Patch) -> None:
    def all_fits(self: Fetcher, ticket: Ticket, found: Any) -> None:
        for position in self._needless(ticket):
            ticket.places[position] = Place.LOST

    patch.setattr(Fetcher, "_keep_to_caps", all_fits)


BUGS: tuple[Callable[[Patch], None], ...] = (
    bytes_are_published_unverified,
    a_cancelled_lookup_keeps_its_chunks,
    a_late_fetch_frees_its_extents,
    io_does_not_wait_for_what_hangs,
    a_persist_does_not_hold_its_chunk,
    a_chunk_is_fetched_twice,
    no_answer_at_the_deadline,
    an_answer_before_the_chunk_is_there,
    a_dropped_chunk_is_handed_out,
    forgotten_fetches_are_published,
    forgotten_persists_stay_in_l2,
    a_late_answer_is_kept,
    a_lost_rank_leaves_lookups_waiting,
    caps_ignore_what_is_on_its_way,
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of seeds that fail halfway
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("plant", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    outcomes = (simulate.run_seed(seed) for seed in range(SEEDS_FOR_A_BUG))
    assert any(outcome.what for outcome in outcomes), "no seed noticed"
