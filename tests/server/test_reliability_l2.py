"""What goes to and from L2: held up by nothing else, never half there, counted once."""

from tests.server.l2_world import BYTES, NEVER, PAGE, chunks, filled, virtual, world

from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Nth, Switched
from kvkeep.types import SlotState
from kvkeep.wire import messages as m


@virtual
async def test_writes_that_hang_do_not_hold_up_reads() -> None:
    raw = FaultyBackend()
    async with world(raw, persists_per_backend=4) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(NEVER, operation="put")
        await w.store(engine, chunks(4, 9 << 20))
        await w.until(lambda: raw.hanging == 4)
        found = await w.find(engine, keys)
        assert (found.chunks, found.tiers) == (3, b"\1\1\1")


@virtual
async def test_what_came_broken_is_neither_found_nor_written_on() -> None:
    """Two L2: what one gave wrongly is not in L1 at any time, and not copied to the other."""
    bad, good = FaultyBackend(name="bad"), FaultyBackend(name="good")
    async with world(bad, good) as w:
        engine, keys = await filled(w)
        for name in list(good.objects):
            del good.objects[name]
        puts = good.calls["put"]
        bad.plan = Nth(1, Fault(Kind.FLIPPED, place=99), operation="get")
        ok_before = w.directory.counters["fetched_ok"]
        found = await w.find(engine, keys)
        assert found.chunks == 0
        assert keys[0] not in w.directory.residents.index
        assert w.directory.counters["fetched_ok"] == ok_before + 2
        assert w.directory.counters["fetched_corrupt"] == 1
        assert not [name for name in good.objects if name[1].chunk == keys[0]]
        assert good.calls["put"] - puts <= 2
        assert w.directory.slots.bytes_in[SlotState.STAGING] == 0


@virtual
async def test_every_byte_that_moved_is_counted_once() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)

        def moved() -> tuple[int, ...]:
            seen, (store,) = w.directory.counters, w.io.statuses()
            operations = store["operations"]
            inside = seen["persisted_bytes"], seen["fetched_bytes"]
            none = {"bytes": 0}
            return *inside, *(operations.get(name, none)["bytes"] for name in ("put", "get"))

        chunk_bytes = -(-BYTES // PAGE) * PAGE
        assert moved() == (3 * chunk_bytes, 0, 3 * BYTES, 0)
        await w.find(engine, keys)
        ledger = (3 * chunk_bytes, 3 * chunk_bytes, 3 * BYTES, 3 * BYTES)
        assert moved() == ledger
        await w.find(engine, keys)  # from L1
        assert moved() == ledger
        w.tell(engine, m.Drop(keys[2]))
        assert (await w.find(engine, keys)).chunks == 2
        assert moved() == ledger
