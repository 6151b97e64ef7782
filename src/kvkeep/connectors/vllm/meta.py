"""What the two sides of the connector send each other through vLLM, once per engine step.

Picklable values only. Handles are (slot, offset, generation) per chunk, one list per rank.
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

Handle = tuple[int, int, int]  # slot, offset in the arena, generation


@dataclass(slots=True)
class Load:
    """Retrieve chunks of one request into its blocks.

    `handles[rank][i]` and `blocks[i]` belong to the same chunk; a block that is None is not loaded
    because a local prefix hit covers it.
    """

    request: str
    epoch: int
    handles: list[list[Handle]]
    blocks: list[list[int | None]]


@dataclass(slots=True)
class StageCopy:
    """Copy the blocks of one chunk into a staged extent; `handles[rank]`."""

    stage: int
    epoch: int
    handles: list[Handle]
    blocks: list[int]


@dataclass
class StepMeta(KVConnectorMetadata):
    """Scheduler to worker."""

    step: int = 0
    loads: list[Load] = field(default_factory=list)
    stages: list[StageCopy] = field(default_factory=list)
    scheduled_tokens: int = 0  # 0: the device has nothing else to do in this step
    taken: set[str] = field(default_factory=set)  # lost their blocks while they are loaded


@dataclass(slots=True)
class LoadReport:
    """How one request's load went on the ranks reported so far."""

    ranks: list[int]
    load_ms: float
    broken: set[int]  # indices into Load.blocks whose copy itself failed
    stale: set[int]  # indices whose bytes are not theirs: revoked, another epoch, or not copied
    beside: bool = False  # copied beside the engine's steps, not within one


@dataclass
class WorkerMeta(KVConnectorWorkerMetadata):
    """Worker to scheduler: what was copied. vLLM folds the ranks' objects with `aggregate`."""

    step: int
    copied: dict[int, int] = field(default_factory=dict)  # stage id -> ranks that copied it
    failed: set[int] = field(default_factory=set)  # stage ids whose copy failed on some rank
    loads: dict[str, LoadReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerMeta":
        """Fold another rank's report of the same step into this one."""
        assert isinstance(other, WorkerMeta)
        assert other.step == self.step
        for stage, ranks in other.copied.items():
            self.copied[stage] = self.copied.get(stage, 0) + ranks
        self.failed |= other.failed
        for request, report in other.loads.items():
            mine = self.loads.setdefault(request, report)
            if mine is not report:
                mine.ranks += report.ranks
                mine.load_ms = max(mine.load_ms, report.load_ms)
                mine.broken |= report.broken
                mine.stale |= report.stale
                mine.beside |= report.beside
        return self
