"""The last step of the liveness phase: a fresh engine must be able to fill the whole arena."""

from typing import TYPE_CHECKING

from kvkeep.core.keys import chunk_hash, root_hash
from kvkeep.testing.engine import Engine
from kvkeep.testing.knobs import PAGE_BYTES
from kvkeep.testing.layouts import Identity
from kvkeep.testing.sim_usable import pack
from kvkeep.testing.worker import Part, Report
from kvkeep.types import ChunkHash, CommitOutcome, GroupKind, RowSpec, SlotState, StageOutcome
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from kvkeep.testing.world import World

_ROUNDS = 4  # eviction may take a fresh chunk while old ones are left; those go in the end


async def fill(world: "World") -> None:
    """Store until every byte of the arena holds this engine's chunks; AssertionError if not."""
    for disk in world.disks:
        disk.fill_up()
    size = world.knobs.arena_pages // world.knobs.slots * PAGE_BYTES
    rows = (RowSpec(0, GroupKind.FULL_ATTENTION, size),)
    who = Identity("filler", 1, rows, True, True, True, False, True)
    engine = Engine(world, who)
    client = engine.scheduler
    client.start()
    while client.ready is None:
        await client.process.sleep(0.01)
    world.host.lift_quotas()
    root = root_hash(who.session_fingerprint())
    directory = world.host.directory
    if size > PAGE_BYTES:  # gaps of a page between extents of two are nobody's fault
        world.host.clear(sliced=False)
    count = directory.arena.populated_bytes // size
    hashes = [chunk_hash(root, number.to_bytes(4, "little")) for number in range(count)]
    for _ in range(_ROUNDS):
        for one in hashes:
            if one not in directory.residents.index:
                await _store(engine, root, one)
    missing = [one for one in hashes if one not in directory.residents.index]
    assert not missing, f"{len(missing)} of {count} chunks found no place in an idle arena"
    assert directory.slots.bytes_in[SlotState.RESIDENT] == directory.arena.populated_bytes
    await client.close()
    engine.kill()


async def _store(engine: Engine, root: ChunkHash, one: ChunkHash) -> None:
    client, worker = engine.scheduler, engine.workers[0]
    item = m.StageItem("fill", root, pack([one]))
    staged = await client.call(lambda seq: m.Stage(seq, (item,)))
    assert staged is not None
    assert isinstance(staged.reply, m.Granted)
    outcome = StageOutcome(staged.reply.outcomes[0])
    assert outcome is StageOutcome.GRANTED, f"{outcome.name} in an arena that nobody uses"
    leases = staged.reply.leases
    part = _part(leases[0], one, engine.identity.rows[0].object_bytes, staged.reply.columns[0])
    assert await worker.store(staged.epoch, [part], False) is Report.DONE
    committed = await client.call(lambda seq: m.Commit(seq, leases))
    assert committed is not None
    assert isinstance(committed.reply, m.Committed)
    assert committed.reply.outcomes[0] == CommitOutcome.COMMITTED


def _part(lease: int, one: ChunkHash, size_bytes: int, column: m.Columns) -> Part:
    slot, offset, generation = (
        memoryview(packed).cast("Q")[0]
        for packed in (column.slots, column.offsets, column.generations)
    )
    return Part(lease, one, 0, size_bytes, slot, offset, generation)
