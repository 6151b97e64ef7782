"""What leaves L1 when room is wanted: order, protection, and memory recovered across sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.build import PAGE, World, alone, chain, row

from kvkeep.core import events as ev
from kvkeep.core.directory import Limits
from kvkeep.types import Reason, RowSpec, StageOutcome

GRANTED, NO_ROOM = StageOutcome.GRANTED, StageOutcome.NO_ROOM


# ---- order


def test_a_chunk_goes_before_its_ancestors() -> None:
    world = World(pages=8)
    world.join("s")
    old = chain("a", 8)
    world.store("s", old)
    for number in range(8):
        assert world.store("s", chain(f"{number}", 1)) == [GRANTED]
        left = world.resident(old)
        assert left == [True] * (7 - number) + [False] * (number + 1)


def test_the_leaf_used_longest_ago_goes_first() -> None:
    world = World(pages=4)
    world.join("s")
    prompts = {name: chain(name, 1) for name in "abcd"}
    for prompt in prompts.values():
        world.store("s", prompt)
    world.touch("s", prompts["a"])
    world.store("s", prompts["c"])  # storing what is there is a use too
    for number, gone in enumerate("bdac"):
        assert world.resident(prompts[gone]) == [True]
        world.store("s", chain(f"{number}", 1))
        assert world.resident(prompts[gone]) == [False]


def test_a_branch_keeps_the_shared_prefix() -> None:
    world = World(pages=6)
    world.join("s")
    one, other = chain("xa", 4), chain("xb", 2)  # share the first chunk
    world.store("s", one)
    world.store("s", other)
    world.touch("s", other)
    for number in range(4):
        world.store("s", chain(f"{number}", 1))
    # the three suffix chunks of the older branch went, then the newest one-chunk prompts
    assert world.resident(one) == [True, False, False, False]
    assert world.resident(other)[0]


@given(st.lists(st.tuples(st.text("ab", min_size=1, max_size=6), st.integers(1, 6)), max_size=25))
def test_no_resident_chunk_ever_lost_its_parent(prompts: list[tuple[str, int]]) -> None:
    """Same sizes, any order of stores: what is resident is always a set of whole prefixes."""
    world = World(pages=7)
    world.join("s")
    for name, chunks in prompts:
        world.store("s", chain(name, chunks))
        index = world.directory.residents.index
        roots = {chain("a", 0)[0]}
        assert all(chunk.parent in index or chunk.parent in roots for chunk in index.values())


@pytest.mark.parametrize("spare_pages", [0, 1])
def test_groups_of_two_sizes_lose_whole_suffixes_too(spare_pages: int) -> None:
    """One layout with a small and a large row: the leaf alone makes room for either.

    With a page to spare, only the large row asks for room.
    """
    world = World(pages=32 + spare_pages)
    world.join("s", (row(1), row(3)))
    old = chain("a", 8)
    world.store("s", old)
    for number in range(7):
        assert world.store("s", chain(f"{number}", 1)) == [GRANTED]
        assert world.resident(old) == [True] * (7 - number) + [False] * (number + 1)


def test_evicted_chunks_are_remembered_as_evicted() -> None:
    world = World(pages=1)
    world.join("s")
    world.store("s", chain("a", 1))
    world.store("s", chain("b", 1))
    assert world.lookup("s", chain("a", 1)).reasons == (Reason.EVICTED,)
    assert world.lookup("s", chain("c", 1)).reasons == (Reason.NEVER_STORED,)
    world.store("s", chain("a", 1))
    assert world.lookup("s", chain("a", 1)).chunks == 1
    assert world.directory.residents.evicted_chunks == 2


def test_often_used_chunks_are_queued_once() -> None:
    """A hot prompt does not crowd the queue of candidates, so cold ones are still found."""
    world = World(pages=10)
    world.join("s")
    hot = chain("h", 1)
    world.store("s", hot)
    for _ in range(50):
        world.touch("s", hot)
    assert len(vars(world.directory.residents.policy)["_candidates"]) == 1
    cold = [chain(f"{number}", 1) for number in range(9)]
    for prompt in cold:
        world.store("s", prompt)
    world.touch("s", hot)
    for number in range(9):
        world.store("s", chain(chr(ord("a") + number), 1))
        assert world.resident(hot) == [True]


# ---- protection


def test_the_parent_of_a_staged_child_is_not_evicted_for_it() -> None:
    world = World(pages=1)
    world.join("s")
    prompt = chain("a", 2)
    world.store("s", prompt[:2])
    staged = world.stage("s", prompt, 1, 2)
    assert staged.outcomes == (NO_ROOM,)
    assert world.resident(prompt) == [True, False]


def test_a_prompt_larger_than_l1_keeps_its_beginning() -> None:
    world = World(pages=6)
    world.join("s")
    prompt = chain("a", 20)
    assert world.store("s", prompt) == [GRANTED] * 6 + [NO_ROOM]
    assert world.touch("s", prompt) == 6


def test_a_long_prompt_staged_in_one_step_keeps_its_beginning_too() -> None:
    world = World(pages=6)
    world.join("s")
    world.store("s", chain("old", 3))
    prompt = chain("a", 20)
    first = world.stage("s", prompt, 0, 3)
    world.commit("s", first.leases)
    rest = world.stage("s", prompt, 3)
    assert rest.outcomes == (GRANTED,) * 3 + (NO_ROOM,) * 14
    world.commit("s", rest.leases)
    assert world.touch("s", prompt) == 6


def test_a_mixed_window_spares_the_ancestors_as_well() -> None:
    """Larger chunks of the same prefix evict around it, through a chunk that is still staged."""
    world = World(pages=8)
    world.join("s")
    prompt = chain("a", 4)
    world.store("s", prompt[:3])
    staged = world.stage("s", prompt, 2, 3)
    world.join("big", (row(4),))
    others = [chain(f"{number}", 1) for number in range(5)]
    for other in others:
        world.store("s", other)
    # The big session continues the same prompt (its keys say so): room beside it is what it gets.
    big = world.stage("big", prompt, 3, 4)
    assert world.resident(prompt[:3]) == [True, True]
    assert big.outcomes == (GRANTED,)
    assert sum(world.resident(other) == [True] for other in others) == 1
    assert staged.leases[0] in world.directory.sessions["s"].writes_open


def test_reserved_chunks_are_never_evicted() -> None:
    world = World(pages=4)
    world.join("s")
    world.store("s", chain("a", 4))
    hit = world.lookup("s", chain("a", 3))
    assert world.store("s", chain("b", 2)) == [GRANTED, NO_ROOM]
    assert world.resident(chain("a", 4)) == [True, True, True, False]
    world.end("s", hit.lease)
    assert world.store("s", chain("c", 2)) == [GRANTED, GRANTED]


def test_staged_chunks_are_never_evicted() -> None:
    world = World(pages=4)
    world.join("s")
    staged = world.stage("s", chain("a", 4))
    assert world.stage("s", chain("b", 1)).outcomes == (NO_ROOM,)
    world.commit("s", staged.leases)
    assert world.stage("s", chain("b", 1)).outcomes == (GRANTED,)


# ---- sizes

A_SIZES = ((row(1),), (row(2),), (row(3), row(1)), (row(5),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("b_rows", "pages"),
    [
        ((row(7),), 2048),
        ((row(1),), 512),
        ((row(2),), 1024),
        ((row(6), row(3)), 2048),
        ((row(20),), 2048),
    ],
)
def test_after_a_shift_of_the_mix_the_new_size_has_the_memory(
    b_rows: tuple[RowSpec, ...], pages: int
) -> None:
    """Four sizes side by side, then one that is larger or smaller: it wins every slab back."""
    world = World(pages=pages, check_every=50)
    for number, rows in enumerate(A_SIZES):
        world.join(f"a{number}", rows)
    for step in range(pages // 3):
        number = step % len(A_SIZES)
        world.store(f"a{number}", alone(f"{step}", 5))
    assert world.directory.arena.free_bytes < 20 * PAGE
    world.join("b", b_rows)
    chunk_bytes = world.directory.sessions["b"].chunk_bytes
    could = world.directory.arena.populated_bytes // chunk_bytes
    most = 0
    for step in range(8 * could):  # turnovers of the cache
        assert world.store("b", alone(f"b {step}")) == [GRANTED]
        if step % 7 == 0:
            sizes = [c.size_bytes for c in world.directory.residents.index.values()]
            most = max(most, sizes.count(chunk_bytes))
        if most >= 0.97 * could:
            break
    assert most >= 0.97 * could


def test_gaps_are_won_back_at_the_cost_of_cold_chunks_only() -> None:
    """Six one-page gaps between two-page chunks: the coldest beside them go, a warm one stays."""
    world = World(pages=18)
    world.join("two", (row(2),))
    world.join("one")
    for name in "abcdef":
        world.store("two", alone(name))
        world.store("one", alone(name + " gap"))
    for name in "abcdef":
        world.do(ev.Drop("one", alone(name + " gap")[1]))
        world.touch("two", alone(name))
    assert world.directory.arena.free_bytes == 6 * PAGE
    assert world.directory.arena.largest_free_bytes() == PAGE
    assert world.store("two", alone("new 1")) == [GRANTED]
    assert world.directory.residents.evicted_chunks == 2
    assert [world.resident(alone(name)) for name in "def"] == [[True]] * 3
    for number in (2, 3):
        assert world.store("two", alone(f"new {number}")) == [GRANTED]
    assert world.directory.residents.evicted_chunks == 2, "one more chunk than before fits"


def test_a_warm_neighbour_is_not_given_for_gaps() -> None:
    world = World(pages=6)
    world.join("two", (row(2),))
    world.join("one")
    order = [("one", "gap 1"), ("two", "cold"), ("two", "warm"), ("one", "gap 2")]
    for session, name in order:
        world.store(session, alone(name))
    for name in ("gap 1", "gap 2"):
        world.do(ev.Drop("one", alone(name)[1]))
    for _ in range(3):
        world.touch("two", alone("warm"))
    assert world.store("two", alone("new")) == [GRANTED]
    assert world.resident(alone("warm")) == [True]
    assert world.directory.residents.evicted_chunks == 1


def test_only_what_may_not_move_can_refuse_and_it_says_the_largest_run() -> None:
    world = World(pages=9)
    world.join("s")
    for name in "abcdefghi":
        world.store("s", chain(name, 1))
    index = world.directory.residents.index
    by_page = {world.directory.slots.offset[c.rows[0]] // PAGE: c.hash for c in index.values()}
    middle = [by_page[0], by_page[4]]  # read at pages 0 and 4: runs of 3 and 4 pages may move
    hits = [world.do(ev.Lookup("s", "r", h)) for h in middle]
    world.join("b", (row(5),))
    refused = world.stage("b", chain("z", 1))
    assert refused.outcomes == (NO_ROOM,)
    assert len(index) == 9, "a refusal evicts nothing"
    assert refused.largest_free_bytes == 0
    world.join("c", (row(4),))
    assert world.stage("c", chain("y", 1)).outcomes == (GRANTED,)
    assert len(index) == 5
    assert all(isinstance(hit, ev.Hit) and hit.chunks == 1 for hit in hits)


def test_any_idle_chunk_is_tried_when_the_coldest_ones_lead_nowhere() -> None:
    """Ten cold leaves sit between read neighbours; a warm pair makes the room."""
    world = World(pages=24)
    world.join("s")
    for number in range(24):
        world.store("s", chain(chr(ord("A") + number), 1))
    index = world.directory.residents.index
    by_page = {world.directory.slots.offset[c.rows[0]] // PAGE: c.hash for c in index.values()}
    for page in range(1, 22, 2):
        world.do(ev.Lookup("s", "r", by_page[page]))
    for page in (22, 23):
        hit = world.do(ev.Lookup("s", "r", by_page[page]))
        assert isinstance(hit, ev.Hit)
        world.end("s", hit.lease)
    world.join("b", (row(2),))
    assert world.stage("b", chain("z", 1)).outcomes == (GRANTED,)
    assert by_page[22] not in index or by_page[23] not in index


def test_running_out_of_slots_evicts_as_well() -> None:
    world = World(pages=100, slots=4)
    world.join("s")
    assert world.store("s", chain("a", 4)) == [GRANTED] * 4
    assert world.store("s", chain("b", 2)) == [GRANTED] * 2
    assert world.resident(chain("a", 4)) == [True, True, False, False]


def test_running_out_of_slots_and_memory_at_once_is_recovered_too() -> None:
    world = World(pages=4, slots=4)
    world.join("s")
    world.store("s", chain("a", 4))
    world.join("big", (row(3),))
    assert world.store("big", chain("b", 1)) == [GRANTED]


@pytest.mark.slow
def test_the_queue_of_candidates_stays_small() -> None:
    """Chunks that were dropped leave the policy's queue even if nothing is ever evicted."""
    world = World(pages=64, limits=Limits())
    world.join("s")
    for step in range(400):
        world.store("s", alone(f"{step}", 4))
        world.do(ev.Clear())
    policy = world.directory.residents.policy
    assert len(vars(policy)["_candidates"]) == 0
