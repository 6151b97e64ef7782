"""Scenarios: what kvkeep stays out of, and what it refuses at start."""

from typing import Any

from tests.engine.child import Engine, query


def wrong_policy(socket: str) -> Any:
    """vLLM's default load-failure policy is refused at start, with what to type."""
    transfer = {
        "kv_connector": "KVKeepConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"socket": socket},
    }
    try:
        Engine(socket, {"kv_transfer_config": transfer})
    except Exception as error:
        return {"error": str(error), "type": type(error).__name__}
    return {"error": ""}


def salts(socket: str) -> Any:
    """A cache salt separates; the same salt shares."""
    from vllm import SamplingParams

    engine = Engine(socket)
    engine.wait_ready()
    engine.clear()
    prompt = engine.tokens(400)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    cached = []
    for salt in ("a", "a", "b", None, "a"):
        engine.forget_locally()
        inputs: Any = {"prompt_token_ids": prompt}
        if salt is not None:
            inputs["cache_salt"] = salt
        cached.append(engine.llm.generate([inputs], params, use_tqdm=False)[0].num_cached_tokens)
    return {"cached": cached, "errors": engine.connector.errors}


def groups(socket: str, model: str) -> Any:
    """A model with several KV groups: kvkeep stays out, the engine works."""
    engine = Engine(socket, {"model": model})
    prompt = [(i * 7919) % 1000 + 3 for i in range(600)]
    first = engine.one(prompt, 4)
    engine.llm.reset_prefix_cache()
    second = engine.one(prompt, 4)
    return {
        "off": engine.connector.settings.off,
        "same": first.tokens == second.tokens,
        "cached": second.cached,
        "objects": query(socket, "status")["l1"]["objects"],
        "errors": engine.connector.errors,
    }


def adapters(socket: str, adapter: str) -> Any:
    """A request with a LoRA adapter is neither looked up nor stored; others are."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    engine = Engine(socket, {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8})
    engine.wait_ready()
    engine.clear()
    prompt = engine.tokens(400)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    lora = LoRARequest("a", 1, adapter)
    inputs: Any = {"prompt_token_ids": prompt}
    rows = []
    for request in (lora, None, lora, None):
        engine.forget_locally()
        output = engine.llm.generate([inputs], params, use_tqdm=False, lora_request=request)[0]
        rows.append((output.num_cached_tokens, list(output.outputs[0].token_ids)))
    explained = query(socket, "explain")
    return {
        "cached": [row[0] for row in rows],
        "tokens": [row[1] for row in rows],
        "explain": explained,
        "errors": engine.connector.errors,
    }
