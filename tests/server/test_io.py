"""Effects become calls of stores, and their ends events; with real stores over a faulty backend."""

import asyncio
from typing import Any

import pytest
from tests.server.l2_world import (
    NEVER,
    PAGE,
    PATIENCE_S,
    QUICK,
    World,
    chunks,
    filled,
    virtual,
    world,
)

from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.header import label
from kvkeep.core.directory import Limits
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Nth, Switched
from kvkeep.types import ChunkHash, Reason, Role, SlotState, StorePolicy
from kvkeep.wire import messages as m


@pytest.mark.parametrize("later", [False, True])
@virtual
async def test_what_is_stored_comes_back_from_l2(later: bool) -> None:
    async with world(FaultyBackend(later=later)) as w:
        engine, keys = await filled(w)
        found = await w.find(engine, [*keys, ChunkHash(b"?" * 32)])
        assert (found.chunks, found.tiers) == (3, b"\1\1\1")
        assert found.reasons == bytes([Reason.L2_MISS])
        assert (await w.find(engine, keys)).tiers in (b"", b"\0\0\0")


@virtual
async def test_an_answer_at_once_needs_no_push() -> None:
    """Where the question is answered from memory and L2 has nothing, Found is the reply."""
    async with world(FaultyBackend()) as w:
        engine = w.join("s")
        found = await w.find(engine, chunks(2))
        assert isinstance(found, m.Found)
        assert found.reasons == bytes([Reason.L2_MISS] * 2)


@virtual
async def test_a_missing_chunk_is_answered_later_when_the_question_takes_time() -> None:
    async with world(FaultyBackend(later=True)) as w:
        found = await w.find(w.join("s"), chunks(1))
        assert isinstance(found, m.Resolved)
        assert found.reasons == bytes([Reason.L2_MISS])


@virtual
async def test_a_question_that_hangs_is_given_up() -> None:
    raw = FaultyBackend()
    async with world(raw, settings=QUICK) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(NEVER, operation="contains")
        found = await w.find(engine, keys)
        assert found.chunks == 0
        assert len(found.reasons) == 3


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Kind.MISSING, Reason.L2_MISS),
        (Kind.FLIPPED, Reason.CORRUPT),
        (Kind.OTHER_KEY, Reason.CORRUPT),
        (Kind.ERROR, Reason.L2_ERROR),
        (Kind.REFUSE, Reason.L2_ERROR),
    ],
)
@virtual
async def test_a_get_that_fails(kind: Kind, reason: Reason) -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Nth(2, Fault(kind, place=77), operation="get")
        found = await w.find(engine, keys)
        assert (found.chunks, found.reasons[:1]) == (1, bytes([reason]))
        again = await w.find(engine, keys)
        assert again.chunks == (1 if reason is Reason.CORRUPT else 3)
        assert len(raw.broken) == (reason is Reason.CORRUPT)


@virtual
async def test_late_io_keeps_its_memory_until_it_returns() -> None:
    raw = FaultyBackend()
    async with world(raw, settings=QUICK) as w:
        engine, keys = await filled(w)
        raw.plan = Nth(1, NEVER, operation="get")
        found = await w.find(engine, keys)
        assert (found.chunks, found.reasons[0]) == (0, Reason.L2_TIMEOUT)
        await w.until(lambda: len(w.directory.residents.index) == 2)
        assert w.directory.slots.bytes_in[SlotState.STAGING] == 2 * PAGE
        raw.unstick()
        await w.until(lambda: not w.directory.slots.bytes_in[SlotState.STAGING])
        assert len(w.directory.residents.index) == 2  # what came late is not verified
        assert (await w.find(engine, keys)).chunks == 3


@virtual
async def test_the_lookups_deadline_rings() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Nth(3, NEVER, operation="get")
        found = await w.find(engine, keys, wait_ms=30.0)
        assert (found.chunks, found.reasons) == (2, bytes([Reason.L2_TIMEOUT]))


@virtual
async def test_what_is_there_is_not_written_again() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        assert raw.calls["put"] == 3
        await w.store(engine, keys)
        await w.until(lambda: w.directory.persister.idle)
        assert raw.calls["put"] == 3
        assert w.directory.counters["persisted_ok"] == 6


@pytest.mark.parametrize("later", [False, True])
@virtual
async def test_drop_takes_the_object_away(later: bool) -> None:
    raw = FaultyBackend(later=later)
    async with world(raw) as w:
        engine, keys = await filled(w)
        await w.find(engine, keys)
        w.tell(engine, m.Drop(keys[1]))
        await w.until(lambda: raw.calls["delete"] == 1 and len(raw.objects) == 2)
        assert [name[1].chunk for name, _ in raw.broken] == [keys[1]]
        assert (await w.find(engine, keys)).chunks == 1


@virtual
async def test_forget_empties_l2_of_the_layout() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        await w.find(engine, keys)
        forgotten = await w.ask(engine, m.Forgotten, m.Forget)
        assert forgotten.chunks == 3
        await w.until(lambda: not raw.objects)
        assert (await w.find(engine, keys)).chunks == 0


@pytest.mark.parametrize("operation", ["delete", "forget"])
@virtual
async def test_a_deletion_that_fails_is_logged(operation: str) -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        await w.find(engine, keys)
        raw.plan = Switched(Fault(Kind.ERROR), operation=operation)
        w.tell(engine, m.Drop(keys[0]) if operation == "delete" else m.Forget(1))
        await w.until(lambda: f"l2_{operation}_failed" in [name for name, _ in w.lines])
        assert len(raw.objects) == 3


@virtual
async def test_a_broken_task_is_reported_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own bug: the core hears of an error, and nobody waits for ever."""
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)

        async def broken(*_: Any) -> Any:
            raise RuntimeError("planted")

        monkeypatch.setattr(w.io.stores[0], "get", broken)
        found = await w.find(engine, keys)
        assert (found.chunks, found.reasons[0]) == (0, Reason.L2_ERROR)
        said = [fields["why"] for name, fields in w.lines if name == "io_broken"]
        assert len(said) == 3
        assert "planted" in str(said[0])
        w.lines.clear()


@virtual
async def test_a_broken_put_is_reported_and_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = FaultyBackend()
    async with world(raw, persist_tries=1) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)

        async def broken(*_: Any) -> Any:
            raise RuntimeError("planted")

        monkeypatch.setattr(w.io.stores[0], "put", broken)
        await w.store(engine, chunks(1))
        body = await w.persisted(operator)
        assert (body["done"], body["missing_chunks"], body["persist_failed"]) == (False, 1, 1)
        w.lines.clear()


@virtual
async def test_stuck_loads_do_not_delay_another_backends_hits() -> None:
    stuck, good = FaultyBackend(name="stuck"), FaultyBackend(name="good")
    async with world(stuck, good, fetches_per_backend=8, fetch_fraction=0.5) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
        bad, fine = [chunks(1, n << 20) for n in range(8)], chunks(3, 77 << 20)
        for keys in (*bad, fine):
            await w.store(engine, keys)
        assert (await w.persisted(operator))["done"]
        await w.ask(operator, m.Answer, lambda seq: m.Query(seq, "clear"))
        space = w.directory.sessions["s"].space(None)
        for key in list(stuck.objects):
            if key[1].chunk in fine:
                del stuck.objects[key]
        assert all(name[0] == label(space) for name in good.objects)
        stuck.plan = Switched(NEVER, operation="get")
        for keys in bad:
            w.tell(engine, m.Lookup(next(w.seq), "r", b"".join(keys), wait_ms=15_000.0))
            assert isinstance(await engine[1].next(m.Pending), m.Pending)
        await w.until(lambda: stuck.hanging == 8)
        found = await w.find(engine, fine)
        assert (found.chunks, found.tiers) == (3, b"\2\2\2")
        stuck.unstick()
        for _ in bad:
            assert (await engine[1].next(m.Resolved)).chunks == 1


# ---- open and close


@virtual
async def test_one_store_that_does_not_open_closes_the_others() -> None:
    good = FaultyBackend(name="good")
    bad = FaultyBackend(Switched(Fault(Kind.REFUSE), operation="open"), name="bad")
    w = World([good, bad], Limits(), GuardSettings())
    with pytest.raises(Exception, match="open is refused"):
        await w.io.open()
    assert good.calls["close"] == 1


@virtual
async def test_close_leaves_hanging_io_behind() -> None:
    raw = FaultyBackend()
    w = World([raw], Limits(store_policy=StorePolicy.WRITE_THROUGH), GuardSettings())
    await w.io.open()
    engine = w.join("s")
    raw.plan = Switched(NEVER, operation="put")
    await w.store(engine, chunks(1))
    await w.until(lambda: raw.hanging == 1)
    async with asyncio.timeout(PATIENCE_S):
        await w.io.close()
    assert raw.calls["close"] == 1
    raw.unstick()
    await asyncio.sleep(0.01)
    assert len(w.directory.persister.running) == 1  # nobody is told any more
