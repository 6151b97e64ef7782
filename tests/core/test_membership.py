"""Who belongs to a session, and what a close or a death does to memory."""

import pytest
from tests.core.build import FULL, PAGE, World, chain, row

from kvkeep.core import events as ev
from kvkeep.types import (
    Fingerprint,
    GroupKind,
    PeerId,
    Reason,
    Role,
    RowSpec,
    SlotState,
    StageOutcome,
)

P = chain("a", 4)
NOT_READY = StageOutcome.NOT_READY


def bytes_in(world: World, state: SlotState) -> int:
    return world.directory.slots.bytes_in[state] // PAGE


def mark(number: int = 0) -> Fingerprint:
    return Fingerprint(bytes([number]) * 32)


# ---- joining


def test_a_session_is_ready_when_every_rank_is_there() -> None:
    world = World(pages=16)
    for number, rank in enumerate((1, None, 0)):
        hit = world.lookup("s", P)
        assert (hit.chunks, hit.reasons) == (0, (Reason.NOT_READY,) * 4)
        assert world.stage("s", P).outcomes == (NOT_READY,) * 4
        assert isinstance(world.join_rank("s", rank, 2), ev.Joined)
        assert len(world.effects) == (number == 2)
    (ready,) = world.effects
    assert isinstance(ready, ev.SessionReady)
    assert (ready.world, ready.rows) == (2, FULL * 2)
    assert world.stage("s", P).outcomes[0] is StageOutcome.GRANTED


def test_ready_sessions_of_equal_ranks_have_one_fingerprint() -> None:
    world = World(pages=16)
    seen = []
    for name in ("s", "t"):
        for rank in (None, 0, 1):
            world.join_rank(name, rank, 2)
        (ready,) = world.effects
        assert isinstance(ready, ev.SessionReady)
        seen.append(ready.fingerprint)
    assert seen[0] == seen[1]


WINDOWLESS = (RowSpec(0, GroupKind.SLIDING_WINDOW, PAGE, 0),)


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (ev.Join("s", PeerId(91), Role.WORKER, 0, 2, FULL, mark()), "world size"),
        (ev.Join("t", PeerId(92), Role.WORKER, 2, 2, FULL, mark()), "rank 2"),
        (ev.Join("t", PeerId(93), Role.WORKER, -1, 2, FULL, mark()), "rank -1"),
        (ev.Join("t", PeerId(94), Role.WORKER, 0, 1, (), mark()), "layout"),
        (ev.Join("t", PeerId(95), Role.BOTH, 0, 1, FULL), "fingerprint"),
        (ev.Join("t", PeerId(96), Role.BOTH, 0, 1, (RowSpec(0, GroupKind(0), 0),), mark()), "byte"),
        (ev.Join("t", PeerId(97), Role.BOTH, 0, 1, WINDOWLESS, mark()), "window"),
        (ev.Join("t", PeerId(1), Role.BOTH, 0, 1, FULL, mark()), "already"),
    ],
)
def test_refusals_say_why_and_change_nothing(event: ev.Join, says: str) -> None:
    world = World(pages=8)
    assert world.join("s") == 1
    staged = world.stage("s", P)
    reply = world.do(event)
    assert isinstance(reply, ev.JoinRefused)
    assert says in reply.text
    assert set(world.directory.sessions) == {"s"}
    assert set(world.directory.peers) == {1}
    assert len(world.commit("s", staged.leases).outcomes) == 4


def test_operators_belong_to_no_session() -> None:
    world = World(pages=8)
    assert world.do(ev.Join("", PeerId(50), Role.OPERATOR)) == ev.Joined()
    assert world.directory.sessions == {}
    world.do(ev.PeerGone(PeerId(50)))
    assert world.directory.peers == {}


def test_another_layout_ends_what_the_old_one_held() -> None:
    world = World(pages=16)
    world.join("s")
    staged = world.stage("s", P[:2])
    world.join("t")
    world.store("t", P[2:])
    hit = world.lookup("s", P[2:])
    world.do(ev.Join("s", PeerId(60), Role.WORKER, 0, 1, (row(2),), mark(1)))
    assert world.abort("s", staged.leases) == 0
    assert world.end("s", hit.lease) == 0
    assert bytes_in(world, SlotState.ORPHANED) == 1, "the old worker may still write"


def test_the_same_rows_split_over_ranks_otherwise_are_another_layout() -> None:
    """Else the parts of open leases would be counted by the new split."""
    world = World(pages=16)
    peers = iter(range(70, 80))

    def join(rank: int, rows: tuple[RowSpec, ...]) -> PeerId:
        peer = PeerId(next(peers))
        world.do(ev.Join("s", peer, Role.WORKER, rank, 2, rows, mark(), recompute=False))
        return peer

    world.do(ev.Join("s", PeerId(69), Role.SCHEDULER, 0, 2, recompute=False))
    old = [join(0, (row(1), row(2))), join(1, (row(3),))]
    world.commit("s", world.stage("s", P[:2]).leases)
    hit = world.lookup("s", P[:2])
    assert world.end("s", hit.lease, (0,)) == 1
    for peer in old:
        world.do(ev.PeerClosed(peer))
    join(0, (row(1),))
    join(1, (row(2), row(3)))
    assert world.end("s", hit.lease, (1,)) == 0
    assert world.directory.slots.reserved_bytes == 0


# ---- leaving


def test_a_closed_owner_keeps_its_staged_bytes_until_it_is_gone() -> None:
    world = World(pages=8)
    peer = world.join("s")
    staged = world.stage("s", P)
    assert world.do(ev.PeerClosed(peer)) == ev.Done(1)
    assert world.effects == [ev.SessionUnready("s", "rank 0 left")]
    assert bytes_in(world, SlotState.ORPHANED) == 4
    assert world.do(ev.PeerClosed(peer)) == ev.Done(0)
    world.join("t")
    assert len(world.stage("t", chain("b", 8)).leases) == 4, "only what nobody may still write"
    assert world.do(ev.PeerGone(peer)) == ev.Done(4)
    assert bytes_in(world, SlotState.ORPHANED) == 0
    assert world.do(ev.PeerGone(peer)) == ev.Done(0)
    assert staged.outcomes == (StageOutcome.GRANTED,) * 4


def test_a_dead_owner_with_dma_is_quarantined() -> None:
    world = World(pages=4)
    peer = world.join("s", dma=True)
    world.stage("s", P)
    world.do(ev.PeerGone(peer))
    assert bytes_in(world, SlotState.QUARANTINED) == 4
    world.now_s += 4.999
    assert world.do(ev.Tick()) == ev.Done(0)
    world.join("t")
    assert world.stage("t", chain("b", 1)).outcomes == (StageOutcome.NO_ROOM,)
    world.now_s += 0.001
    assert world.do(ev.Tick()) == ev.Done(4)
    assert world.stage("t", chain("b", 1)).outcomes == (StageOutcome.GRANTED,)


def test_who_confirmed_is_not_quarantined() -> None:
    world = World(pages=4)
    peer = world.join("s", dma=True)
    world.stage("s", P)
    world.do(ev.PeerClosed(peer))
    assert world.do(ev.PeerGone(peer, confirmed=True)) == ev.Done(4)
    assert world.directory.arena.free_bytes == 4 * PAGE


def test_a_rejoin_confirms_the_connection_before_it() -> None:
    world = World(pages=4)
    old = world.join("s", dma=True)
    world.stage("s", P)
    world.do(ev.PeerClosed(old))
    assert bytes_in(world, SlotState.ORPHANED) == 4
    world.do(ev.Join("s", PeerId(88), Role.BOTH, 0, 1, FULL, mark(), confirms=old))
    assert world.directory.arena.free_bytes == 4 * PAGE
    assert set(world.directory.peers) == {88}
    assert world.stage("s", P).outcomes == (StageOutcome.GRANTED,) * 4


def test_a_dead_rank_frees_its_part_and_the_living_ones_keep_theirs() -> None:
    world = World(pages=16)
    for rank in (None, 0, 1):
        world.join_rank("s", rank, 2)
    world.stage("s", P)
    world.do(ev.PeerGone(world.peers["s/1"]))
    assert bytes_in(world, SlotState.ORPHANED) == 4, "rank 0 is alive and may be copying"
    assert bytes_in(world, SlotState.STAGING) == 0
    assert world.stage("s", P).outcomes == (NOT_READY,) * 4
    world.do(ev.PeerGone(world.peers["s/0"]))
    assert world.directory.arena.free_bytes == 16 * PAGE


def test_a_scheduler_that_left_takes_its_leases_along() -> None:
    world = World(pages=16)
    for rank in (None, 0):
        world.join_rank("s", rank, 1)
    world.commit("s", world.stage("s", P[:2]).leases)
    hit, staged = world.lookup("s", P[:2]), world.stage("s", P, 1, 2)
    world.do(ev.PeerClosed(world.peers["s/None"]))
    assert world.effects == [ev.SessionUnready("s", "scheduler left")]
    assert world.directory.slots.reserved_bytes == 0
    assert bytes_in(world, SlotState.ORPHANED) == 1
    world.join_rank("s", None, 1)
    assert world.end("s", hit.lease) == 0
    assert world.abort("s", staged.leases) == 0


def test_reads_without_recompute_last_until_the_reader_is_gone() -> None:
    world = World(pages=8)
    peer = world.join("s", recompute=False)
    world.store("s", P)
    world.lookup("s", P)
    world.do(ev.PeerClosed(peer))
    assert world.directory.slots.reserved_bytes == 4 * PAGE
    world.do(ev.PeerGone(peer))
    assert world.directory.slots.reserved_bytes == 0
    assert world.directory.sessions == {}


def test_a_newer_connection_replaces_the_older_one() -> None:
    world = World(pages=8)
    old = world.join("s")
    world.stage("s", P)
    world.do(ev.Join("s", PeerId(99), Role.BOTH, 0, 1, FULL, mark()))
    assert bytes_in(world, SlotState.ORPHANED) == 4
    assert world.do(ev.PeerClosed(old)) == ev.Done(1)
    assert world.effects == [], "the session lives on in the newer one"
    assert world.lookup("s", P).reasons == (Reason.NEVER_STORED,) * 4
    world.do(ev.PeerGone(old))
    assert world.directory.arena.free_bytes == 8 * PAGE
