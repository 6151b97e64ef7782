"""One rank of a simulated engine: copies bytes between its device and the arena, piece by piece.

The rules a real worker must keep: never touch memory of another epoch; compare the generation
before writing (a grant may have been lost since) and on both sides of a read.
"""

import asyncio
import enum
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvkeep.testing.fake_client import FakeClient, Mapping
from kvkeep.testing.model import content
from kvkeep.testing.process import ProcessEnded

if TYPE_CHECKING:
    from kvkeep.testing.world import World

_MOST_PIECES = 3
_DEVICE_STOPS = 0.1  # at a piece, once the process is dead
_GARBAGE = b"\xee"


@dataclass(frozen=True, slots=True)
class Part:
    """A handle of one object of one rank."""

    lease: int
    chunk: bytes
    group: int
    size_bytes: int
    slot: int
    offset: int
    generation: int


class Report(enum.Enum):
    """How a copy went."""

    DONE = "done"
    REFUSED = "refused"  # no mapping, another epoch, or the grant is gone: nothing was touched
    STALE = "stale"  # the generation changed: what was read is worth nothing
    FAILED = "failed"  # the device's own failure


class Worker:
    """Copies for one rank; outlives the scheduler's interest in its copies."""

    def __init__(self, world: "World", client: FakeClient, rank: int) -> None:
        self.world = world
        self.client = client
        self.rank = rank
        self.storing = 0  # copies into the arena that run now

    def submit(
        self, kind: str, work: Coroutine[Any, Any, Report]
    ) -> "asyncio.Future[Report | None]":
        """Run a copy in this process; None when the process ends first. `kind`: for the counts."""
        done: asyncio.Future[Report | None] = self.world.loop.create_future()
        self.world.spawn(self._report(kind, work, done))
        return done

    async def store(self, epoch: int, parts: Sequence[Part], garbage: bool) -> Report:
        """Copy into staged extents; `garbage`: what the device computed is wrong."""
        mapping = self.client.mapping
        if mapping is None or not self.right_epoch(mapping, epoch):
            return Report.REFUSED
        if not self.unchanged(mapping, parts):
            return Report.REFUSED
        mapping.users += 1
        self.storing += 1
        try:
            for part in parts:
                await self._write(mapping, part, garbage)
        finally:
            mapping.users -= 1
            self.storing -= 1
        return Report.DONE

    async def load(self, epoch: int, session: str, parts: Sequence[Part]) -> Report:
        """Copy out of resident extents, and judge every byte if the copy is good."""
        mapping = self.client.mapping
        if mapping is None or not self.right_epoch(mapping, epoch):
            return Report.REFUSED
        good = self.unchanged(mapping, parts)
        read = bytearray()
        mapping.users += 1
        try:
            for part in parts if good else ():
                read += await self._read(mapping, part)
        finally:
            mapping.users -= 1
        if not good or not self.unchanged(mapping, parts):
            model = mapping.memory.model
            lease = parts[0].lease if parts else 0
            assert model is None or not model.still_reserved(session, lease, self.rank), (
                "the generation of a reserved object changed"
            )
            return Report.STALE
        if self.world.rng.random() < self.world.knobs.load_fails:
            return Report.FAILED
        right = b"".join(self._content(part) for part in parts)
        assert read == right, f"wrong bytes served from slots {[part.slot for part in parts]}"
        return Report.DONE

    def right_epoch(self, mapping: Mapping, epoch: int) -> bool:
        """A mapping serves handles of its own epoch only."""
        return mapping.epoch == epoch

    def unchanged(self, mapping: Mapping, parts: Sequence[Part]) -> bool:
        """Whether every handle still names what it was given out for."""
        words = mapping.memory.generations
        return all(words[part.slot] == part.generation for part in parts)

    # ---- inside

    async def _report(
        self,
        kind: str,
        work: Coroutine[Any, Any, Report],
        done: "asyncio.Future[Report | None]",
    ) -> None:
        report: Report | None = None
        try:
            report = await work
            self.world.copies[f"{kind}_{report.value}"] += 1
        except ProcessEnded:
            pass
        finally:
            if not done.done():
                done.set_result(report)

    async def _write(self, mapping: Mapping, part: Part, garbage: bool) -> None:
        memory = mapping.memory
        data = _GARBAGE * part.size_bytes if garbage else self._content(part)
        number = self.world.new_id()
        end = part.offset + part.size_bytes
        memory.copying[number] = (part.offset, end, self.client.process)
        try:
            for start, end in self._pieces(part.size_bytes):
                await self._device_time()
                if memory.model is not None:
                    memory.model.writes(part.lease, part.slot)
                memory.arena[part.offset + start : part.offset + end] = data[start:end]
        finally:
            del memory.copying[number]

    async def _read(self, mapping: Mapping, part: Part) -> bytes:
        memory, out = mapping.memory, bytearray()
        for start, end in self._pieces(part.size_bytes):
            await self.client.process.sleep(self.world.rng.random() * self.world.knobs.copy_s)
            out += memory.arena[part.offset + start : part.offset + end]
        return bytes(out)

    def _content(self, part: Part) -> bytes:
        return content(part.chunk, self.rank, part.group, part.size_bytes)

    async def _device_time(self) -> None:
        """A piece takes a while; a device with DMA may finish after its process has died."""
        world, process = self.world, self.client.process
        await asyncio.sleep(world.rng.random() * world.knobs.copy_s)
        if process.alive:
            return
        if not self.client.hello.dma or world.rng.random() < _DEVICE_STOPS:
            process.check()
        quarantine_s = world.knobs.limits.quarantine_s
        await asyncio.sleep(world.rng.random() * quarantine_s / 4)
        if world.loop.time() - process.died_s >= quarantine_s:
            process.check()

    def _pieces(self, size_bytes: int) -> list[tuple[int, int]]:
        rng = self.world.rng
        cuts = sorted(rng.randint(0, size_bytes) for _ in range(rng.randint(0, _MOST_PIECES)))
        points = [0, *cuts, size_bytes]
        return list(pairwise(points))
