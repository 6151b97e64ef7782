"""Clear, forget and drain in slices: atomic for whoever looks, whatever happens between slices."""

from itertools import pairwise

import msgspec
import pytest
from tests.core.build import NO_CAPS, PAGE, World, alone, chain, row
from tests.core.conftest import MakeShell
from tests.core.shell import Shell

from kvkeep.core import events as ev
from kvkeep.core.sweeping import UNLINK_COST, Walk
from kvkeep.types import CommitOutcome, Reason, SlotState, StageOutcome, StorePolicy

ONE = UNLINK_COST  # a slice that unlinks a few chunks at most
MANY = 40  # chunks: several slices


def order(world: World, event: ev.Event) -> int:
    reply = world.do(event)
    assert isinstance(reply, ev.Sweeping)
    return reply.sweep


def sweep(world: World) -> dict[int, int]:
    """Carry on to the end; how many chunks each order took."""
    swept: dict[int, int] = {}
    while world.directory.busy:
        world.do(ev.Sweep(ONE))
        swept |= {e.sweep: e.chunks for e in world.effects if isinstance(e, ev.Swept)}
    return swept


def filled(names: str = "a", pages: int = 4 * MANY) -> World:
    """A session per letter, each with a layout of its own and `MANY` chunks."""
    world = World(pages)
    for name in names:
        world.join(name)
        world.store(name, alone(name, MANY))
    return world


@pytest.mark.slow
@pytest.mark.parametrize("begun", [0, 1, 300])
def test_a_whole_round_meets_everything_that_was_there(begun: int) -> None:
    world = World(1024)
    world.join("a")
    world.store("a", alone("a", 600))  # some in nearly every shard
    walk = Walk(world.directory.residents.index)
    for _ in range(begun):
        walk.take(1)
    there = set(world.directory.residents.index)
    until, met = walk.whole_round(), set()
    while walk.finished < until:
        met |= {chunk.hash for chunk in walk.take(1)}
    assert met == there


def test_nothing_is_found_from_the_order_on() -> None:
    world = filled()
    keys = alone("a", MANY)
    clear = order(world, ev.Clear(sliced=True))
    assert len(world.directory.residents.index) == MANY, "nothing has left yet"
    hit = world.lookup("a", keys)
    assert hit.chunks == 0
    assert set(hit.reasons) == {Reason.EVICTED}
    assert sweep(world) == {clear: MANY}
    assert world.directory.arena.free_bytes == world.directory.arena.populated_bytes
    assert world.directory.counters["cleared"] == MANY


def test_it_takes_many_slices() -> None:
    world = filled()
    order(world, ev.Clear(sliced=True))
    left = [MANY]
    while world.directory.busy:
        world.do(ev.Sweep(ONE))
        left.append(len(world.directory.residents.index))
    assert left[-1] == 0
    assert max(a - b for a, b in pairwise(left)) < MANY / 4
    assert world.do(ev.Sweep(ONE)) == ev.Done(0)


def test_what_is_stored_after_the_order_stays() -> None:
    world = filled()
    order(world, ev.Clear(sliced=True))
    again, fresh = alone("a", MANY // 2), alone("fresh", 3)
    staged = world.stage("a", again)
    assert set(staged.outcomes) == {StageOutcome.GRANTED}, "it is not there any more"
    committed = world.commit("a", staged.leases)
    assert set(committed.outcomes) == {CommitOutcome.COMMITTED}
    world.do(ev.Sweep(ONE))
    world.store("a", fresh)
    sweep(world)
    assert world.lookup("a", again).chunks == MANY // 2
    assert world.lookup("a", fresh).chunks == 3
    assert len(world.directory.residents.index) == MANY // 2 + 3


def test_a_commit_of_a_condemned_key_wins() -> None:
    world = World(64)
    world.join("a")
    keys = chain("a", 1)
    first, second = world.stage("a", keys), None
    world.now_s += 60.0
    second = world.stage("a", keys)
    world.commit("a", first.leases)
    order(world, ev.Clear(sliced=True))
    assert world.commit("a", second.leases).outcomes == (CommitOutcome.COMMITTED,)
    sweep(world)
    assert world.lookup("a", keys).chunks == 1


def test_a_second_order_takes_what_the_first_left() -> None:
    world = filled()
    first = order(world, ev.Clear(sliced=True))
    world.do(ev.Sweep(ONE))
    world.store("a", alone("fresh", 5))
    second = order(world, ev.Clear(sliced=True))
    assert world.lookup("a", alone("fresh", 5)).chunks == 0
    world.store("a", alone("fresh", 2))
    assert sweep(world) == {first: MANY, second: 5}
    assert world.lookup("a", alone("fresh", 2)).chunks == 2


def test_what_is_read_is_freed_with_its_last_reader() -> None:
    world = filled()
    keys = alone("a", MANY)
    hit = world.lookup("a", keys)
    order(world, ev.Clear(sliced=True))
    sweep(world)
    assert world.directory.slots.bytes_in[SlotState.RESIDENT] == MANY * PAGE
    world.end("a", hit.lease)
    assert world.directory.slots.bytes_in[SlotState.RESIDENT] == 0


def test_force_ends_the_reads_of_its_moment() -> None:
    world = filled()
    hits = [world.lookup("a", alone("a", MANY)) for _ in range(3)]
    order(world, ev.Clear(force=True, sliced=True))
    world.store("a", alone("fresh", 2))
    later = world.lookup("a", alone("fresh", 2))
    revoked = []
    while world.directory.busy:
        world.do(ev.Sweep(ONE))
        revoked += [e.lease for e in world.effects if isinstance(e, ev.LeaseRevoked)]
    assert revoked == [hit.lease for hit in hits]
    assert world.directory.slots.bytes_in[SlotState.RESIDENT] == 2 * PAGE
    world.end("a", later.lease)


def test_evicted_while_it_is_condemned() -> None:
    world = filled(pages=MANY)
    clear = order(world, ev.Clear(sliced=True))
    world.store("a", alone("new", MANY // 2))
    taken = sweep(world)[clear]
    assert taken == MANY - world.directory.residents.evicted_chunks
    assert world.lookup("a", alone("new", MANY // 2)).chunks == MANY // 2


# ---- layouts


def two_layouts(shell: MakeShell) -> Shell:
    """Sessions "s" and "other" of different layouts, with `MANY` chunks each, being written."""
    through = StorePolicy.WRITE_THROUGH
    w = shell(pages=4 * MANY, store_policy=through, persists_per_backend=1)
    w.join("s")
    for rank in (None, 0):
        w.join_rank("other", rank, 1)
    w.store("s", alone("s", MANY))
    w.store("other", alone("other", MANY))
    return w


def test_forget_takes_one_layout_and_its_queue(shell: MakeShell) -> None:
    w = two_layouts(shell)
    queued = w.directory.persister.queued_bytes
    forget = order(w, ev.Forget("s", sliced=True))
    clear = order(w, ev.Clear(sliced=True))
    w.do(ev.Drain(sliced=True))
    swept = sweep(w)
    assert swept == {forget: MANY, clear: MANY}
    assert w.counters["persist_forgotten"] + w.counters["persist_lost"] == queued // PAGE
    assert w.counters["persist_forgotten"] == MANY - 1, "one was being written"
    w.kept()
    assert w.directory.persister.idle


def test_nothing_forgotten_is_written_meanwhile(shell: MakeShell) -> None:
    w = two_layouts(shell)
    mine = set(alone("s", MANY)[1:])
    order(w, ev.Forget("s", sliced=True))
    assert sum(isinstance(e, ev.ForgetStored) for e in w.effects) == 1
    begun = set(w.persists)
    while w.directory.busy:
        w.kept()
        w.do(ev.Sweep(ONE))
    while w.persists:
        w.kept()
    written = {p.chunk for t, p in w.persists.items() if t not in begun}
    assert not written & mine
    assert not w.holds[0] & (mine - {alone("s", 1)[1]})
    assert w.lookup("other", alone("other", MANY)).chunks == MANY


def test_a_pending_lookup_does_not_keep_what_was_cleared(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 3)
    w.store("s", keys[:3])
    w.put(keys[2:])
    ticket = w.ask("s", keys)
    order(w, ev.Clear(sliced=True))
    w.bring()
    assert w.hit(ticket).chunks == 0
    sweep(w)
    w.rest()


# ---- drain


def test_a_drain_queues_as_there_is_room(shell: MakeShell) -> None:
    w = shell(pages=4 * MANY, persists_per_backend=1, persist_queue_bytes=8 * PAGE)
    w.join("s")
    w.store("s", alone("a", MANY))
    persister = w.directory.persister
    assert persister.missing() == MANY
    assert persister.idle
    w.do(ev.Drain(sliced=True))
    assert not persister.idle
    most = 0
    while not persister.idle:
        if w.directory.busy:
            w.do(ev.Sweep(ONE))
        elif w.persists:
            w.kept()
        most = max(most, persister.queued_bytes)
    assert persister.missing() == 0
    assert len(w.holds[0]) == MANY
    assert most < 16 * PAGE


@pytest.mark.parametrize("policy", [StorePolicy.WRITE_BACK, StorePolicy.SKIP_L1])
def test_a_drain_leaves_what_is_condemned(shell: MakeShell, policy: StorePolicy) -> None:
    w = shell(pages=4 * MANY, store_policy=policy, persists_per_backend=1)
    w.join("s")
    w.store("s", alone("a", MANY))
    order(w, ev.Clear(sliced=True))
    w.do(ev.Drain(sliced=True))
    sweep(w)
    while w.persists:
        w.kept()
    assert len(w.holds[0]) <= 1
    if policy is StorePolicy.WRITE_BACK:
        assert not w.counters.get("persist_lost"), "it was never to be written"
    assert w.directory.persister.missing() == 0
    assert w.directory.persister.idle


# ---- reads of somebody who left


def reading(leases: int) -> World:
    """Session "a" reads its chunks so many times; few reads end at once."""
    limits = msgspec.structs.replace(NO_CAPS, end_reads_chunks=MANY)
    world = World(4 * MANY, limits=limits)
    world.join("a")
    world.store("a", alone("a", MANY))
    for _ in range(leases):
        world.lookup("a", alone("a", MANY))
    return world


def test_many_reads_end_by_and_by() -> None:
    world = reading(8)
    world.do(ev.PeerClosed(world.peers["a"]))
    session = world.directory.sessions["a"]
    left = [len(session.reads_open)]
    while world.directory.busy:
        world.do(ev.Sweep(1))
        left.append(len(session.reads_open))
    assert 1 < left[0] < 8
    assert all(before - after <= 1 for before, after in pairwise(left))
    assert world.directory.slots.reserved_bytes == 0
    assert not world.directory.sessions, "it holds nothing any more"


def test_a_session_that_comes_back_meanwhile_keeps_its_new_reads() -> None:
    world = reading(4)
    world.do(ev.PeerClosed(world.peers["a"]))
    world.join("a")
    hit = world.lookup("a", alone("a", MANY))
    assert hit.chunks == MANY
    sweep(world)
    assert list(world.directory.sessions["a"].reads_open) == [hit.lease]
    world.end("a", hit.lease)
    assert world.directory.slots.reserved_bytes == 0


def test_a_session_that_comes_back_with_other_rows_holds_nothing() -> None:
    world = reading(4)
    world.do(ev.PeerClosed(world.peers["a"]))
    world.join("a", (row(1), row(2)))
    assert not world.directory.sessions["a"].reads_open
    sweep(world)
    assert world.directory.slots.reserved_bytes == 0
