"""What the user typed in `--kv-transfer-config`, checked at start; refusals say what to type."""

import os
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvkeep.config import load_config
from kvkeep.engine_flag import ENGINE_FLAG, EXTRA, engine_flag, flag_problems
from kvkeep.errors import ConfigError
from kvkeep.types import GroupKind

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

DEFAULT_CHUNK_TOKENS = 256
_NEEDED = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
    "bind_kv_cache_manager",
    "register_kv_caches",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
)
KNOWN_VERSIONS = ("0.32",)


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked settings of one connector."""

    socket: str
    chunk_tokens: int  # a multiple of the engine's block size
    block_tokens: int
    reads: bool  # looks up and loads; a pure producer only stores
    writes: bool
    autostart: bool  # start a server if none is there
    autostart_args: tuple[str, ...]  # flags of `kvkeep serve`
    off: str | None  # why kvkeep stays out of this engine altogether, or None


def read(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> Settings:
    """Settings from vLLM's configuration. Raises ConfigError for what a user must change."""
    transfer = vllm_config.kv_transfer_config
    extra = _checked_extra(transfer)
    block = int(vllm_config.cache_config.block_size)
    wanted = int(extra.get("chunk_tokens", DEFAULT_CHUNK_TOKENS))
    return Settings(
        socket=extra.get("socket") or load_config(env=os.environ).config.socket.path,
        chunk_tokens=-(-wanted // block) * block,
        block_tokens=block,
        reads=transfer.kv_role != "kv_producer",
        writes=transfer.kv_role != "kv_consumer",
        autostart=extra.get("autostart", False),
        autostart_args=tuple(shlex.split(extra.get("autostart_args", ""))),
        off=_unsupported(vllm_config, kv_cache_config),
    )


def _checked_extra(transfer: "KVTransferConfig") -> dict[str, Any]:
    """The user's extra settings. The connector's name is not judged: vLLM built us by it."""
    typed = {
        **ENGINE_FLAG,
        "kv_role": transfer.kv_role,
        "kv_load_failure_policy": transfer.kv_load_failure_policy,
        EXTRA: transfer.kv_connector_extra_config,
    }
    problems = flag_problems(typed)
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(f"{problems[0]}. Type {engine_flag(typed)}")
    if problems:
        raise ConfigError(problems[0])
    return dict(transfer.kv_connector_extra_config)


def missing_hooks(base: type) -> list[str]:
    """Hooks this connector needs that the installed vLLM's base class lacks."""
    return [name for name in _NEEDED if not hasattr(base, name)]


def kind_of(spec: object) -> GroupKind | None:
    """The kind of a vLLM KV cache spec, or None for one this version does not know."""
    name = type(spec).__name__
    return GroupKind.FULL_ATTENTION if name in ("FullAttentionSpec", "MLAAttentionSpec") else None


def _unsupported(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Why this engine's KV is neither looked up nor stored, or None."""
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        return "engines with several ranks are not supported yet"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        return "context parallelism is not supported yet"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        return f"models with {len(groups)} KV groups are not supported yet"
    if kind_of(groups[0].kv_cache_spec) is None:
        kind = type(groups[0].kv_cache_spec).__name__
        return f"KV groups of kind {kind} are not supported yet"
    return None
