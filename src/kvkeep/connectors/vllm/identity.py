"""Says when two engines' and two requests' KV are the same bytes, in vLLM's terms.

The layout fingerprint covers model, weights, dtypes, rope, tensor layout and parallel split
(DESIGN section 3). A request that uses something this version does not know is neither looked up
nor stored.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from blake3 import blake3

from kvkeep.core.layout import fingerprint
from kvkeep.types import Fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".json")


def engine_fingerprint(
    vllm_config: "VllmConfig", tensors: Mapping[str, object], *, chunk_tokens: int, rank: int
) -> Fingerprint:
    """The fingerprint of one rank's objects."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    text = model.hf_text_config
    return fingerprint(
        {
            "engine": "vllm",
            "model": str(model.model),
            "weights": weights_digest(vllm_config),
            "dtype": str(model.dtype),
            "kv_dtype": str(cache.cache_dtype),
            "kv_scales": str(getattr(cache, "calculate_kv_scales", None)),
            "quantization": _plain(
                [model.quantization, getattr(model.hf_config, "quantization_config", None)]
            ),
            "rope": _plain(
                [
                    getattr(text, name, None)
                    for name in ("rope_parameters", "rope_theta", "rope_scaling")
                ]
            ),
            "attention": _plain(
                [
                    getattr(text, name, None)
                    for name in ("sliding_window", "attention_chunk_size", "layer_types")
                ]
            ),
            "tensors": tensors,
            "block_tokens": int(cache.block_size),
            "chunk_tokens": chunk_tokens,
            "world_size": parallel.world_size,
            "rank": rank,
            "parallel": _plain(
                [
                    getattr(parallel, f"{kind}_parallel_size", 1)
                    for kind in ("tensor", "pipeline", "prefill_context", "decode_context")
                ]
            ),
        }
    )


def weights_digest(vllm_config: "VllmConfig") -> str:
    """Content digest of a local model, the commit of a hub model, else a private random name."""
    model = vllm_config.model_config
    load_format = str(getattr(vllm_config.load_config, "load_format", "auto"))
    if load_format.endswith("dummy"):
        return f"dummy:{model.seed}"
    path = Path(model.model)
    if path.is_dir():
        return directory_digest(path)
    if path.is_file():
        return _file_digest(path)
    commit = getattr(model.hf_config, "_commit_hash", None) or model.revision
    # Without an identity nothing may be shared with anybody, ourselves after a restart included.
    return f"commit:{commit}" if commit else f"unknown:{secrets.token_hex(16)}"


def directory_digest(path: Path) -> str:
    """Digest over names and contents of all model files of a directory."""
    digest = blake3()
    for file in sorted(p for p in path.rglob("*") if p.suffix in _WEIGHTS and p.is_file()):
        name = str(file.relative_to(path)).encode()
        digest.update(len(name).to_bytes(4, "little") + name)
        digest.update(bytes.fromhex(_file_digest(file)))
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    """BLAKE3 of a file; remembered under the user's cache directory by path, size and mtime."""
    stat = path.stat()
    mark = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    memo = root / "kvkeep" / "digests" / blake3(mark.encode()).hexdigest()
    try:
        return bytes.fromhex(memo.read_text()).hex()
    except (OSError, ValueError):
        pass
    digest = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        fresh = memo.with_suffix(f".{os.getpid()}")
        fresh.write_text(digest)
        fresh.replace(memo)
    except OSError:  # a read-only home only costs the time to digest again
        pass
    return digest


def bypass_reason(request: "Request") -> str | None:
    """Why a request is neither looked up nor stored, or None."""
    known = {
        "lora_request": "a LoRA adapter",
        "mm_features": "multimodal inputs",
        "prompt_embeds": "prompt embeddings",
        "prompt_is_token_ids": "prompt embeddings",
        "pooling_params": "pooling",
        "resumable": "a streaming session",
    }
    for name, words in known.items():
        value = getattr(request, name, None)
        if value is not None and value is not False and value != []:
            return words
    if request.prompt_token_ids is None:
        return "a prompt without token ids"
    if getattr(request, "replay_start", 0):
        return "a replayed window"
    return None


def _plain(value: object) -> str:
    """A nested config value as canonical text."""
    return json.dumps(value, sort_keys=True, default=str)
