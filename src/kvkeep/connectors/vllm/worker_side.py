"""The connector in a vLLM worker: copies bytes, compares generations, reports. Never commits.

Its connection exists to bring the layout, to map the arena and to show that the process lives.
"""

import logging
import time

from kvkeep.client import Client
from kvkeep.connectors.blocks import DeviceBlocks
from kvkeep.connectors.vllm.meta import Load, LoadReport, StageCopy, StepMeta, WorkerMeta
from kvkeep.errors import MemoryRefused
from kvkeep.shm import Mapping

_log = logging.getLogger("vllm.kvkeep")


class WorkerSide:
    """One per worker process; called by vLLM's worker thread only."""

    def __init__(self, blocks: DeviceBlocks, client: Client, rank: int) -> None:
        self.blocks = blocks
        self.client = client
        self._rank = rank
        self._copied: dict[int, int] = {}
        self._failed: set[int] = set()
        self._loads: dict[str, LoadReport] = {}
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._pinned: Mapping | None = None

    # ---- loads

    def load(self, meta: StepMeta) -> None:
        """Copy every load of this step into its blocks; each ends here, well or not."""
        for load in meta.loads:
            started = time.perf_counter()
            broken, stale = self._retrieve(load)
            for index in broken | stale:
                self._bad_blocks |= {b for b in load.blocks[index] if b is not None}
            load_ms = (time.perf_counter() - started) * 1e3
            self._loads[load.request] = LoadReport([self._rank], load_ms, broken, stale)
            self._received.add(load.request)

    def fail_unreported_loads(self, meta: StepMeta) -> None:
        """Report every load of this step that has no report yet as failed."""
        for load in meta.loads:
            if load.request not in self._loads:
                everything = set(range(len(load.blocks)))
                self._loads[load.request] = LoadReport([self._rank], 0.0, set(), everything)
                self._received.add(load.request)
                self._bad_blocks |= {b for row in load.blocks for b in row if b is not None}

    def _retrieve(self, load: Load) -> tuple[set[int], set[int]]:
        """Returns indices of chunks whose copy failed, and of those whose bytes are not theirs."""
        everything = set(range(len(load.blocks)))
        mapping = self._mapping(load.epoch)
        if mapping is None:
            return set(), everything
        handles = load.handles[self._rank]
        try:
            with mapping.use():
                self._copy_in(mapping, load)
                stale = {
                    i for i, (slot, _, gen) in enumerate(handles) if mapping.generation(slot) != gen
                }
        except MemoryRefused:
            return set(), everything
        except (ValueError, RuntimeError) as error:
            _log.error("kvkeep: loading request %s failed: %s", load.request, error)
            return everything, set()
        return set(), stale

    def _copy_in(self, mapping: Mapping, load: Load) -> None:
        """Extents into device blocks, done when it returns."""
        jobs = [
            (mapping.address + offset, blocks)
            for (_, offset, _), blocks in zip(load.handles[self._rank], load.blocks, strict=True)
        ]
        self.blocks.scatter(jobs)
        self.blocks.synchronize()

    # ---- stores

    def save(self, meta: StepMeta) -> None:
        """Copy every staged chunk of this step; done when it returns, so blocks may be reused."""
        ready = [s for s in meta.stages if s.stage not in self._copied]
        by_epoch: dict[int, list[StageCopy]] = {}
        for stage in ready:
            by_epoch.setdefault(stage.epoch, []).append(stage)
        for epoch, stages in by_epoch.items():
            copied = self._store(epoch, stages)
            for stage in copied:
                self._copied[stage.stage] = 1
            self._fail_stages([stage for stage in stages if stage not in copied])

    def _store(self, epoch: int, stages: list[StageCopy]) -> list[StageCopy]:
        """Copy what is still ours to write; returns the stages that were copied."""
        mapping = self._mapping(epoch)
        if mapping is None or not mapping.writable:
            return []
        try:
            with mapping.use():
                # A connection lost and found again gave its staged extents back: their generation
                # changed then, and cannot change again while this mapping is in use.
                ours = [s for s in stages if self._still_ours(mapping, s)]
                jobs = [(mapping.address + s.handles[self._rank][1], s.blocks) for s in ours]
                self.blocks.gather(jobs)
                self.blocks.synchronize()
        except MemoryRefused:
            return []
        except (ValueError, RuntimeError) as error:
            _log.error("kvkeep: storing %d chunks failed: %s", len(stages), error)
            return []
        return ours

    def _still_ours(self, mapping: Mapping, stage: StageCopy) -> bool:
        slot, _, generation = stage.handles[self._rank]
        return mapping.generation(slot) == generation

    def fail_unreported_stages(self, meta: StepMeta) -> None:
        """Report every staged chunk of this step that has no report yet as failed."""
        self._fail_stages([s for s in meta.stages if s.stage not in self._copied])

    def _fail_stages(self, stages: list[StageCopy]) -> None:
        for stage in stages:
            self._copied[stage.stage] = 1
            self._failed.add(stage.stage)

    # ---- reports

    def take_received(self) -> set[str]:
        """Requests whose load has ended since the last call."""
        received, self._received = self._received, set()
        return received

    def take_bad_blocks(self) -> set[int]:
        """Device blocks whose load failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self, step: int) -> WorkerMeta:
        """Everything copied since the last report."""
        report = WorkerMeta(step, self._copied, self._failed, self._loads)
        self._copied, self._failed, self._loads = {}, set(), {}
        return report

    def _mapping(self, epoch: int) -> Mapping | None:
        """The arena of this epoch, pinned for the device; None when it is another or gone."""
        mapping = self.client.mapping
        if mapping is None or mapping.epoch != epoch:
            return None
        if mapping is not self._pinned:
            self.blocks.pin(mapping.address, mapping.size_bytes)
            mapping.before_unmap = self.blocks.unpin
            self._pinned = mapping
        return mapping
