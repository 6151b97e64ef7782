"""Examples for every promise of the directory; `test_machine.py` tries the combinations."""

import pytest
from tests.core.build import FULL, PAGE, World, alone, chain, row, words

from kvkeep.core import events as ev
from kvkeep.core.directory import Limits
from kvkeep.types import (
    NO_LEASE,
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    GroupKind,
    LeaseId,
    PeerId,
    Reason,
    Role,
    RowSpec,
    SlotState,
    StageOutcome,
)

GRANTED, NO_ROOM = StageOutcome.GRANTED, StageOutcome.NO_ROOM
OVER_CAP, IN_PROGRESS = StageOutcome.OVER_CAP, StageOutcome.IN_PROGRESS
P = chain("a", 4)


def bytes_in(world: World, state: SlotState) -> int:
    return world.directory.slots.bytes_in[state] // PAGE


def two_sessions() -> World:
    world = World(pages=32)
    world.join("s")
    world.join("t")
    return world


# ---- storing


def test_stored_chunks_are_found_in_order() -> None:
    world = two_sessions()
    staged = world.stage("s", P)
    assert staged.outcomes == (GRANTED,) * 4
    assert world.lookup("t", P).chunks == 0, "staged bytes are not readable"
    assert world.commit("s", staged.leases).outcomes == (CommitOutcome.COMMITTED,) * 4
    hit = world.lookup("t", P)
    assert (hit.chunks, hit.reasons) == (4, ())
    assert hit.columns[0].slots == staged.columns[0].slots
    assert hit.columns[0].offsets == staged.columns[0].offsets
    before, after = words(staged.columns[0].generations), words(hit.columns[0].generations)
    assert all(new > old for old, new in zip(before, after, strict=True))


def test_what_another_stores_now_is_in_progress_for_two_seconds() -> None:
    world = two_sessions()
    first = world.stage("s", P, 0, 1)
    assert world.stage("t", P, 0, 1).outcomes == (IN_PROGRESS,)
    assert world.stage("s", P, 0, 1).outcomes == (IN_PROGRESS,)
    world.now_s += 1.999
    assert world.stage("t", P, 0, 1).outcomes == (IN_PROGRESS,)
    world.now_s += 0.001
    second = world.stage("t", P, 0, 1)
    assert second.outcomes == (GRANTED,)
    assert second.columns != first.columns


@pytest.mark.parametrize("loser_first", [True, False])
def test_the_first_publisher_wins_and_the_losers_extent_is_freed(loser_first: bool) -> None:
    world = two_sessions()
    first = world.stage("s", P, 0, 1)
    world.now_s += 2
    second = world.stage("t", P, 0, 1)
    order = [("s", first), ("t", second)]
    (winner, won), (loser, lost) = order[::-1] if loser_first else order
    assert world.commit(winner, won.leases).outcomes == (CommitOutcome.COMMITTED,)
    assert world.commit(loser, lost.leases).outcomes == (CommitOutcome.ALREADY_RESIDENT,)
    hit = world.lookup("s", P[:2])
    assert hit.columns[0].offsets == won.columns[0].offsets
    assert world.directory.arena.free_bytes == 31 * PAGE
    lost_slot = words(lost.columns[0].slots)[0]
    assert world.generations[lost_slot] > words(lost.columns[0].generations)[0]


def test_an_owner_that_gave_up_is_not_waited_for() -> None:
    world = two_sessions()
    world.abort("s", world.stage("s", P, 0, 1).leases)
    assert world.stage("t", P, 0, 1).outcomes == (GRANTED,)
    world.do(ev.PeerClosed(world.peers["t"]))
    assert world.stage("s", P, 0, 1).outcomes == (GRANTED,)


def test_what_is_resident_is_not_stored_again() -> None:
    world = two_sessions()
    world.store("s", P[:3])
    assert world.stage("t", P).outcomes == (StageOutcome.RESIDENT,) * 2 + (GRANTED,) * 2


def test_one_key_twice_in_one_event_is_staged_once() -> None:
    world = two_sessions()
    reply = world.do(ev.Stage("s", (ev.StageItem("r", P[0], P[1] + P[1]),) * 2))
    assert isinstance(reply, ev.Staged)
    assert reply.outcomes == (GRANTED, IN_PROGRESS, IN_PROGRESS, IN_PROGRESS)


def test_aborted_memory_is_free_when_confirmed_and_kept_when_not() -> None:
    world = two_sessions()
    staged = world.stage("s", P)
    assert world.abort("s", staged.leases[:2], confirmed=True) == 2
    assert world.abort("s", staged.leases[2:], confirmed=False) == 2
    assert world.abort("s", staged.leases) == 0
    assert bytes_in(world, SlotState.ORPHANED) == 2
    assert world.commit("s", staged.leases).outcomes == (CommitOutcome.UNKNOWN_LEASE,) * 4
    world.do(ev.PeerGone(world.peers["s"]))
    assert world.directory.arena.free_bytes == 32 * PAGE


def test_nobody_ends_the_writes_of_another_session() -> None:
    world = two_sessions()
    staged = world.stage("s", P)
    assert world.commit("t", staged.leases).outcomes == (CommitOutcome.UNKNOWN_LEASE,) * 4
    assert world.abort("t", staged.leases) == 0
    assert world.commit("s", staged.leases).outcomes == (CommitOutcome.COMMITTED,) * 4


def test_a_consumer_never_gets_a_handle_for_writing() -> None:
    world = World(pages=8)
    world.join("s", writes=False)
    reply = world.stage("s", P)
    assert reply.outcomes == (StageOutcome.READ_ONLY,) * 4
    assert reply.leases == ()


def test_one_rank_that_may_not_write_makes_the_session_read_only() -> None:
    """Its extents could not be proven free of it, so no rank of the session gets any."""
    world = World(pages=8)
    world.join_rank("s", None, 2)
    world.join_rank("s", 0, 2)
    mark = Fingerprint(b"\x01" * 32)
    world.do(ev.Join("s", PeerId(900), Role.WORKER, 1, 2, FULL, mark, writes=False))
    assert world.stage("s", P).outcomes == (StageOutcome.READ_ONLY,) * 4
    world.do(ev.Join("s", PeerId(901), Role.WORKER, 1, 2, FULL, mark, writes=True))
    assert world.stage("s", P).outcomes[0] is GRANTED


# ---- caps


def test_staging_is_capped_for_all_and_for_one_session() -> None:
    limits = Limits(staging_fraction=0.5, session_staging_fraction=0.5)
    world = World(pages=16, limits=limits)
    for name in ("s", "t", "u"):
        world.join(name)
    assert world.stage("s", alone("s", 6)).outcomes == (GRANTED,) * 4 + (OVER_CAP,) * 2
    staged = world.stage("t", alone("t", 4))
    assert staged.outcomes == (GRANTED,) * 4
    assert world.stage("u", alone("u", 1)).outcomes == (OVER_CAP,)
    world.abort("t", staged.leases[:1], confirmed=False)
    assert world.stage("u", alone("u", 1)).outcomes == (OVER_CAP,), "an orphan counts as staged"
    world.commit("t", staged.leases[1:])
    assert world.stage("u", alone("u", 1)).outcomes == (GRANTED,)


def test_reserving_is_capped_and_says_no_room() -> None:
    world = World(pages=8, limits=Limits(staging_fraction=9.0, session_reserve_fraction=0.5))
    for name in ("s", "t"):
        world.join(name)
    prompt = alone("p", 6)
    world.store("s", prompt)
    early = world.lookup("s", prompt, near=False)
    assert (early.chunks, early.lease, early.columns, early.reasons) == (6, NO_LEASE, (), ())
    near = world.lookup("s", prompt)
    assert (near.chunks, near.reasons) == (4, (Reason.NO_ROOM,) * 2)
    again = world.lookup("s", prompt)
    assert again.chunks == 4, "what the session holds already costs nothing more"
    assert world.lookup("t", prompt).chunks == 4
    assert world.lookup("s", prompt[:5], near=False).lease != NO_LEASE
    other = alone("q", 1)
    world.store("s", other)
    assert world.lookup("s", other).reasons == (Reason.NO_ROOM,)


# ---- lookups


def test_a_hole_ends_the_hit_and_what_follows_stays_for_others() -> None:
    world = two_sessions()
    world.store("s", P)
    world.do(ev.Drop("s", P[2]))
    hit = world.lookup("s", P)
    assert (hit.chunks, hit.reasons) == (1, (Reason.CORRUPT, Reason.BEHIND, Reason.BEHIND))
    assert world.resident(P) == [True, False, True, True]
    world.stage("s", P, 1, 2)
    assert world.lookup("s", P).chunks == 1
    world.end("s", hit.lease)


def test_ranks_and_groups_each_have_their_column() -> None:
    world = World(pages=64)
    groups = (row(3), row(1, GroupKind.SLIDING_WINDOW, 2))
    for rank in (None, 0, 1):
        assert isinstance(world.join_rank("s", rank, 2, groups), ev.Joined)
    staged = world.stage("s", P)
    assert len(staged.columns) == 4
    world.commit("s", staged.leases)
    hit = world.lookup("s", P)
    assert hit.chunks == 4
    assert [c.offsets for c in hit.columns] == [c.offsets for c in staged.columns]
    offsets = [offset for column in hit.columns for offset in words(column.offsets)]
    assert len(set(offsets)) == 16


@pytest.mark.parametrize(
    ("rows", "dropped", "hit", "holes"),
    [
        ((row(1, GroupKind.SLIDING_WINDOW, 2),), 1, 4, [0]),
        ((row(1, GroupKind.SLIDING_WINDOW, 2),), 2, 4, [1]),
        ((row(1, GroupKind.SLIDING_WINDOW, 2),), 3, 2, []),
        ((row(1, GroupKind.RECURRENT),), 3, 4, [2]),
        ((row(1, GroupKind.RECURRENT),), 4, 3, []),
        ((row(1, GroupKind.SLIDING_WINDOW, 2), row(1, GroupKind.RECURRENT)), 1, 4, [0]),
        ((row(1), row(1, GroupKind.RECURRENT)), 2, 1, []),
    ],
)
def test_rows_without_full_attention_hit_over_a_hole(
    rows: tuple[RowSpec, ...], dropped: int, hit: int, holes: list[int]
) -> None:
    """Chunk c's handle stands at position c, whatever is missing before it."""
    world = World(pages=16)
    world.join("s", rows)
    staged = world.stage("s", P)
    world.commit("s", staged.leases)
    world.do(ev.Drop("s", P[dropped]))
    found = world.lookup("s", P)
    assert found.chunks == hit
    for mine, written in zip(found.columns, staged.columns, strict=True):
        expected = words(written.offsets)[:hit]
        slots = words(written.slots)[:hit]
        for hole in holes:
            expected[hole], slots[hole] = 0, ev.NO_SLOT
        assert (words(mine.offsets), words(mine.slots)) == (expected, slots)
        assert len(words(mine.generations)) == hit
    world.end("s", found.lease)


def test_a_capped_hit_over_a_hole_is_usable_at_its_new_length() -> None:
    """Recurrent state: a length is only usable if the chunk that ends there is resident."""
    world = World(pages=8, limits=Limits(staging_fraction=9.0, session_reserve_fraction=0.25))
    world.join("s", (row(1, GroupKind.RECURRENT),))
    prompt = alone("p", 6)
    world.store("s", prompt)
    world.do(ev.Drop("s", prompt[3]))
    hit = world.lookup("s", prompt)
    assert hit.chunks == 2
    assert hit.reasons == (Reason.NO_ROOM,) * 4


def test_a_key_of_another_layout_is_never_served() -> None:
    world = World(pages=32)
    world.join("s")
    world.join("wide", (row(2),))
    world.store("s", P[:3])
    hit = world.lookup("wide", P)
    assert (hit.chunks, hit.reasons) == (0, (Reason.LAYOUT_MISMATCH,) * 4)
    staged = world.stage("wide", P)
    assert staged.outcomes == (StageOutcome.LAYOUT_MISMATCH,) * 2 + (GRANTED,) * 2


def test_usage_is_counted_per_salt() -> None:
    world = World(pages=32)
    world.join("s")
    mine = chain("a", 3, "tenant")
    world.store("s", mine, salt="tenant")
    world.store("s", P)
    assert world.directory.residents.usage_bytes == {"tenant": 3 * PAGE, None: 4 * PAGE}
    assert world.lookup("s", mine, salt="tenant").chunks == 3
    world.do(ev.Drop("s", mine[1]))
    assert world.directory.residents.usage_bytes["tenant"] == 3 * PAGE, "still being read"
    world.do(ev.Clear(force=True))
    assert world.directory.residents.usage_bytes == {}


# ---- readers


def test_a_part_ends_once() -> None:
    world = World(pages=8)
    for rank in (None, 0, 1):
        world.join_rank("s", rank, 2)
    world.commit("s", world.stage("s", P).leases)
    hit = world.lookup("s", P)
    assert world.end("s", hit.lease, (0,)) == 1
    assert world.end("s", hit.lease, (0,)) == 0
    assert world.directory.slots.reserved_bytes == 4 * PAGE
    assert world.end("s", hit.lease, (0, 1, 2), EndOutcome.FAILED) == 1
    assert world.end("s", hit.lease, (1,)) == 0
    assert world.end("t", hit.lease, (0,)) == 0
    assert world.end("s", LeaseId(12345), (0,)) == 0
    assert world.directory.slots.reserved_bytes == 0
    assert world.counters["end_again"] == 1 + 2 + 3
    assert (world.counters["ended_used"], world.counters["ended_failed"]) == (1, 1)


def test_dropped_bytes_stay_until_the_last_reader_ends() -> None:
    world = two_sessions()
    world.store("s", P)
    hits = [world.lookup(name, P) for name in ("s", "t")]
    assert world.do(ev.Drop("s", b"".join(P[1:]))) == ev.Done(4)
    assert world.lookup("s", P).reasons == (Reason.CORRUPT,) * 4
    assert world.do(ev.Drop("s", b"".join(P[1:]))) == ev.Done(0)
    world.store("s", P)
    assert bytes_in(world, SlotState.RESIDENT) == 8, "old bytes are read, new ones are found"
    world.end("s", hits[0].lease)
    assert bytes_in(world, SlotState.RESIDENT) == 8
    world.end("t", hits[1].lease)
    assert bytes_in(world, SlotState.RESIDENT) == 4


def test_only_members_drop() -> None:
    world = two_sessions()
    world.store("s", P)
    assert world.do(ev.Drop("stranger", b"".join(P[1:]))) == ev.Done(0)
    assert world.lookup("s", P).chunks == 4


def test_clear_spares_what_is_read_unless_forced() -> None:
    world = two_sessions()
    world.store("s", P)
    hit = world.lookup("t", P[:3])
    assert world.do(ev.Clear()) == ev.Done(4)
    assert world.resident(P) == [False] * 4
    assert bytes_in(world, SlotState.RESIDENT) == 2
    assert world.do(ev.Clear(force=True)) == ev.Done(0)
    assert world.effects == [ev.LeaseRevoked("t", hit.lease)]
    assert bytes_in(world, SlotState.RESIDENT) == 0


def test_only_reads_that_can_be_recomputed_are_revoked() -> None:
    world = World(pages=8)
    world.join("s")
    world.join("keeps", recompute=False)
    world.store("s", P)
    hit, kept = world.lookup("s", P), world.lookup("keeps", P)
    assert world.do(ev.Revoke(kept.lease)) == ev.Done(0)
    assert world.effects == []
    assert world.do(ev.Revoke(hit.lease)) == ev.Done(1)
    assert world.effects == [ev.LeaseRevoked("s", hit.lease)]
    assert world.do(ev.Revoke(hit.lease)) == ev.Done(0)
    assert world.end("s", hit.lease) == 0
    world.do(ev.Clear(force=True))
    assert bytes_in(world, SlotState.RESIDENT) == 4, "the other session still reads"
    assert world.end("keeps", kept.lease) == 1
    assert bytes_in(world, SlotState.RESIDENT) == 0
