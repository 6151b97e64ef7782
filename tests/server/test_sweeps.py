"""Clear, forget and drain on a loop: answered at their end, others served meanwhile."""

import asyncio
import gc
import json

from tests.server.l2_world import NEVER, Link, World, chunks, virtual, world

from kvkeep.server.garbage import FULL_EVERY_S, FULL_IDLE_S, FULL_MOST_CHUNKS, YOUNG, Garbage
from kvkeep.server.operators import MOST_WAITING
from kvkeep.testing.faulty_backend import FaultyBackend, Switched
from kvkeep.types import PeerId, Role
from kvkeep.wire import messages as m

SLICE = 10


async def sliced(w: World, number: int = 12) -> tuple[PeerId, Link]:
    """An engine with chunks, and slices that are short against them."""
    w.service.sweeps.slice = SLICE
    engine = w.join("engine")
    keys = chunks(number)
    for start in range(0, number, 4):  # a session may stage so many at once
        await w.store(engine, keys[start : start + 4])
    return engine


@virtual
async def test_clear_is_answered_at_its_end() -> None:
    async with world(FaultyBackend()) as w:
        engine = await sliced(w)
        operator = w.join("", Role.OPERATOR)
        w.tell(operator, m.Query(1, "clear"))
        assert not operator[1].sent
        assert len(w.directory.residents.index) == 12
        w.tell(engine, m.Lookup(7, "r", b"".join(chunks(12)), fetch=False))
        assert (await engine[1].next(m.Found)).chunks == 0, "served meanwhile, and nothing is found"
        w.tell(operator, m.Query(2, "clear", "force"))
        answers = [await operator[1].next(m.Answer) for _ in range(2)]
        counts = [json.loads(answer.body)["cleared_chunks"] for answer in answers]
        assert [answer.seq for answer in answers] == [1, 2]
        assert sum(counts) == 12
        assert not w.directory.residents.index


@virtual
async def test_forget_waits_for_both_tiers() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine = await sliced(w)
        operator = w.join("", Role.OPERATOR)
        assert (await w.persisted(operator))["done"]
        told = await w.ask(engine, m.Forgotten, m.Forget)
        assert (told.chunks, told.done) == (12, True)
        assert not raw.objects
        assert not w.directory.residents.index


@virtual
async def test_an_operator_that_leaves_is_not_answered() -> None:
    async with world(FaultyBackend()) as w:
        await sliced(w)
        operator = w.join("", Role.OPERATOR)
        for seq in range(MOST_WAITING + 1):
            w.tell(operator, m.Query(seq, "clear"))
        assert [type(message) for message in operator[1].sent] == [m.Failed]
        w.service.closed(operator[0])
        while w.directory.busy:
            await asyncio.sleep(0)
        assert len(operator[1].sent) == 1
        another = w.join("", Role.OPERATOR)
        answer = await w.ask(another, m.Answer, lambda seq: m.Query(seq, "clear"))
        assert json.loads(answer.body)["cleared_chunks"] == 0, "those that ended make room"


@virtual
async def test_the_end_of_a_drain_is_said_without_a_persist() -> None:
    """All of it is in L2 already: nothing happens that would tell who waits."""
    async with world(FaultyBackend()) as w:
        await sliced(w)
        operator = w.join("", Role.OPERATOR)
        assert (await w.persisted(operator))["done"]
        w.tell(operator, m.Query(99, "wait_persisted", "60"))
        assert not operator[1].sent
        answer = await operator[1].next(m.Answer)
        assert json.loads(answer.body)["done"]


@virtual
async def test_many_deletions_are_done_some_at_a_time() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine = await sliced(w, 24)
        operator = w.join("", Role.OPERATOR)
        assert (await w.persisted(operator))["done"]
        raw.plan = Switched(NEVER, operation="delete")
        w.tell(engine, m.Drop(b"".join(chunks(24))))
        await asyncio.sleep(0)
        assert raw.calls["delete"] <= 16
        raw.plan = Switched()
        raw.unstick()
        await w.until(lambda: not raw.objects)


def test_what_is_old_is_collected_in_idle_moments_of_a_small_server() -> None:
    now_s = [0.0]
    before = gc.get_threshold()
    garbage = Garbage(lambda: now_s[0])
    try:
        assert gc.get_threshold()[0] == YOUNG
        few, long_s = FULL_MOST_CHUNKS, FULL_IDLE_S
        assert not garbage.collect(idle_s=long_s, chunks=few)
        now_s[0] += FULL_EVERY_S
        assert not garbage.collect(idle_s=long_s / 2, chunks=few)
        assert not garbage.collect(idle_s=long_s, chunks=few + 1)
        assert garbage.collect(idle_s=long_s, chunks=few)
        assert not garbage.collect(idle_s=long_s, chunks=few)
    finally:
        garbage.stop()
    assert gc.get_threshold() == before
