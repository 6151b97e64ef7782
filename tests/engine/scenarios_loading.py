"""Scenarios: loads that run beside the engine, held open by a gate while the engine goes on."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.engine.child import Engine, query


class Gate:
    """Holds the loader's thread before a chunk, so that a test decides how long a load takes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.copied: list[list[int | None]] = []  # blocks of each chunk copied by the thread
        self._open = threading.Event()
        self._reached = threading.Event()

    @contextlib.contextmanager
    def closed(self, after_chunks: int = 1) -> Iterator["Gate"]:
        """Every load runs beside; its thread stops after so many chunks until `open`."""
        from kvkeep.connectors.vllm import worker_side

        blocks = self.engine.worker.worker_side.blocks
        real, inline_s = blocks.scatter, worker_side.INLINE_S

        def scatter(jobs: Any) -> int:
            if threading.current_thread().name == "kvkeep-loader":
                if len(self.copied) == after_chunks:
                    self._reached.set()
                    assert self._open.wait(60), "nobody opened the gate"
                self.copied += [list(ids) for _, ids in jobs]
            return int(real(jobs))

        blocks.scatter, worker_side.INLINE_S = scatter, -1.0
        try:
            yield self
        finally:
            self.open()
            del blocks.scatter
            worker_side.INLINE_S = inline_s

    def reached(self) -> bool:
        return self._reached.is_set()

    def open(self) -> None:
        self._open.set()


class Run:
    """Requests stepped by hand."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.llm = engine, engine.llm.llm_engine
        self.outputs: dict[str, Any] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.llm.add_request(name, {"prompt_token_ids": prompt}, params)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.llm.step():
                self.outputs[output.request_id] = output

    def until(self, condition: Any, what: str, most: int = 4000) -> None:
        """Step until it holds."""
        for _ in range(most):
            if condition():
                return
            self.step()
        raise AssertionError(f"not {what} within {most} steps")

    def finish(self) -> None:
        self.until(lambda: not self.llm.has_unfinished_requests(), "finished")

    def tokens(self, name: str) -> list[int]:
        return list(self.outputs[name].outputs[0].token_ids) if name in self.outputs else []

    def free_blocks(self) -> int:
        return int(self.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def beside(socket: str, mode: str) -> Any:
    """A long load while others decode: it ends well, is aborted, and is there while memory ends."""
    options = {"num_gpu_blocks_override": 44, "max_model_len": 1024}
    engine = Engine(socket, options, async_scheduling=mode == "async")
    engine.wait_ready()
    text = engine.tokens(5000)
    prompts = {
        "hit": text[:700],
        "one": text[1000:1150],
        "two": text[2000:2150],
        "late": text[3000:3400],
    }
    lengths = {"hit": 16, "one": 80, "two": 80, "late": 8}
    cold = {}
    for name, prompt in prompts.items():
        engine.clear()
        cold[name] = engine.one(prompt, lengths[name]).tokens
    result: dict[str, Any] = {}
    for case in (_ends_well, _aborted, _memory_ends):
        engine.clear()
        engine.one(prompts["hit"], 1)
        engine.forget_locally()
        run = Run(engine)
        free = run.free_blocks()
        row = case(run, prompts, lengths)
        run.finish()
        engine.flush()
        run.until(lambda run=run: not run.engine.scheduler.requests, "all gone", 50)
        status = query(socket, "status")
        done = [name for name in run.outputs if name in prompts and name != row.get("aborted")]
        row |= {
            "same": {name: run.tokens(name) == cold[name] for name in done},
            "leases": status["leases"],
            "reserved_bytes": status["l1"]["reserved_bytes"],
            "blocks_lost": free - run.free_blocks(),
            "loading": len(engine.side.loading),
        }
        result[case.__name__.strip("_")] = row
    result["errors"] = engine.connector.errors
    return result


def _begin(run: Run, gate: Gate, prompts: dict[str, Any], lengths: dict[str, int]) -> None:
    """`one` decodes, and the load of `hit` has begun and waits at the gate."""
    run.add("one", prompts["one"], lengths["one"])
    run.until(lambda: len(run.tokens("one")) >= 2, "decoding")
    run.add("hit", prompts["hit"], lengths["hit"])
    run.until(gate.reached, "loading")


def _ends_well(run: Run, prompts: dict[str, Any], lengths: dict[str, int]) -> dict[str, Any]:
    with Gate(run.engine).closed() as gate:
        _begin(run, gate, prompts, lengths)
        before = len(run.tokens("one"))
        run.step(6)
        decoded, answered = len(run.tokens("one")) - before, bool(run.tokens("hit"))
        gate.open()
        run.until(lambda: bool(run.tokens("hit")), "answered")
    run.finish()
    return {
        "decoded_meanwhile": decoded,
        "answered_meanwhile": answered,
        "cached": run.outputs["hit"].num_cached_tokens,
        "chunks": len(gate.copied),
    }


def _aborted(run: Run, prompts: dict[str, Any], lengths: dict[str, int]) -> dict[str, Any]:
    """Its blocks stay its own until the copy has ended; a later request then takes them."""
    with Gate(run.engine).closed() as gate:
        _begin(run, gate, prompts, lengths)
        held = run.free_blocks()
        run.llm.abort_request(["hit"])
        run.add("late", prompts["late"], lengths["late"])
        run.step(4)
        given_early = run.free_blocks() > held
        gate.open()
        run.finish()
    return {
        "aborted": "hit",
        "given_early": given_early,
        "chunks": len(gate.copied),
        "late": len(run.tokens("late")),
    }


def _memory_ends(run: Run, prompts: dict[str, Any], lengths: dict[str, int]) -> dict[str, Any]:
    """Others are preempted while the load holds its blocks; nobody's tokens change."""
    before = run.engine.metric("vllm:num_preemptions")
    with Gate(run.engine).closed() as gate:
        run.add("two", prompts["two"], lengths["two"])
        _begin(run, gate, prompts, lengths)
        hold = run.free_blocks()  # what is left besides the load
        taken: list[Any] = []
        pool = run.engine.scheduler.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(max(0, hold - 2))
        run.until(
            lambda: run.engine.metric("vllm:num_preemptions") > before, "somebody is preempted"
        )
        preempted_meanwhile = not run.tokens("hit")
        gate.open()
        run.until(lambda: bool(run.tokens("hit")), "answered")
        pool.free_blocks(taken)
        run.finish()
    return {"preempted_meanwhile": preempted_meanwhile, "chunks": len(gate.copied)}
