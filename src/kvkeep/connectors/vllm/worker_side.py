"""The connector in a vLLM worker: copies bytes, compares generations, reports. Never commits.

Its connection exists to bring the layout, to map the arena and to show that the process lives.
"""

import logging
import time
from collections.abc import Set

from kvkeep.client import Client
from kvkeep.connectors.blocks import DeviceBlocks
from kvkeep.connectors.vllm.loader import Loader, Task, loader_for
from kvkeep.connectors.vllm.meta import Load, LoadReport, StageCopy, StepMeta, WorkerMeta
from kvkeep.errors import MemoryRefused
from kvkeep.shm import Mapping

INLINE_S = 0.002  # a step's loads up to here are copied within it
FIRST_RATE_BYTES_S = 4e9  # until one was measured
LOADER_WAIT_S = 0.001  # in a step with nothing to compute, so that the engine does not spin
_log = logging.getLogger("vllm.kvkeep")


class WorkerSide:
    """One per worker process; called by vLLM's worker thread only."""

    def __init__(self, blocks: DeviceBlocks, client: Client, rank: int) -> None:
        self.blocks = blocks
        self.client = client
        self.loader: Loader = loader_for(blocks, self._run)
        self._rank = rank
        self._rate_bytes_s = FIRST_RATE_BYTES_S
        self._copied: dict[int, int] = {}
        self._failed: set[int] = set()
        self._loads: dict[str, LoadReport] = {}
        self._beside: set[str] = set()  # with the loader
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._pinned: Mapping | None = None

    def close(self) -> None:
        """End the copies, then the connection and its mapping."""
        self.loader.close()
        self.client.close()

    # ---- loads

    def load(self, meta: StepMeta) -> None:
        """Copy the short loads of this step, hand the long ones over to the loader.

        With nothing to compute in this step the first is copied here too: nobody waits for it.
        """
        left_s = INLINE_S
        for index, load in enumerate(meta.loads):
            mapping = self._mapping(load.epoch)
            task = Task(load, [] if mapping is None else load.handles[self._rank], mapping)
            predicted_s = self._bytes(load) / self._rate_bytes_s
            alone = index == 0 and meta.scheduled_tokens == 0
            if mapping is None or alone or predicted_s <= left_s:
                left_s -= predicted_s
                self._run(task)
                self._report(task.end())
            else:
                task.beside = True
                self.loader.submit(task)
                self._beside.add(load.request)  # from now on it is the loader's to report

    def fail_unreported_loads(self, meta: StepMeta) -> None:
        """Report every load of this step that has no report and will get none as failed."""
        for load in meta.loads:
            if load.request not in self._loads and load.request not in self._beside:
                everything = set(range(len(load.blocks)))
                self._loads[load.request] = LoadReport([self._rank], 0.0, set(), everything)
                self._received.add(load.request)
                self._bad_blocks |= {b for row in load.blocks for b in row if b is not None}

    def stop_loading(self, requests: set[str]) -> None:
        """These requests' blocks are about to be somebody else's: no copy may run into them."""
        if requests & self._beside:
            self.loader.cancel(requests)
            self.loader.wait_for(requests)

    def _run(self, task: Task) -> None:
        """Copy a whole load; also in the loader's thread."""
        task.begun_s = time.perf_counter()
        task.broken, task.stale = self._retrieve(task)

    def _retrieve(self, task: Task) -> tuple[set[int], set[int]]:
        """Returns indices of chunks whose copy failed, and of those whose bytes are not theirs."""
        if task.mapping is None:
            return set(), task.everything
        try:
            with task.mapping.use():
                copied = self._copy_in(task, task.intact())
                task.lose_from(min(copied, task.intact()))
        except MemoryRefused:
            return set(), task.everything
        except (ValueError, RuntimeError) as error:
            _log.error("kvkeep: loading request %s failed: %s", task.load.request, error)
            return task.everything, set()
        return set(), task.stale

    def _copy_in(self, task: Task, chunks: int) -> int:
        """Extents into device blocks; returns how many chunks were done when it was over."""
        jobs = list(task.jobs(chunks))
        if not task.beside:
            self.blocks.scatter(jobs)
            self.blocks.synchronize()
            return chunks
        for index, job in enumerate(jobs):
            if task.cancelled:
                return index
            self.blocks.scatter([job])
        return chunks

    def _report(self, task: Task) -> None:
        load, copied_s = task.load, task.ended_s - task.begun_s
        bad = task.broken | task.stale
        for index in bad:
            self._bad_blocks |= {b for b in load.blocks[index] if b is not None}
        if not bad and copied_s > 0:
            rate = self._bytes(load) / copied_s
            self._rate_bytes_s = 0.7 * self._rate_bytes_s + 0.3 * rate
        load_ms = (task.ended_s - task.asked_s) * 1e3
        report = LoadReport([self._rank], load_ms, task.broken, task.stale, task.beside)
        self._loads[load.request] = report
        self._received.add(load.request)

    def _bytes(self, load: Load) -> int:
        blocks = sum(block is not None for row in load.blocks for block in row)
        return self.blocks.chunk_bytes(blocks)

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

    def take_received(
        self, gone: Set[str] = frozenset(), *, nothing_to_compute: bool = False
    ) -> set[str]:
        """Requests whose load has ended since the last call; loads of `gone` ones are cut short.

        Waits a little for the loader when the engine would only come back and ask again.
        """
        if self._beside:
            if gone:
                self.loader.cancel(set(gone))
            wait = nothing_to_compute and not self._received
            for task in self.loader.take_ended(LOADER_WAIT_S if wait else 0.0):
                self._beside.discard(task.load.request)
                self._report(task)
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
