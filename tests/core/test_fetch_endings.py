"""Pending lookups that end before their time: cancelled, revoked, cleared, their session gone."""

from collections.abc import Callable

import pytest
from tests.core.build import FULL, PAGE, chain, row
from tests.core.conftest import MakeShell
from tests.core.shell import Shell

from kvkeep.core import events as ev
from kvkeep.types import (
    NO_LEASE,
    ChunkHash,
    CommitOutcome,
    Fingerprint,
    IoOutcome,
    LeaseId,
    PeerId,
    Reason,
    Role,
    SlotState,
    StorePolicy,
    TicketId,
)


def pending(w: Shell, chunks: int = 3, local: int = 1) -> tuple[TicketId, list[ChunkHash]]:
    """A lookup that holds the first chunks and waits for the rest."""
    w.join("s")
    keys = chain("a", chunks)
    w.store("s", keys[: 1 + local])
    w.put(keys)
    return w.ask("s", keys), keys


def nothing(reason: Reason, chunks: int = 3) -> ev.Hit:
    return ev.Hit(NO_LEASE, 0, (), (reason,) * chunks)


def own_lease(w: Shell) -> LeaseId:
    (lease,) = w.directory.sessions["s"].reads_open
    return lease


# ---- cancel


def test_cancel_gives_back_what_was_reserved(shell: MakeShell) -> None:
    w = shell()
    ticket, keys = pending(w)
    w.bring(keys[2])
    assert w.directory.slots.reserved_bytes == 2 * PAGE
    assert w.did(ev.Cancel("s", ticket)) == 1
    assert w.directory.slots.reserved_bytes == 0
    w.bring(keys[3])  # it runs to its end
    assert w.resident(keys) == [True] * 3
    assert ticket not in w.answers
    assert w.did(ev.Expire(ticket)) == 0


def test_cancel_takes_what_was_not_begun_from_the_queue(shell: MakeShell) -> None:
    w = shell(fetches_per_backend=1)
    ticket, keys = pending(w)
    w.do(ev.Cancel("s", ticket))
    w.bring()
    assert w.resident(keys) == [True, True, False]


def test_cancel_before_the_probe(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 1)
    w.put(keys)
    ticket = w.ask("s", keys, probe=False)
    assert w.did(ev.Cancel("s", ticket)) == 1
    assert w.did(ev.Probed(ticket, (1,))) == 0
    assert w.effects == []
    w.probes.clear()


def test_another_session_cannot_cancel(shell: MakeShell) -> None:
    w = shell()
    ticket, _ = pending(w)
    w.join("t")
    assert w.did(ev.Cancel("t", ticket)) == 0
    w.bring()
    assert w.hit(ticket).chunks == 3


# ---- the session


def leave(w: Shell) -> None:
    w.do(ev.PeerClosed(w.peers["s"]))


def die(w: Shell) -> None:
    w.do(ev.PeerGone(w.peers["s"]))


def replace(w: Shell) -> None:
    w.join("s")


def change_layout(w: Shell) -> None:
    w.join("s", (row(2),))


@pytest.mark.parametrize("what", [leave, die, replace, change_layout])
@pytest.mark.parametrize("probed", [True, False])
def test_the_engine_leaves(shell: MakeShell, what: Callable[[Shell], None], probed: bool) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 3)
    w.store("s", keys[:2])
    w.put(keys)
    ticket = w.ask("s", keys, probe=probed)
    what(w)
    assert w.hit(ticket) == nothing(Reason.NOT_READY)
    assert w.directory.slots.reserved_bytes == 0
    if not probed:
        w.answer(ticket)
    w.bring()
    assert w.resident(keys) == [True, probed, probed]  # the bytes are good for who comes next


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_rank_leaves(shell: MakeShell, rank: int | None) -> None:
    w = shell()
    for joining in (None, 0, 1):
        w.join_rank("s", joining, 2)
    keys = chain("a", 2)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.bring(keys[1])
    w.do(ev.PeerClosed(w.peers[f"s/{rank}"]))
    assert w.hit(ticket) == nothing(Reason.NOT_READY, 2)
    w.join_rank("s", rank, 2)
    w.bring()
    assert w.lookup("s", keys).chunks == 2


def test_a_worker_comes_back_with_another_fingerprint(shell: MakeShell) -> None:
    """The old keys name nothing of the new layout."""
    w = shell(fetches_per_backend=1)
    for joining in (None, 0):
        w.join_rank("s", joining, 1)
    keys = chain("a", 2)
    w.put(keys)
    ticket = w.ask("s", keys)
    old = w.fetches[keys[1]].space
    w.do(ev.Join("s", PeerId(777), Role.WORKER, 0, 1, FULL, Fingerprint(b"new" * 10)))
    assert w.hit(ticket) == nothing(Reason.NOT_READY, 2)
    w.bring(keys[1])
    assert w.directory.residents.index[keys[1]].space == old
    assert not w.fetches


# ---- the operator


def test_a_revoked_reservation(shell: MakeShell) -> None:
    w = shell()
    ticket, keys = pending(w)
    lease = own_lease(w)
    assert w.did(ev.Revoke(lease)) == 1
    assert w.hit(ticket) == nothing(Reason.REVOKED)
    assert w.directory.slots.reserved_bytes == 0
    w.bring()
    assert w.resident(keys) == [True] * 3


def test_clear_by_force_ends_it(shell: MakeShell) -> None:
    w = shell()
    ticket, keys = pending(w)
    w.do(ev.Clear(force=True))
    assert w.hit(ticket) == nothing(Reason.REVOKED)
    w.bring()
    assert w.resident(keys) == [False] * 3
    assert w.directory.arena.free_bytes == w.directory.arena.populated_bytes


def test_clear_publishes_nothing_and_hands_out_nothing(shell: MakeShell) -> None:
    w = shell()
    ticket, keys = pending(w)
    w.bring(keys[2])
    w.do(ev.Clear())
    w.bring(keys[3])
    hit = w.hit(ticket)
    assert hit == ev.Hit(NO_LEASE, 0, (), (Reason.EVICTED, Reason.BEHIND, Reason.EVICTED))
    assert w.resident(keys) == [False] * 3
    assert w.directory.arena.free_bytes == w.directory.arena.populated_bytes
    again = w.ask("s", keys)  # L2 still has it
    w.bring()
    assert w.hit(again).chunks == 3


def test_a_dropped_chunk_that_is_on_its_way_is_not_published(shell: MakeShell) -> None:
    """It failed to load, was evicted, and is fetched again when the word comes."""
    w = shell()
    ticket, keys = pending(w)
    w.do(ev.Drop("s", keys[3]))
    w.bring()
    assert w.resident(keys) == [True, True, False]
    assert (w.hit(ticket).chunks, len(w.hit(ticket).reasons)) == (2, 1)


def test_a_chunk_dropped_after_it_was_reserved_is_not_handed_out(shell: MakeShell) -> None:
    w = shell()
    ticket, keys = pending(w, local=2)
    w.do(ev.Drop("s", keys[2]))
    w.bring()
    hit = w.hit(ticket)
    assert (hit.chunks, hit.reasons[0]) == (1, Reason.CORRUPT)
    assert w.directory.slots.reserved_bytes == PAGE


def test_drop_makes_l2_forget_the_chunk(shell: MakeShell) -> None:
    w = shell()
    ticket, keys = pending(w)
    w.bring()
    w.do(ev.Drop("s", keys[3]))
    (discard,) = w.told[-1:]
    assert isinstance(discard, ev.Discard)
    assert (discard.hashes, discard.broken) == (keys[3], True)
    assert w.hit(ticket).chunks == 3


@pytest.mark.parametrize("outcome", [IoOutcome.OK, IoOutcome.MISSING])
def test_forget_ends_everything_of_the_layout(shell: MakeShell, outcome: IoOutcome) -> None:
    w = shell()
    ticket, keys = pending(w)
    staged = w.stage("s", chain("b", 1))
    assert w.did(ev.Forget("s")) == 1
    assert ev.ForgetStored(w.fetches[keys[2]].space) in w.effects
    assert w.hit(ticket) == nothing(Reason.EVICTED)
    w.bring(outcome=outcome)
    assert w.resident(keys) == [False] * 3
    assert w.commit("s", staged.leases).outcomes == (CommitOutcome.FORGOTTEN,)
    assert w.directory.arena.free_bytes == w.directory.arena.populated_bytes


def test_forget_leaves_another_layout_alone(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    for joining in (None, 0):
        w.join_rank("other", joining, 1)
    keys = chain("a", 1)
    w.put(keys)
    ticket = w.ask("other", keys)
    assert w.did(ev.Forget("s")) == 0
    w.bring()
    assert w.hit(ticket).chunks == 1


def test_forget_of_nobody(shell: MakeShell) -> None:
    w = shell()
    assert w.did(ev.Forget("s")) == 0
    assert w.effects == []


def test_doomed_bytes_do_not_stop_an_engine_from_storing_anew(shell: MakeShell) -> None:
    w = shell()
    _, keys = pending(w)
    w.do(ev.Forget("s"))
    assert w.store("s", keys) == [0, 0, 0]
    held = w.bytes_in(SlotState.RESIDENT)
    w.bring()
    assert w.bytes_in(SlotState.RESIDENT) == held
    assert w.lookup("s", keys).chunks == 3


def test_a_drop_of_what_an_engine_committed_stops_the_fetch_too(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 1)
    w.put(keys)
    staged = w.stage("s", keys)
    ticket = w.ask("s", keys)
    w.commit("s", staged.leases)
    w.do(ev.Drop("s", keys[1]))
    w.bring()
    assert w.resident(keys) == [False]
    assert w.hit(ticket).chunks == 0


def test_what_the_first_waiter_gives_back_is_still_there_for_the_second(shell: MakeShell) -> None:
    """Under skip_l1 a chunk leaves with its last reader, and that must not be the first waiter."""
    w = shell(store_policy=StorePolicy.SKIP_L1)
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    tickets = [w.ask("s", keys), w.ask("s", keys)]
    w.bring(keys[1])
    w.do(ev.Drop("s", keys[1]))
    w.bring(keys[2])
    assert [w.hit(ticket).chunks for ticket in tickets] == [0, 0]
