"""Scenarios: what a request wishes and is told, what vLLM counts, resets, and autostart."""

import os
import signal
import socket as sockets
import struct
from typing import Any

from tests.engine.child import Engine, query

WHAT_IT_SAYS = "kv_transfer_params"


def _ask(engine: Engine, prompt: list[int], wishes: Any = None) -> dict[str, Any]:
    """One request: tokens, vLLM's cached tokens, and what its answer says about kvkeep."""
    from vllm import SamplingParams

    extra = None if wishes is None else {WHAT_IT_SAYS: {"other": 1, "kvkeep": wishes}}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra)
    inputs: Any = [{"prompt_token_ids": prompt}]
    output = engine.llm.generate(inputs, params, use_tqdm=False)[0]
    told = (output.kv_transfer_params or {}).get("kvkeep", {})
    return {
        "tokens": list(output.outputs[0].token_ids),
        "cached": output.num_cached_tokens,
        "hits": told.get("hit_tokens"),
        "id": told.get("request_id"),
    }


def wishes(socket: str) -> Any:
    """The words a request may say, one after another, on an empty cache; then counts and reset."""
    engine = Engine(socket)
    engine.wait_ready()
    engine.clear()
    text = engine.tokens(2000)
    prompt, other = text[:400], text[1000:1400]
    rows: dict[str, Any] = {}

    def ask(name: str, of: list[int], said: Any = None, *, keep: bool = False) -> None:
        if not keep:
            engine.forget_locally()
        rows[name] = _ask(engine, of, said)

    ask("no_store", prompt, {"no_store": True})
    ask("after_no_store", prompt)
    ask("no_lookup", prompt, {"no_lookup": True})
    ask("plain", prompt, {"prefetch_deadline_ms": 0})
    ask("own_hit", prompt, keep=True)
    ask("bad_key", other, {"no_stroe": True})
    ask("after_bad_key", other)
    ask("short", other[:20])
    note = query(socket, "explain", rows["bad_key"]["id"])
    counted = {
        name: engine.metric(f"vllm:kvkeep_{name}")
        for name in ("lookups", "hit_tokens", "loads", "loaded_tokens", "stored_chunks")
    }
    counted["server_up"] = engine.metric("vllm:kvkeep_server_up")
    reset = engine.llm.reset_prefix_cache(reset_connector=True)
    after_reset = _ask(engine, prompt)
    stored_again = _again(engine, prompt)
    return {
        "rows": rows,
        "note": str(note),
        "counted": counted,
        "log": _log_line(engine),
        "reset": reset,
        "after_reset": after_reset,
        "stored_again": stored_again,
        "errors": engine.connector.errors,
    }


def _again(engine: Engine, prompt: list[int]) -> dict[str, Any]:
    engine.forget_locally()
    return _ask(engine, prompt)


def _log_line(engine: Engine) -> str:
    """What vLLM's logger prints of an interval with one hit."""
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    lines: list[str] = []
    logger = KVConnectorLogging(engine.llm.llm_engine.vllm_config.kv_transfer_config)
    stats = engine.connector.build_kv_connector_stats()
    stats.hit("l1", 384)
    stats.load(0.002, beside=True, failed=False)
    logger.observe(stats.to_dict())
    logger.observe(engine.connector.build_kv_connector_stats().to_dict())
    logger.log(log_fn=lambda text, *values: lines.append(text % values))
    return lines[0]


def autostarted(socket: str) -> Any:
    """An engine that starts its own server: who serves, and whether a prompt is found again."""
    extra = {"socket": socket, "chunk_tokens": 64, "autostart": True}
    extra["autostart_args"] = "--l1-size 256MiB --no-http"
    transfer = {
        "kv_connector": "KVKeepConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    engine = Engine(socket, {"kv_transfer_config": transfer})
    engine.wait_ready(60)
    prompt = engine.tokens(300)
    _ask(engine, prompt)
    again = _again(engine, prompt)
    pid = server_pid(socket)
    return {
        "cached": again["cached"],
        "server": pid,
        "parent": parent_of(pid),
        "own_session": os.getsid(pid) != os.getsid(0),
        "errors": engine.connector.errors,
    }


def server_pid(socket: str) -> int:
    """The process that listens on this socket."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as sock:
        sock.connect(socket)
        size = struct.calcsize("3i")
        found = sock.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, size)
        return int(struct.unpack("3i", found)[0])


def parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def running(pid: int) -> bool:
    """Neither gone nor waiting to be reaped by somebody else."""
    return os.path.exists(f"/proc/{pid}") and _stat(pid)[0] != "Z"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; a process that is gone counts as reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()
    except OSError:
        return ["Z", "0"]


def killed_while_loading(socket: str) -> Any:
    """SIGKILL of the server in the middle of a load beside the engine; then a reset without it."""
    from tests.engine.scenarios_loading import Gate, Run
    from tests.engine.scenarios_server import _serve, arenas_mapped

    server = _serve(socket)
    try:
        engine = Engine(socket)
        engine.wait_ready()
        text = engine.tokens(3000)
        prompts = {"hit": text[:700], "one": text[1000:1150]}
        cold = {name: engine.one(prompt).tokens for name, prompt in prompts.items()}
        engine.forget_locally()
        run = Run(engine)
        with Gate(engine).closed() as gate:
            run.add("one", prompts["one"], 16)
            run.until(lambda: len(run.tokens("one")) >= 2, "decoding")
            run.add("hit", prompts["hit"], 16)
            run.until(gate.reached, "loading")
            server.send_signal(signal.SIGKILL)
            server.wait()
            run.until(lambda: not engine.side.client.up, "noticed")
            still_mapped = arenas_mapped()
            gate.open()
            run.finish()
        engine.wait_for(lambda: arenas_mapped() == 0, "unmapped", 10)
        return {
            "same": {name: run.tokens(name) == cold[name] for name in cold},
            "cached": run.outputs["hit"].num_cached_tokens,
            "still_mapped": still_mapped,
            "reset": engine.llm.reset_prefix_cache(reset_connector=True),
            "errors": engine.connector.errors,
        }
    finally:
        server.kill()
        server.wait()


def from_l2(socket: str, folder: str) -> Any:
    """Stored, the server restarted, and found in L2: alone, beside another request, and not asked.

    A lookup that has to wait for L2 holds up neither its own answer nor the other request's.
    """
    from tests.engine.scenarios_loading import Run
    from tests.engine.scenarios_server import _serve

    l2 = ("--set", f"l2.backends=fs://{folder}?name=disk", "--set", "l2.lookup_wait_s=20")
    server = _serve(socket, *l2)
    try:
        engine = Engine(socket)
        engine.wait_ready()
        text = engine.tokens(3000)
        prompt, other = text[:400], text[1000:1100]
        cold, cold_other = engine.one(prompt, 4).tokens, engine.one(other, 24).tokens
        engine.flush()
        query(socket, "wait_persisted", "20")
        server = _restarted(engine, server, socket, l2)
        not_asked = _ask(engine, prompt, {"prefetch_deadline_ms": 0, "no_store": True})
        engine.forget_locally()
        pending = engine.side.lookups
        asked = []
        real = pending._wait

        def wait(call: Any) -> None:
            real(call)
            asked.append(bool(call.ticket))

        pending._wait = wait
        run = Run(engine)
        run.add("one", other, 24)
        run.until(lambda: len(run.tokens("one")) >= 2, "decoding")
        run.add("hit", prompt, 4)
        run.finish()
        told = run.outputs["hit"].kv_transfer_params["kvkeep"]["hit_tokens"]
        again = _again(engine, prompt)
        return {
            "same": [not_asked["tokens"] == cold, run.tokens("hit") == cold],
            "same_other": run.tokens("one") == cold_other,
            "not_asked": not_asked["hits"],
            "told": told,
            "pending": any(asked),
            "again": again["hits"],
            "errors": engine.connector.errors,
        }
    finally:
        server.kill()
        server.wait()


def _restarted(engine: Engine, server: Any, socket: str, l2: tuple[str, ...]) -> Any:
    from tests.engine.scenarios_server import _serve

    server.terminate()
    server.wait()
    engine.wait_for(lambda: not engine.side.client.up, "noticed")
    server = _serve(socket, *l2)
    engine.wait_ready()
    engine.forget_locally()
    return server
