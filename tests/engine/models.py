"""Small models and adapters that the engine tests make themselves: random weights, no download."""

import json
from pathlib import Path


def make_gemma3(folder: Path) -> Path:
    """A tiny random Gemma3 with sliding-window and full layers: three KV groups under vLLM."""
    import torch
    from transformers import AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

    from kvkeep.bench.model import smollm2_dir

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir())
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=256,
        max_position_embeddings=4096,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_lora(folder: Path, rank: int = 8) -> Path:
    """A random LoRA adapter for SmolLM2-135M, large enough to change the answer."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from kvkeep.bench.model import smollm2_dir

    config = AutoConfig.from_pretrained(smollm2_dir())
    head = config.hidden_size // config.num_attention_heads
    widths = {"q_proj": config.hidden_size, "v_proj": config.num_key_value_heads * head}
    torch.manual_seed(1)
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for name, width in widths.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, config.hidden_size) * 0.05
            tensors[f"{path}.lora_B.weight"] = torch.randn(width, rank) * 0.05
    save_file(tensors, folder / "adapter_model.safetensors")
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(widths),
        "base_model_name_or_path": "",
    }
    (folder / "adapter_config.json").write_text(json.dumps(description))
    return folder
