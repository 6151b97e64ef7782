"""Scenarios: what is stored is right, in every scheduling mode, and garbage is never published."""

from typing import Any

from tests.engine.child import Engine, StoreReader, differing, failing_loads


def chats(socket: str, mode: str, chats: int, blocks: int | None = None) -> Any:
    """Two-turn chats at once; the second turn hits the first turn's generated tokens.

    Also a small KV space (preemption) and n-gram speculation, by `mode` and `blocks`.
    """
    options: dict[str, Any] = {"max_num_batched_tokens": 256}
    if mode == "ngram":
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 4,
        }
    if blocks is not None:
        options |= {"num_gpu_blocks_override": blocks, "max_model_len": 1024}
    engine = Engine(socket, options, async_scheduling=mode == "async")
    engine.wait_ready()
    reader = StoreReader(engine)
    answer_tokens = 70
    text = engine.tokens(5000)
    again = text[500:560] * 2 if mode == "ngram" else []  # something for the drafter to find
    first = [text[i * 700 : i * 700 + 180 + 37 * i] + again for i in range(chats)]
    cold1, second, cold2 = [], [], []
    clean: dict[str, list[Any]] = {}
    for i, prompt in enumerate(first):
        engine.clear()
        cold1.append(engine.one(prompt, answer_tokens).tokens)
        second.append(prompt + cold1[i] + text[3000 + i * 20 : 3050 + i * 20])
        engine.clear()
        cold2.append(engine.one(second[i]).tokens)
        engine.flush()
        clean[str(i)] = reader.chunks(second[i])
    engine.clear()
    preempted_before = engine.metric("vllm:num_preemptions")
    one = engine.generate(first, answer_tokens)
    engine.forget_locally()
    two = engine.generate(second)
    engine.forget_locally()
    three = engine.generate(second)
    engine.flush()
    now = {str(i): reader.chunks(prompt) for i, prompt in enumerate(second)}
    reader.close()
    chunk = engine.chunk_tokens
    return {
        "same1": [o.tokens == c for o, c in zip(one, cold1, strict=True)],
        "same2": [o.tokens == c for o, c in zip(two, cold2, strict=True)],
        "same3": [o.tokens == c for o, c in zip(three, cold2, strict=True)],
        "cached2": [o.cached for o in two],
        "best2": [(len(p) + answer_tokens - 1) // chunk * chunk for p in first],
        "cached3": [o.cached for o in three],
        "prompts2": [len(p) for p in second],
        "store": differing(clean, now),
        "scheduler": type(engine.scheduler).__name__,
        "preemptions": engine.metric("vllm:num_preemptions") - preempted_before,
        "accepted": engine.metric("vllm:spec_decode_num_accepted_tokens"),
        "still_staged": len(engine.side.staged),
        "errors": engine.connector.errors,
    }


def shared_prefix(socket: str) -> Any:
    """Several requests on one stored prefix at once, with different ends."""
    engine = Engine(socket)
    engine.wait_ready()
    text = engine.tokens(3000)
    prompts = [text[:640] + text[1000 + 100 * i : 1040 + 100 * i + i] for i in range(6)]
    cold = []
    for prompt in prompts:
        engine.clear()
        cold.append(engine.one(prompt).tokens)
    engine.clear()
    engine.one(text[:640])
    engine.forget_locally()
    outputs = engine.generate(prompts)
    return {
        "same": [o.tokens == c for o, c in zip(outputs, cold, strict=True)],
        "cached": [o.cached for o in outputs],
        "leases": len(engine.side.loading),
        "errors": engine.connector.errors,
    }


def failed_load(socket: str, mode: str, budget: int) -> Any:
    """A load fails at a chunk while others share the prefix; then the same prompts again.

    Compared with cold: the failing batch, from vLLM's own cache, from kvkeep together, from kvkeep
    one by one; and the store chunk by chunk with a clean one.
    """
    options: dict[str, Any] = {"max_num_batched_tokens": budget}
    engine = Engine(socket, options, async_scheduling=mode == "async")
    engine.wait_ready()
    reader = StoreReader(engine)
    text = engine.tokens(4000)
    prompts = {
        "p": text[:500],
        "q": text[:350] + text[2000:2130],
        "w": text[:230] + text[3000:3150],
    }
    cold: dict[str, list[int]] = {}
    clean: dict[str, list[Any]] = {}
    for name, prompt in prompts.items():
        engine.clear()
        cold[name] = engine.one(prompt).tokens
        engine.flush()
        clean[name] = reader.chunks(prompt)
    result: dict[str, Any] = {}
    for case, names in (("alone", ["p"]), ("together", ["p", "q", "w", "p"])):
        engine.clear()
        engine.one(prompts["p"][:257], 2)
        engine.forget_locally()
        batch = [prompts[name] for name in names]
        wanted = [cold[name] for name in names]
        with failing_loads(engine, first_chunk=2) as failed:
            during = engine.generate(batch)
        rows: dict[str, Any] = {
            "during": [o.tokens for o in during] == wanted,
            "failed": len(failed),
        }
        rows["own_cache"] = [o.tokens for o in engine.generate(batch)] == wanted
        engine.forget_locally()
        now = {name: reader.chunks(prompts[name]) for name in set(names)}
        rows["store_after"] = differing(clean, now)
        again = engine.generate(batch)
        rows["kvkeep"] = [o.tokens for o in again] == wanted
        rows["kvkeep_cached"] = [o.cached for o in again]
        singles = []
        for prompt in batch:
            engine.forget_locally()
            singles.append(engine.one(prompt).tokens)
        rows["one_by_one"] = singles == wanted
        engine.flush()
        rows["store_end"] = differing(clean, {n: reader.chunks(prompts[n]) for n in set(names)})
        result[case] = rows
    reader.close()
    result["still_staged"] = len(engine.side.staged)
    result["errors"] = engine.connector.errors
    result["scheduler"] = type(engine.scheduler).__name__
    return result


def abort_in_flight(socket: str, mode: str) -> Any:
    """A request is aborted while its step runs, with a load that works and one that fails."""
    from tests.engine.child import query
    from vllm import SamplingParams

    engine = Engine(socket, async_scheduling=mode == "async")
    engine.wait_ready()
    reader = StoreReader(engine)
    text = engine.tokens(3000)
    prompt = text[:500]
    engine.clear()
    cold = engine.one(prompt).tokens
    engine.flush()
    clean = {"p": reader.chunks(prompt)}
    llm, core = engine.llm.llm_engine, engine.core
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    result: dict[str, Any] = {}
    for failing in (False, True):
        engine.clear()
        engine.one(prompt[:257], 2)
        engine.forget_locally()
        with failing_loads(engine, first_chunk=2 if failing else 10**6):
            llm.add_request("x", {"prompt_token_ids": prompt}, params)
            if mode == "async":
                llm.step()
                llm.abort_request(["x"])
                llm.add_request("y", {"prompt_token_ids": text[1500:1900]}, params)
            else:
                core.aborts_queue.put_nowait(list(engine.scheduler.requests))
                llm.step()
                llm.abort_request(["x"])
            while llm.has_unfinished_requests():
                llm.step()
        engine.flush()
        row: dict[str, Any] = {"store": differing(clean, {"p": reader.chunks(prompt)})}
        engine.forget_locally()
        output = engine.one(prompt)
        row["same"] = output.tokens == cold
        engine.flush()
        status = query(socket, "status")
        row["leases"] = status["leases"]
        row["reserved_bytes"] = status["l1"]["reserved_bytes"]
        row["staged"] = len(engine.side.staged)
        result["failing" if failing else "working"] = row
    reader.close()
    result["errors"] = engine.connector.errors
    return result
