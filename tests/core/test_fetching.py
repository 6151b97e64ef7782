"""Lookups that L2 extends: what is fetched, once for all, and what each lookup is answered."""

import pytest
from tests.core.build import FULL, PAGE, chain, row, words
from tests.core.conftest import MakeShell

from kvkeep.core import events as ev
from kvkeep.types import (
    NO_LEASE,
    ChunkHash,
    GroupKind,
    IoOutcome,
    Reason,
    SlotState,
    StageOutcome,
    TicketId,
    TransferId,
)

WINDOW, STATE = GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT
MISS, TIMEOUT, NO_ROOM = Reason.L2_MISS, Reason.L2_TIMEOUT, Reason.NO_ROOM
LOST = StageOutcome.IN_PROGRESS


def test_l2_extends_what_l1_has(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 4)
    w.store("s", keys[:3])
    w.put(keys)
    ticket = w.ask("s", keys)
    fetches = list(w.fetches.values())
    assert [f.chunk for f in fetches] == keys[3:]
    assert [f.depth for f in fetches] == [2, 3]
    assert w.waits(ticket)
    w.bring(keys[4], keys[3])
    hit = w.hit(ticket)
    assert (hit.chunks, hit.reasons, hit.tiers) == (4, (), bytes([0, 0, 1, 1]))
    (column,) = hit.columns
    assert words(column.offsets)[2:] == [f.offsets[0] for f in fetches]
    handles = zip(words(column.slots), words(column.generations), strict=True)
    assert all(w.generations[slot] == generation for slot, generation in handles)
    assert w.lookup("s", keys).chunks == 4  # the next one needs no L2


def test_a_lookup_without_l2_is_answered_at_once(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 3)
    w.put(keys)
    reply = w.do(ev.Lookup("s", "r", b"".join(keys[1:]), fetch=False))
    assert isinstance(reply, ev.Hit)
    assert reply.reasons == (Reason.L2_TIMEOUT,) * 3, "nobody asked: who knows what it has"
    w.store("s", keys)
    assert w.lookup("s", keys).chunks == 3  # L1 has all of it: nothing to ask
    assert w.probes == {}


def test_only_what_is_missing_is_asked_for(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 4)
    w.store("s", keys[:2])
    w.put(keys)
    w.ask("s", keys[:4])
    ticket = w.ask("s", keys, probe=False)  # chunk 1 is here; 2 and 3 are on their way, but from
    assert w.probes[ticket].hashes == b"".join(keys[2:])  # where else they may come is asked too


def test_it_stops_at_the_first_chunk_nobody_has(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 5)
    w.put([keys[1], keys[2], keys[4]])
    ticket = w.ask("s", keys)
    assert list(w.fetches) == keys[1:3]
    w.bring()
    assert w.hit(ticket).chunks == 2
    assert w.hit(ticket).reasons == (MISS, Reason.BEHIND, MISS)


def test_a_hole_in_l1_is_filled(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 4)
    w.store("s", keys)
    w.do(ev.Drop("s", keys[3]))
    w.put([keys[3]])
    ticket = w.ask("s", keys)
    assert list(w.fetches) == [keys[3]]
    w.bring()
    assert (w.hit(ticket).chunks, w.hit(ticket).tiers) == (4, bytes([0, 0, 1, 0]))


@pytest.mark.parametrize("down", [0, 1])
def test_when_l2_has_nothing_the_probe_is_the_answer(shell: MakeShell, down: int) -> None:
    w = shell(pages=2)
    w.join("s")
    keys = chain("a", 2)
    w.store("s", keys)
    w.do(ev.Clear())
    w.store("s", keys[:2])
    ticket = w.ask("s", chain("ab", 3), probe=False)
    w.answer(ticket, down=down)
    reason = Reason.L2_ERROR if down else MISS
    assert (w.hit(ticket).chunks, w.hit(ticket).reasons) == (1, (reason,) * 2)
    assert not w.alarms
    gone = w.ask("s", keys)
    assert w.hit(gone).reasons == (Reason.EVICTED,)


def test_one_fetch_for_fifty_lookups(shell: MakeShell) -> None:
    w = shell()
    keys = chain("a", 3)
    w.put(keys)
    for session in "ab":
        w.join(session)
    tickets = [w.ask("ab"[n % 2], keys, probe=n % 3 == 0) for n in range(50)]
    for ticket in list(w.probes):
        w.answer(ticket)
    assert list(w.fetches) == keys[1:]
    assert w.did(ev.Cancel("b", tickets[7])) == 1
    w.bring(*keys[1:3])
    assert not w.answers
    w.bring(keys[3])
    answered = [e.ticket for e in w.effects if isinstance(e, ev.Answered)]
    assert sorted(answered) == [t for t in tickets if t != tickets[7]]
    assert all(w.hit(t).chunks == 3 and w.hit(t).tiers == b"\1\1\1" for t in answered)
    assert w.counters["fetches"] == 3


def test_a_shorter_and_a_longer_prompt_join_a_running_fetch(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 4)
    w.put(keys)
    middle = w.ask("s", keys[:4])
    short, long = w.ask("s", keys[:2]), w.ask("s", keys)
    assert list(w.fetches) == keys[1:]
    w.bring(keys[1])
    assert w.hit(short).chunks == 1
    assert w.waits(middle)
    w.bring()
    assert (w.hit(middle).chunks, w.hit(long).chunks) == (3, 4)


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (IoOutcome.MISSING, MISS),
        (IoOutcome.CORRUPT, Reason.CORRUPT),
        (IoOutcome.LAYOUT_MISMATCH, Reason.LAYOUT_MISMATCH),
        (IoOutcome.TIMEOUT, TIMEOUT),
        (IoOutcome.ERROR, Reason.L2_ERROR),
        (IoOutcome.REFUSED, Reason.L2_ERROR),
        (IoOutcome.CANCELLED, Reason.L2_ERROR),
    ],
)
def test_the_middle_chunk_fails(shell: MakeShell, outcome: IoOutcome, reason: Reason) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 4)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.bring(keys[1])
    w.bring(keys[2], outcome=outcome)
    hit = w.hit(ticket)  # nobody waits for what comes behind it
    assert (hit.chunks, hit.tiers) == (1, b"\1")
    assert hit.reasons == (reason, Reason.BEHIND, Reason.BEHIND)
    assert w.resident(keys) == [True, False, False, False]
    w.bring(keys[3], keys[4])
    assert w.resident(keys) == [True, False, True, True]


def test_a_refused_first_chunk_leaves_no_lease(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 1)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.bring(outcome=IoOutcome.CORRUPT)
    assert w.hit(ticket) == ev.Hit(NO_LEASE, 0, (), (Reason.CORRUPT,))
    assert not w.directory.sessions["s"].reads_open


def test_two_ranks(shell: MakeShell) -> None:
    w = shell()
    for rank in (None, 0, 1):
        w.join_rank("s", rank, 2, (row(1), row(2)) if rank else FULL)
    keys = chain("a", 2)
    w.put(keys)
    ticket = w.ask("s", keys)
    fetch = w.fetches[keys[1]]
    assert fetch.objects.rows == ((0, 0, PAGE), (1, 0, PAGE), (1, 0, 2 * PAGE))
    assert (fetch.objects.world, len(set(fetch.offsets))) == (2, 3)
    w.bring(keys[1])
    last = w.fetches.pop(keys[2])
    w.do(ev.Fetched(last.id, (IoOutcome.OK, IoOutcome.OK, IoOutcome.CORRUPT)))
    hit = w.hit(ticket)
    assert (hit.chunks, hit.reasons, len(hit.columns)) == (1, (Reason.CORRUPT,), 3)
    assert w.end("s", hit.lease, (1,)) == 1
    assert w.directory.slots.reserved_bytes == PAGE
    assert w.end("s", hit.lease, (0,)) == 1
    assert w.directory.slots.reserved_bytes == 0


def test_two_backends_with_different_contents(shell: MakeShell) -> None:
    w = shell(backends=2)
    w.join("s")
    keys = chain("a", 4)
    w.put([keys[1], keys[3]], 0)
    w.put([keys[2], keys[3]], 1)
    ticket = w.ask("s", keys)
    assert [f.backend for f in w.fetches.values()] == [0, 1, 0]  # the first that has it
    w.bring()
    hit = w.hit(ticket)
    assert (hit.chunks, hit.tiers, hit.reasons) == (3, bytes([1, 2, 1]), (MISS,))
    stored = [w.directory.residents.index[key].stored for key in keys[1:4]]
    assert stored == [0b01, 0b10, 0b01]


@pytest.mark.parametrize("outcome", [IoOutcome.OK, IoOutcome.MISSING])
def test_what_one_backend_does_not_bring_the_other_is_asked_for(
    shell: MakeShell, outcome: IoOutcome
) -> None:
    w = shell(backends=2)
    w.join("s")
    keys = chain("a", 2)
    w.put(keys, 0)
    w.put(keys, 1)
    tickets = [w.ask("s", keys), w.ask("s", keys)]
    w.bring(keys[1], outcome=IoOutcome.CORRUPT)
    assert w.fetches[keys[1]].backend == 1
    w.bring(keys[1], outcome=outcome)
    w.bring()
    for ticket in tickets:
        came = outcome is IoOutcome.OK
        assert (w.hit(ticket).chunks, w.hit(ticket).tiers) == ((2, b"\2\1") if came else (0, b""))
        assert w.hit(ticket).reasons == (() if came else (MISS, Reason.BEHIND))
    assert w.counters["fetches"] == 3


def test_a_busy_backend_is_passed_over(shell: MakeShell) -> None:
    w = shell(backends=2, fetches_per_backend=1)
    w.join("s")
    keys = chain("a", 3)
    for backend in (0, 1):
        w.put(keys, backend)
    w.ask("s", keys)
    assert [(f.chunk, f.backend) for f in w.fetches.values()] == [(keys[1], 0), (keys[2], 1)]


# ---- sliding windows and recurrent state


def test_a_window_needs_its_end_only(shell: MakeShell) -> None:
    w = shell()
    w.join("s", (row(1, WINDOW, 2),))
    keys = chain("a", 5)
    w.put(keys)
    ticket = w.ask("s", keys)
    assert list(w.fetches) == keys[4:]
    w.bring()
    hit = w.hit(ticket)
    assert hit.chunks == 5
    (column,) = hit.columns
    assert words(column.slots)[:3] == [ev.NO_SLOT] * 3
    assert ev.NO_SLOT not in words(column.slots)[3:]
    assert hit.tiers == bytes([0, 0, 0, 1, 1])


def test_a_window_over_a_hole(shell: MakeShell) -> None:
    w = shell()
    w.join("s", (row(1, WINDOW, 2),))
    keys = chain("a", 6)
    w.put([keys[2], keys[3], keys[5], keys[6]])
    ticket = w.ask("s", keys)
    assert list(w.fetches) == keys[5:]
    w.bring(keys[5])
    w.bring(keys[6], outcome=IoOutcome.MISSING)
    assert w.hit(ticket).chunks == 0  # what came is not needed by any shorter hit
    assert w.directory.slots.reserved_bytes == 0


def test_recurrent_state_is_one_chunk(shell: MakeShell) -> None:
    w = shell()
    w.join("s", (row(1, STATE),))
    keys = chain("a", 4)
    w.put(keys[1:4])
    ticket = w.ask("s", keys)
    assert list(w.fetches) == [keys[3]]
    w.bring()
    assert (w.hit(ticket).chunks, w.hit(ticket).reasons) == (3, (MISS,))


def test_windows_beside_full_attention_need_everything(shell: MakeShell) -> None:
    w = shell()
    w.join("s", (row(1), row(1, WINDOW, 1)))
    keys = chain("a", 3)
    w.put(keys)
    w.ask("s", keys)
    assert list(w.fetches) == keys[1:]


# ---- against those who store


@pytest.mark.parametrize("outcome", [IoOutcome.OK, IoOutcome.MISSING])
def test_an_engines_commit_overtakes_a_fetch(shell: MakeShell, outcome: IoOutcome) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    staged = w.stage("s", keys, 0, 1)
    ticket = w.ask("s", keys)
    w.commit("s", staged.leases)
    free = w.directory.arena.free_bytes
    w.bring(keys[1], outcome=outcome)
    assert w.directory.arena.free_bytes == free + PAGE  # the engine's bytes stay
    w.bring(keys[2])
    hit = w.hit(ticket)
    assert (hit.chunks, hit.reasons, hit.tiers) == (2, (), bytes([0, 1]))
    stored = words(hit.columns[0].slots)[0], words(staged.columns[0].slots)[0]
    assert stored[0] == stored[1]


def test_what_is_being_fetched_is_in_progress(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    w.ask("s", keys)
    w.late(keys[2])
    staged = w.stage("s", keys)
    assert staged.outcomes == (LOST, StageOutcome.GRANTED)  # a late one may never come
    w.bring(keys[2])
    assert w.commit("s", staged.leases).outcomes == (1,)
    assert w.bytes_in(SlotState.STAGING) == PAGE


def test_a_key_twice_in_one_lookup_ends_by_its_deadline(shell: MakeShell) -> None:
    """No honest client says this; the server must only stay sound."""
    w = shell()
    w.join("s")
    keys = chain("a", 1)
    w.put(keys)
    ticket = w.ask("s", [*keys, keys[1]])
    w.bring()
    if w.waits(ticket):
        w.ring(ticket)
    assert len(w.hit(ticket).reasons) + w.hit(ticket).chunks == 2


def test_two_lookups_of_a_session_want_the_same_and_one_gives_up(shell: MakeShell) -> None:
    w = shell(fetches_per_backend=1)
    w.join("s")
    keys = chain("a", 3)
    w.put(keys)
    first = w.ask("s", keys)
    w.holds[0].discard(keys[2])  # L2 evicts: the second lookup cannot reach the third chunk
    second = w.ask("s", keys)
    w.bring()
    assert (w.hit(first).chunks, w.hit(second).chunks) in ((3, 1), (3, 3))


def test_ids_nobody_knows(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys: list[ChunkHash] = chain("a", 1)
    w.put(keys)
    ticket = w.ask("s", keys)
    nobody = TicketId(999_999)
    fetch = w.fetches[keys[1]]
    for event in (
        ev.Probed(nobody, (1,)),
        ev.Probed(ticket, (1,)),  # a second time
        ev.Expire(nobody),
        ev.Cancel("s", nobody),
        ev.Cancel("t", ticket),
        ev.Fetched(TransferId(77), (IoOutcome.OK,)),
        ev.FetchLate(TransferId(77)),
        ev.Persisted(TransferId(77), (IoOutcome.OK,)),
    ):
        assert w.did(event) == 0
        assert w.effects == []
    w.bring()
    assert w.hit(ticket).chunks == 1
    assert w.did(ev.Fetched(fetch.id, (IoOutcome.OK,))) == 0
    assert w.did(ev.FetchLate(fetch.id)) == 0
    assert w.did(ev.Cancel("s", ticket)) == 0
