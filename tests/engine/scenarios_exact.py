"""Scenarios: a hit from kvkeep is exact."""

import random
from typing import Any

from tests.engine.child import Engine


def exact(socket: str, dtype: str, sizes: list[int]) -> Any:
    """Cold, vLLM's own hit, and kvkeep's hit of the same prefix, for random windows of text.

    The chunk is one block here, so that both hits split the prefill at the same token.
    """
    engine = Engine(socket, {"dtype": dtype}, chunk_tokens=32)
    engine.wait_ready()
    text = engine.tokens(6000)
    rng = random.Random(7)
    rows = []
    for size in sizes:
        start = rng.randint(0, len(text) - size)
        prompt = text[start : start + size]
        engine.clear()
        cold = engine.generate([prompt], 16, logprobs=5)[0]
        native = engine.generate([prompt], 16, logprobs=5)[0]
        engine.forget_locally()
        external = engine.generate([prompt], 16, logprobs=5)[0]
        rows.append(
            {
                "cold_cached": cold.cached,
                "native_cached": native.cached,
                "external_cached": external.cached,
                "possible": (size - 1) // 32 * 32,
                "external_is_native": external == native,
                "external_is_cold": external.tokens == cold.tokens,
            }
        )
    return rows


def second_process(socket: str, prompt_tokens: int) -> Any:
    """One answer; run twice, in two processes."""
    engine = Engine(socket, chunk_tokens=256)
    engine.wait_ready()
    prompt = engine.tokens(prompt_tokens)
    output = engine.one(prompt)
    engine.flush()
    return {"tokens": output.tokens, "cached": output.cached, "errors": engine.connector.errors}
