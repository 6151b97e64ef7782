"""What finds chunks among a million: the index, the counts of absent parents, the candidates."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.build import PAGE, World, alone, chain, row

from kvkeep.core import candidates
from kvkeep.core import events as ev
from kvkeep.core.candidates import Candidates
from kvkeep.core.eviction import Chunk
from kvkeep.core.index import SHARDS, AbsentParents, ChunkIndex
from kvkeep.types import ChunkHash, Fingerprint, Namespace, SlotId

ROOT = ChunkHash(bytes(32))
HASHES = st.builds(
    lambda first, rest: ChunkHash(bytes([first, rest]) * 16), st.integers(0, 3), st.integers(0, 5)
)


def chunk(key: ChunkHash = ROOT, last_use: int = 0) -> Chunk:
    made = Chunk(
        key,
        ROOT,
        rows=(SlotId(0),),
        specs=(row(1),),
        size_bytes=PAGE,
        space=Namespace(Fingerprint(bytes(32))),
    )
    made.last_use = last_use
    return made


# ---- by hash


@given(st.lists(st.tuples(st.booleans(), HASHES)))
def test_the_index_is_a_mapping(steps: list[tuple[bool, ChunkHash]]) -> None:
    index, model = ChunkIndex(), dict[ChunkHash, Chunk]()
    for puts, key in steps:
        if puts:
            index[key] = model[key] = chunk(key)
        elif key in model:
            del index[key], model[key]
        assert (key in index) == (key in model)
        assert index.get(key) is model.get(key)
        assert len(index) == len(model)
    assert set(index) == set(model)
    assert set(index.values()) == set(model.values())
    asked = [key for _, key in steps]
    assert index.find(asked) == [model.get(key) for key in asked]
    assert [index[key] for key in model] == list(model.values())


def test_no_shard_is_much_larger_than_the_others() -> None:
    index = ChunkIndex()
    for number in range(SHARDS * 16):
        key = alone(str(number))[1]
        index[key] = chunk(key)
    assert max(map(len, index.shards)) < 3 * 16


def test_what_is_not_there() -> None:
    index = ChunkIndex()
    assert index.get(ChunkHash(b"")) is None
    assert ChunkHash(b"") not in index
    with pytest.raises(KeyError):
        del index[ROOT]
    assert len(index) == 0


@given(st.lists(st.tuples(st.sampled_from("aard"), HASHES | st.just(ChunkHash(b"")))))
def test_children_of_absent_parents_are_counted(steps: list[tuple[str, ChunkHash]]) -> None:
    absent, model = AbsentParents(), dict[ChunkHash, int]()
    for step, key in steps:
        if step == "a":
            absent.add(ChunkHash(bytes(key)))
            model[key] = model.get(key, 0) + 1
            assert absent.name(ChunkHash(bytes(key))) is absent.name(key)
        elif step == "r" and key in model:
            absent.remove(key)
            model[key] -= 1
        elif step == "d":
            assert absent.pop(key) == model.pop(key, 0)
        model = {parent: children for parent, children in model.items() if children}
        assert dict(absent) == model


# ---- by use


@settings(max_examples=25)
@given(st.data())
def test_candidates_stay_sorted(data: st.DataObject) -> None:
    """Blocks of four: every way to split, join and empty one is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "BLOCK", 4)
        some, model = Candidates(), dict[int, Chunk]()
        for _ in range(data.draw(st.integers(0, 90))):
            use = data.draw(st.integers(1, 60))
            if use in model:
                assert model[use] in some
                some.remove(model.pop(use))
            else:
                assert chunk(last_use=use) not in some
                model[use] = chunk(last_use=use)
                some.add(model[use])
            assert len(some) == len(model)
            order = [model[u] for u in sorted(model)]
            assert list(some.after(0)) == order
            after, most = data.draw(st.integers(0, 61)), data.draw(st.integers(1, 9))
            warmer = [c for c in order if c.last_use > after]
            assert list(some.after(after)) == warmer
            assert some.part(after, most) == warmer[:most]


def test_the_one_just_yielded_may_leave() -> None:
    some = Candidates()
    for use in range(1, 3 * candidates.BLOCK):
        some.add(chunk(last_use=use))
    for one in some.after(0):
        some.remove(one)
    assert len(some) == 0


# ---- what chunks share


def test_bytes_that_many_chunks_have_are_kept_once() -> None:
    """A parent's hash, the root of all prompts, and the namespace."""
    world = World(pages=8)
    world.join("s")
    for name in "abc":
        hashes = [ChunkHash(bytes(bytearray(h))) for h in chain(name, 2, "salt " + "x" * 30)]
        world.store("s", hashes, salt="salt " + "x" * 30)
    index = world.directory.residents.index
    assert len({id(c.space) for c in index.values()}) == 1
    names = {c.parent: set[int]() for c in index.values()}
    for one in index.values():
        names[one.parent].add(id(one.parent))
        above = index.get(one.parent)
        assert above is None or one.parent is above.hash
    assert all(len(copies) == 1 for copies in names.values())
    world.do(ev.Clear())
    residents = world.directory.residents
    assert not vars(residents)["_spaces"]
    assert not dict(residents.absent)
    assert not any(vars(residents)["_chunk_at"])
