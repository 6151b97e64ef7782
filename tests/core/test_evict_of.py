"""Room for one salt out of its own chunks, and how much one call may look at."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.build import PAGE, World, alone, chain, row

from kvkeep.core import events as ev
from kvkeep.core import eviction
from kvkeep.core.eviction import Chunk, PrefixLRU
from kvkeep.core.resident import Residents
from kvkeep.types import ChunkHash, StageOutcome


def stored(world: World, salt: str | None, name: str, chunks: int) -> list[ChunkHash]:
    """A prompt of this salt's."""
    prompt = chain(name, chunks, salt)
    world.store("s", prompt, salt=salt)
    return prompt


def two_tenants() -> World:
    world = World(pages=64)
    world.join("s")
    return world


def test_the_coldest_of_the_salt_go_and_a_chunk_before_its_ancestors() -> None:
    world = two_tenants()
    residents = world.directory.residents
    residents.policy.limit("a")
    others = stored(world, "b", "oldest", 4)
    cold, warm = stored(world, "a", "c", 3), stored(world, "a", "w", 3)
    world.touch("s", cold)
    assert residents.evict_of("a", 2 * PAGE, ())
    assert world.resident(warm) == [True, False, False]
    assert residents.evict_of("a", 2 * PAGE, ())
    assert world.resident(warm) == [False, False, False]
    assert world.resident(cold) == [True, True, False]
    assert all(world.resident(others))
    assert residents.evicted_chunks == 4


def test_all_or_nothing() -> None:
    world = two_tenants()
    residents = world.directory.residents
    prompt = stored(world, "a", "c", 3)
    assert not residents.evict_of("a", 3 * PAGE + 1, ())
    assert not residents.evict_of("nobody", 1, ())
    assert all(world.resident(prompt))
    assert residents.evict_of("a", 3 * PAGE, ())
    assert not any(world.resident(prompt))
    assert residents.evict_of("a", 0, ())


def test_what_is_read_or_protected_stays() -> None:
    world = two_tenants()
    residents = world.directory.residents
    prompt = stored(world, "a", "xy", 3)
    branch = stored(world, "a", "xz", 3)  # shares the first chunk
    assert not residents.evict_of("a", 4 * PAGE, {prompt[3]})
    hit = world.lookup("s", branch)
    assert not residents.evict_of("a", 3 * PAGE, ())
    assert residents.evict_of("a", 2 * PAGE, ())
    assert world.resident(prompt) == [True, False, False]
    assert not residents.evict_of("a", PAGE, ())
    world.end("s", hit.lease)
    assert residents.evict_of("a", PAGE, {branch[2]})
    assert world.resident(branch) == [True, True, False]


def test_no_salt_is_a_tenant_too() -> None:
    world = two_tenants()
    stored(world, "a", "c", 3)
    mine = stored(world, None, "c", 2)
    assert world.directory.residents.evict_of(None, 2 * PAGE, ())
    assert not any(world.resident(mine))
    assert not world.directory.residents.evict_of(None, 1, ())


@pytest.mark.parametrize("own", [1, 9])
def test_chunks_from_before_the_limit_are_found_by_and_by(
    monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    monkeypatch.setattr(eviction, "_CATCH_UP", 5)
    monkeypatch.setattr(eviction, "_CATCH_UP_OWN", own)
    world = two_tenants()
    residents = world.directory.residents
    for number in range(12):
        world.store("s", alone(f"b {number}"), salt="b")
    old = stored(world, "a", "old", 1) + stored(world, "a", "x", 1)[1:]
    residents.policy.limit("a")
    new = stored(world, "a", "new", 1)
    assert residents.evict_of("a", PAGE, ()), "what came later is known at once"
    assert not any(world.resident(new))
    tries = 1
    while not residents.evict_of("a", 2 * PAGE, ()):
        tries += 1
        assert tries < 5
    assert not any(world.resident(old))
    assert len(residents.index) == 12


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_evict_of_against_its_words(data: st.DataObject) -> None:
    """Whatever happened before: victims are the salt's, suffixes first, and no more than due."""
    world = World(pages=24, check_every=4)
    world.join("s")
    residents = world.directory.residents
    reads = []
    for _ in range(data.draw(st.integers(1, 14))):
        salt = data.draw(st.sampled_from(["a", "b"]))
        prompt = chain(
            data.draw(st.text("xy", min_size=1, max_size=3)), data.draw(st.integers(1, 4)), salt
        )
        step = data.draw(st.sampled_from(["store", "store", "read", "end", "limit", "evict"]))
        if step == "store":
            world.store("s", prompt, salt=salt)
        elif step == "read" and (hit := world.lookup("s", prompt)).lease:
            reads.append(hit.lease)
        elif step == "end" and reads:
            world.end("s", reads.pop())
        elif step == "limit":
            residents.policy.limit(salt)
        elif step == "evict":
            need = data.draw(st.integers(1, 6)) * PAGE
            before = {c.hash: c for c in residents.index.values()}
            could = sum(PAGE for c in before.values() if c.salt == salt and removable(c, residents))
            done = residents.evict_of(salt, need, ())
            gone = [c for key, c in before.items() if key not in residents.index]
            assert done == (could >= need)
            assert sum(c.size_bytes for c in gone) == (need if done else 0)
            assert all(c.salt == salt for c in gone)
            index = residents.index
            roots = {chain("x", 0, s)[0] for s in "ab"}
            assert all(c.parent in index or c.parent in roots for c in index.values())
        world.do(ev.Tick())


def removable(chunk: Chunk, residents: Residents) -> bool:
    """Nobody reads it, or anything that follows it."""
    after = [c for c in residents.index.values() if c.parent == chunk.hash]
    return residents.idle(chunk) and all(removable(c, residents) for c in after)


def test_a_salt_that_has_left_is_no_longer_kept() -> None:
    world = two_tenants()
    policy = world.directory.residents.policy
    for number in range(30):
        policy.limit(f"{number}")
        stored(world, f"{number}", "p", 2)
    assert len(vars(policy)["_salts"]) == 30
    world.do(ev.Clear())
    assert not vars(policy)["_salts"]


# ---- what one call looks at


class Counted(PrefixLRU):
    """Counts how many chunks are asked about."""

    looks = 0

    def evict(self, bytes_needed: int, space: Any) -> list[Chunk]:
        idle = space.idle

        def counted(chunk: Chunk) -> bool:
            self.looks += 1
            return bool(idle(chunk))

        space.idle = counted
        try:
            return super().evict(bytes_needed, space)
        finally:
            del space.idle


def test_chunks_that_are_read_cost_a_store_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty old prompts are being read: a store looks at some, the next ones never again."""
    monkeypatch.setattr(eviction, "_LOOK", 16)
    world = World(pages=48)
    policy = world.directory.residents.policy = Counted()
    world.join("s")
    prompts = [alone(f"{number}") for number in range(48)]
    for prompt in prompts:
        world.store("s", prompt)
    leases = [world.lookup("s", prompt).lease for prompt in prompts[:40]]
    for prompt in prompts[40:]:
        world.touch("s", prompt)
    outcomes = []
    for number in range(6):
        before = policy.looks
        outcomes += world.store("s", alone(f"new {number}"))
        assert policy.looks - before <= 16 + 8
    assert outcomes[-1] is StageOutcome.GRANTED
    world.end("s", leases[0])
    assert world.directory.residents.idle(world.directory.residents.index[prompts[0][1]])


def test_a_large_arena_is_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cold chunks lead nowhere, each call goes on where the last one stopped."""
    monkeypatch.setattr("kvkeep.core.resident._LOOK", 4)
    world = World(pages=64)
    world.join("s")
    for number in range(64):
        world.store("s", alone(f"{number}"))
    index, offset = world.directory.residents.index, world.directory.slots.offset
    by_page = {offset[c.rows[0]] // PAGE: c.hash for c in index.values()}
    for page in range(1, 62, 2):
        world.do(ev.Lookup("s", "r", by_page[page]))
    for page in (60, 62, 63):  # 62 and 63 may move together, and are the warmest
        hit = world.do(ev.Lookup("s", "r", by_page[page]))
        assert isinstance(hit, ev.Hit)
        world.end("s", hit.lease)
    world.join("b", (row(2),))
    tries = 1
    while world.stage("b", chain("z", 1)).outcomes != (StageOutcome.GRANTED,):
        tries += 1
        assert tries < 64
    assert tries > 1, "all of it was looked at in one call"
    assert by_page[62] not in index
