"""What gives KV its meaning in vLLM is in its name: weights, types, rope, quantisation, split."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.connectors.vllm.identity import bypass_reason, directory_digest, engine_fingerprint
from kvkeep.types import Fingerprint


def config(folder: Path) -> Any:
    """vLLM's configuration, as far as the fingerprint looks at it."""
    text = SimpleNamespace(
        rope_parameters=None,
        rope_theta=10_000.0,
        rope_scaling=None,
        sliding_window=None,
        attention_chunk_size=None,
        layer_types=None,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(folder),
            dtype="bfloat16",
            quantization=None,
            hf_text_config=text,
            hf_config=SimpleNamespace(quantization_config=None, _commit_hash=None),
            revision=None,
            seed=0,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, calculate_kv_scales=False),
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        load_config=SimpleNamespace(load_format="auto"),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_bytes(b"{}")
    return model


def name(vllm: Any, *, tensors: Any = None, chunk_tokens: int = 256, rank: int = 0) -> Fingerprint:
    return engine_fingerprint(vllm, tensors or {"shape": [1]}, chunk_tokens=chunk_tokens, rank=rank)


CHANGES: dict[str, Callable[[Any], None]] = {
    "dtype": lambda v: setattr(v.model_config, "dtype", "float16"),
    "KV dtype": lambda v: setattr(v.cache_config, "cache_dtype", "fp8"),
    "KV scales": lambda v: setattr(v.cache_config, "calculate_kv_scales", True),
    "quantisation": lambda v: setattr(v.model_config, "quantization", "awq"),
    "its parameters": lambda v: setattr(
        v.model_config.hf_config, "quantization_config", {"bits": 4}
    ),
    "rope theta": lambda v: setattr(v.model_config.hf_text_config, "rope_theta", 1e6),
    "rope scaling": lambda v: setattr(
        v.model_config.hf_text_config, "rope_scaling", {"factor": 4.0}
    ),
    "window": lambda v: setattr(v.model_config.hf_text_config, "sliding_window", 512),
    "block": lambda v: setattr(v.cache_config, "block_size", 32),
    "world size": lambda v: setattr(v.parallel_config, "world_size", 2),
    "split": lambda v: setattr(v.parallel_config, "tensor_parallel_size", 2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_of_these_is_another_name(folder: Path, change: Callable[[Any], None]) -> None:
    vllm = config(folder)
    before = name(vllm)
    assert name(config(folder)) == before, "the same engine again shares"
    change(vllm)
    assert name(vllm) != before


def test_rank_chunk_and_tensors_are_part_of_it(folder: Path) -> None:
    vllm = config(folder)
    names = [
        name(vllm),
        name(vllm, rank=1),
        name(vllm, chunk_tokens=512),
        name(vllm, tensors={"shape": [2]}),
    ]
    assert len(set(names)) == 4


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "model-2.safetensors"])
def test_other_weights_under_the_same_name(folder: Path, file: str) -> None:
    """Two sets of weights in one place, one after the other: nothing of the first is found."""
    before = name(config(folder))
    (folder / file).write_bytes(b"other, and of another size")
    assert name(config(folder)) != before


def test_the_name_of_a_file_counts_and_what_is_no_part_of_the_model_does_not(folder: Path) -> None:
    before = directory_digest(folder)
    (folder / "README.md").write_text("a note")
    assert directory_digest(folder) == before
    (folder / "model.safetensors").rename(folder / "renamed.safetensors")
    assert directory_digest(folder) != before


def test_a_hub_model_is_its_commit_and_an_unknown_one_is_shared_with_nobody(folder: Path) -> None:
    def hub(commit: str | None) -> Any:
        vllm = config(folder)
        vllm.model_config.model = "org/model"
        vllm.model_config.hf_config._commit_hash = commit
        return vllm

    assert name(hub("a")) == name(hub("a")) != name(hub("b"))
    assert name(hub(None)) != name(hub(None))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("lora_request", object(), "LoRA"),
        ("mm_features", [object()], "multimodal"),
        ("prompt_embeds", object(), "embeddings"),
        ("pooling_params", object(), "pooling"),
    ],
)
def test_what_this_version_cannot_name_is_left_alone(field: str, value: object, says: str) -> None:
    plain: Any = SimpleNamespace(prompt_token_ids=[1, 2])
    assert bypass_reason(plain) is None
    request: Any = SimpleNamespace(prompt_token_ids=[1, 2], **{field: value})
    assert says in (bypass_reason(request) or "")
