"""What comes late does no harm: a notice for memory that has long been somebody else's."""

from tests.core.build import FULL, PAGE, World, alone, words

from kvkeep.core import events as ev
from kvkeep.types import CommitOutcome, Fingerprint, PeerId, Role, SlotState, StageOutcome

A, B = alone("a"), alone("b")


def one_page() -> World:
    """Room for one chunk, and sessions that want it; only the reads of `s` may be taken back."""
    world = World(pages=1)
    for name in ("s", "t", "u"):
        world.join(name, recompute=name == "s")
    return world


def test_a_commit_after_an_abort_does_not_publish_the_next_writers_bytes() -> None:
    world = one_page()
    first = world.stage("s", A)
    assert world.abort("s", first.leases) == 1
    second = world.stage("t", B)  # the same extent; its bytes are not written yet
    assert second.columns[0].offsets == first.columns[0].offsets
    assert world.commit("s", first.leases).outcomes == (CommitOutcome.UNKNOWN_LEASE,)
    assert world.resident(A) == world.resident(B) == [False]
    assert world.abort("s", first.leases) == 0
    assert world.directory.slots.bytes_in[SlotState.STAGING] == PAGE, "still the second writer's"
    assert world.commit("t", second.leases).outcomes == (CommitOutcome.COMMITTED,)
    assert world.lookup("s", B).chunks == 1


def test_releasing_twice_does_not_end_another_readers_hold() -> None:
    world = one_page()
    world.store("s", A)
    once, twice = world.lookup("u", A), world.lookup("t", A)
    assert world.end("t", twice.lease) == 1
    assert world.end("t", twice.lease) == 0
    assert world.end("t", once.lease) == 0, "a lease is known in its own session only"
    assert world.stage("s", B).outcomes == (StageOutcome.NO_ROOM,), "it is still being read"
    assert world.end("u", once.lease) == 1
    assert world.stage("s", B).outcomes == (StageOutcome.GRANTED,)


def test_a_release_after_a_revoke_does_not_end_the_next_readers_hold() -> None:
    world = one_page()
    world.store("s", A)
    revoked = world.lookup("s", A)
    before = words(revoked.columns[0].generations)[0]
    world.do(ev.Clear(force=True))
    assert world.effects == [ev.LeaseRevoked("s", revoked.lease)]
    world.store("t", B)  # into the same extent
    reading = world.lookup("u", B)
    assert reading.columns[0].slots == revoked.columns[0].slots
    assert words(reading.columns[0].generations)[0] > before, "the revoked reader notices"
    assert world.end("s", revoked.lease) == 0
    assert world.counters["end_again"] == 1
    assert world.stage("s", A).outcomes == (StageOutcome.NO_ROOM,), "it is still being read"
    assert world.end("u", reading.lease) == 1


def test_a_connection_that_comes_back_cannot_end_or_publish_what_it_lost() -> None:
    """The same process, the same session, the same epoch: its leases ended with the connection."""
    world = World(pages=2)
    old = world.join("s")
    world.store("s", A)
    staged, hit = world.stage("s", B), world.lookup("s", A)
    world.do(ev.PeerClosed(old))
    assert world.directory.slots.bytes_in[SlotState.ORPHANED] == PAGE
    mark = Fingerprint(b"f" * 32)
    world.do(ev.Join("s", PeerId(77), Role.BOTH, 0, 1, FULL, mark))
    assert world.commit("s", staged.leases).outcomes == (CommitOutcome.UNKNOWN_LEASE,)
    assert world.end("s", hit.lease) == 0
    assert world.resident(B) == [False]
    assert world.directory.slots.bytes_in[SlotState.ORPHANED] == PAGE, "it may still be writing"
    world.do(ev.PeerGone(old))
    assert world.directory.slots.bytes_in[SlotState.ORPHANED] == 0


def test_two_writers_of_one_key_of_which_one_dies() -> None:
    world = World(pages=2)
    dies = world.join("s")
    world.join("t")
    world.stage("s", A)
    world.now_s += 2.0
    second = world.stage("t", A)
    assert second.outcomes == (StageOutcome.GRANTED,), "not held up by the first for ever"
    world.do(ev.PeerGone(dies))
    assert world.directory.slots.bytes_in[SlotState.STAGING] == PAGE
    assert world.commit("t", second.leases).outcomes == (CommitOutcome.COMMITTED,)
    assert world.lookup("t", A).chunks == 1
    assert world.directory.arena.free_bytes == PAGE


def test_nothing_ends_because_time_passes() -> None:
    """Neither what is staged, orphaned or reserved, nor an idle engine's place."""
    world = World(pages=3)
    for name in ("s", "t", "u"):
        world.join(name, recompute=False)
    gone = world.join("gone")
    world.store("s", A)
    hit, staged = world.lookup("s", A), world.stage("t", B)
    world.stage("gone", alone("c"))
    world.do(ev.PeerClosed(gone))
    for _ in range(100):
        world.now_s += 3600.0
        world.do(ev.Tick())
    assert world.directory.slots.reserved_bytes == PAGE
    assert world.directory.slots.bytes_in[SlotState.STAGING] == PAGE
    assert world.directory.slots.bytes_in[SlotState.ORPHANED] == PAGE
    assert world.stage("u", alone("d")).outcomes == (StageOutcome.NO_ROOM,)
    assert world.commit("t", staged.leases).outcomes == (CommitOutcome.COMMITTED,)
    assert world.lookup("u", B).chunks == 1
    assert world.end("s", hit.lease) == 1
