"""KVKeepConnector: the class vLLM builds, once per role. Thin: the sides do the work.

Inside an engine kvkeep never raises and never stalls: whatever goes wrong in a hook is logged once,
counted, and from then on this connector answers "nothing cached". It refuses to start only for
settings that a user must change (a wrong load-failure policy, unknown keys).
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvkeep import __version__
from kvkeep.client import Client
from kvkeep.connectors.blocks import DeviceBlocks
from kvkeep.connectors.vllm import settings as settings_of
from kvkeep.connectors.vllm.autostart import start_beside
from kvkeep.connectors.vllm.identity import engine_fingerprint
from kvkeep.connectors.vllm.lookups import Revocations
from kvkeep.connectors.vllm.meta import Load, StepMeta, WorkerMeta
from kvkeep.connectors.vllm.scheduler_side import SchedulerSide
from kvkeep.connectors.vllm.stats import KVKeepPromMetrics, KVKeepStats
from kvkeep.connectors.vllm.worker_side import WorkerSide
from kvkeep.errors import ConfigError
from kvkeep.shm import strong_memory_order
from kvkeep.types import GroupKind, Role, RowSpec
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger("vllm.kvkeep")
T = TypeVar("T")


class KVKeepConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector for kvkeep (vllm/distributed/kv_transfer/kv_connector/v1/base.py)."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        missing = settings_of.missing_hooks(KVConnectorBase_V1)
        if missing:
            raise ConfigError(
                f"vLLM {vllm.__version__} lacks the connector hooks {', '.join(missing)}; "
                f"kvkeep {__version__} works with vLLM {', '.join(settings_of.KNOWN_VERSIONS)}.x"
            )
        if not vllm.__version__.startswith(settings_of.KNOWN_VERSIONS):
            _log.warning("kvkeep: vLLM %s is not a version it was tested with", vllm.__version__)
        self.settings = settings_of.read(vllm_config, kv_cache_config)
        self.errors = 0
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side: WorkerSide | None = None
        self._retired: SchedulerSide | None = None  # after an internal error
        self._doomed: list[Load] = []  # loads that vLLM waits for and that cannot succeed
        self._config = vllm_config
        self._blocks: int = kv_cache_config.num_blocks
        if self.settings.off:
            _log.warning("kvkeep stays out of this engine: %s", self.settings.off)
        elif role is KVConnectorRole.SCHEDULER:
            revocations = Revocations()
            client = self._client(self._hello(Role.SCHEDULER), revocations.on_push)
            world = vllm_config.parallel_config.world_size
            self.scheduler_side = SchedulerSide(self.settings, client, world, revocations)
            if self.settings.autostart:
                start_beside(self.settings.socket, self.settings.autostart_args)
            client.start()

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is only a later miss."""
        return False

    # ---- scheduler side, in vLLM's call order

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        """Keep it: blocks of failed loads leave vLLM's own prefix cache through it."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self.scheduler_side is not None:
            self.scheduler_side.block_cache = kv_cache_manager

    def on_new_request(self, request: "Request") -> None:
        if (side := self.scheduler_side) is not None:
            self._guard(lambda: side.on_new_request(request), None)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if (side := self.scheduler_side) is None:
            return 0, False
        nothing: tuple[int | None, bool] = (0, False)
        return self._guard(lambda: side.matched_tokens(request, num_computed_tokens), nothing)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        ids = blocks.get_block_ids()[0]
        if (side := self.scheduler_side) is not None and self._guard(
            lambda: side.allocated(request, ids, num_external_tokens), False
        ):
            return
        if num_external_tokens > 0:  # promised before something broke: it must fail, not hang
            self._doomed.append(Load(request.request_id, 0, [], [list(ids)]))

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        live, side = self.scheduler_side, self.scheduler_side or self._retired
        # A request that waits for its load must hear of it, whatever breaks here.
        meta = StepMeta(0, list(side.pending_loads) if side is not None else [])
        if live is not None:
            meta = self._guard(lambda: live.build_meta(scheduler_output), meta)
        if side is not None and side is self._retired:
            side.pending_loads = []
        meta.loads += self._doomed
        self._doomed = []
        return meta

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if (side := self.scheduler_side) is not None:
            report = connector_output.kv_connector_worker_meta
            mine = report if isinstance(report, WorkerMeta) else None
            invalid = set(connector_output.invalid_block_ids)
            self._guard(lambda: side.step_done(mine, invalid), None)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if (side := self.scheduler_side) is None:
            return False, None
        return False, self._guard(lambda: side.finished(request, block_ids), None)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def has_pending_push_work(self) -> bool:
        """Keep stepping while a staged chunk waits for its report."""
        return self.scheduler_side is not None and bool(self.scheduler_side.staged)

    def reset_cache(self) -> bool | None:
        """`reset_prefix_cache(reset_connector=True)`: True once the server has confirmed it."""
        if self.settings.off:
            return True  # this engine never stored anything
        if (side := self.scheduler_side) is None:
            return False
        return self._guard(side.reset, False)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The scheduler's side counts for all."""
        if (side := self.scheduler_side) is None:
            return None
        return self._guard(side.take_stats, None)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return KVKeepStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KVKeepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker side, in vLLM's call order

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        if not self.settings.off:
            self._guard(lambda: self._register(kv_caches), None)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before anything is overwritten: vLLM 0.32 takes no block of a load that runs, but may."""
        side, meta = self.worker_side, kv_connector_metadata
        if side is not None and isinstance(meta, StepMeta) and meta.taken:
            side.stop_loading(meta.taken)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: object) -> None:
        meta = self._get_connector_metadata()
        if (side := self.worker_side) is not None and isinstance(meta, StepMeta) and meta.loads:
            self._guard(lambda: side.load(meta), None)
            side.fail_unreported_loads(meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a load is asynchronous to vLLM and done before it is reported."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: object, **kwargs: object
    ) -> None:
        """Nothing: whole chunks are copied after the forward."""

    def wait_for_save(self) -> None:
        meta = self._get_connector_metadata()
        if (side := self.worker_side) is not None and isinstance(meta, StepMeta) and meta.stages:
            self._guard(lambda: side.save(meta), None)
            side.fail_unreported_stages(meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if (side := self.worker_side) is None:
            return None, None
        meta = self._get_connector_metadata()
        idle = isinstance(meta, StepMeta) and meta.scheduled_tokens == 0
        received = side.take_received(finished_req_ids, nothing_to_compute=idle)
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_bad_blocks() if self.worker_side is not None else set()

    def build_connector_worker_meta(self) -> WorkerMeta | None:
        meta = self._get_connector_metadata()
        if self.worker_side is None or not isinstance(meta, StepMeta):
            return None
        return self.worker_side.take_report(meta.step)

    def shutdown(self) -> None:
        if self.worker_side is not None:
            self.worker_side.close()
        if self.scheduler_side is not None:
            self.scheduler_side.client.close()

    # ---- inside

    def _register(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        blocks = DeviceBlocks.from_kv_caches(kv_caches, self._blocks)
        rank = self._config.parallel_config.rank
        chunk = self.settings.chunk_tokens
        fingerprint = engine_fingerprint(
            self._config, blocks.describe(), chunk_tokens=chunk, rank=rank
        )
        size = blocks.chunk_bytes(chunk // self.settings.block_tokens)
        rows = (RowSpec(0, GroupKind.FULL_ATTENTION, size),)
        client = self._client(
            self._hello(Role.WORKER, rank=rank, rows=rows, fingerprint=fingerprint)
        )
        self.worker_side = WorkerSide(blocks, client, rank)
        client.start()

    def _hello(
        self,
        role: Role,
        rank: int = 0,
        rows: tuple[RowSpec, ...] = (),
        fingerprint: bytes = b"",
    ) -> m.Hello:
        config = self._config
        return m.Hello(
            versions=m.VERSIONS,
            session=str(config.kv_transfer_config.engine_id),
            role=role,
            rank=rank,
            rows=rows,
            fingerprint=fingerprint,
            world=config.parallel_config.world_size,
            model=str(config.model_config.model),
            writes=self.settings.writes,
            dma=config.device_config.device_type != "cpu",
            recompute=strong_memory_order(),
            wants_arena=role is Role.WORKER,
            client=f"kvkeep {__version__} vllm {vllm.__version__}",
            chunk_tokens=self.settings.chunk_tokens,
        )

    def _client(
        self, hello: m.Hello, on_push: Callable[[m.ServerMessage], None] | None = None
    ) -> Client:
        role = Role(hello.role).name.lower()
        return Client(
            self.settings.socket,
            hello,
            on_push=on_push,
            log=lambda text: _log.info("%s (%s)", text, role),
        )

    def _guard(self, action: Callable[[], T], otherwise: T) -> T:
        """Run a hook; on any error log, count, and stay out of this engine from then on."""
        try:
            return action()
        except Exception:
            self.errors += 1
            _log.exception("kvkeep: internal error; this engine goes on without kvkeep")
            if self.scheduler_side is not None:
                self.scheduler_side.retire()
                self._retired, self.scheduler_side = self.scheduler_side, None
            return otherwise
