"""The child process of the engine tests: one real vLLM engine, one scenario, one JSON answer.

`python -m tests.engine.child SCENARIO SOCKET OPTIONS_AS_JSON`. Scenarios live in scenarios_*.py and
return what the tests assert on. vLLM keeps global state, so every engine gets a process of its own.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvkeep.errors import KVKeepError

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_CPU_KVCACHE_SPACE=os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
    OMP_NUM_THREADS="1",
    VLLM_LOGGING_LEVEL="WARNING",
)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

ANSWER = "ANSWER "
SCENARIOS = (
    "scenarios_exact",
    "scenarios_publish",
    "scenarios_server",
    "scenarios_policy",
    "scenarios_loading",
    "scenarios_wishes",
    "scenarios_l2",
    "scenarios_chaos",
)


def text_tokens(tokenizer: Any, count: int, offset: int = 0) -> list[int]:
    """Tokens of a real text: the documents of this repository."""
    root = os.path.join(os.path.dirname(__file__), "..", "..")
    text = ""
    for name in ("LICENSE", "docs/ARCHITECTURE.md", "docs/OPERATIONS.md"):
        with open(os.path.join(root, name)) as file:
            text += file.read()
    ids: list[int] = tokenizer(text).input_ids
    assert len(ids) >= offset + count, f"the documents have only {len(ids)} tokens"
    return ids[offset : offset + count]


@dataclass
class Engine:
    """One in-process vLLM engine with kvkeep."""

    socket: str
    options: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int = 64
    async_scheduling: bool = False

    def __post_init__(self) -> None:
        from kvkeep.bench.model import smollm2_dir

        if self.async_scheduling:
            from tests.engine import asyncpatch

            asyncpatch.allow_async_scheduling_on_cpu()
        from vllm import LLM

        extra = {"socket": self.socket, "chunk_tokens": self.chunk_tokens}
        defaults: dict[str, Any] = {
            "model": str(smollm2_dir()),
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": 32,
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "async_scheduling": self.async_scheduling,
            "disable_log_stats": False,
            "kv_transfer_config": {
                "kv_connector": "KVKeepConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra,
            },
        }
        self.llm = LLM(**{**defaults, **self.options})

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's connector."""
        return self.scheduler.connector

    @property
    def side(self) -> Any:
        return self.connector.scheduler_side

    @property
    def worker(self) -> Any:
        """The worker's connector (same process)."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Until the server knows every rank, so that lookups are served, and has all its memory.

        A server that is busy populating has little room yet, and refuses a chunk.
        """
        self.wait_for(lambda: self.side.client.ready is not None, "ready", timeout_s)
        self.wait_for(self._populated, "populated", timeout_s)

    def _populated(self) -> bool:
        try:
            l1 = query(self.socket, "status")["l1"]
        except KVKeepError:  # struck this moment
            return False
        return bool(l1["populated_bytes"] == l1["capacity_bytes"])

    @staticmethod
    def wait_for(condition: Any, what: str, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not {what} within {timeout_s} s"
            time.sleep(0.01)

    def tokens(self, count: int, offset: int = 0) -> list[int]:
        return text_tokens(self.llm.get_tokenizer(), count, offset)

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 16, *, logprobs: int | None = None
    ) -> list["Output"]:
        """Greedy; one Output per prompt."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs
        )
        inputs: Any = [{"prompt_token_ids": p} for p in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [Output.of(o) for o in outputs]

    def one(self, prompt: list[int], max_tokens: int = 16) -> "Output":
        return self.generate([prompt], max_tokens)[0]

    def forget_locally(self) -> None:
        """Drop vLLM's own prefix cache, after letting late reports come in."""
        self.flush()
        assert self.llm.reset_prefix_cache()

    def flush(self) -> None:
        """One more short request: the last step's output is then processed in every mode."""
        self.generate([[5, 6, 7]], 2)

    def clear(self) -> None:
        """Empty kvkeep and vLLM's own cache."""
        self.forget_locally()
        query(self.socket, "clear")

    def metric(self, name: str) -> float:
        return float(sum(m.value for m in self.llm.get_metrics() if m.name == name))


@dataclass
class Output:
    """What a test looks at in a request's output."""

    tokens: list[int]
    cached: int
    logprobs: list[list[tuple[int, float]]] | None = None

    @classmethod
    def of(cls, output: Any) -> "Output":
        best = output.outputs[0]
        rows = None
        if best.logprobs is not None:
            rows = [sorted((t, p.logprob) for t, p in row.items()) for row in best.logprobs]
        return cls(list(best.token_ids), int(output.num_cached_tokens or 0), rows)


def query(socket: str, what: str, argument: str = "") -> Any:
    """Ask the server as an operator."""
    from kvkeep.client import Client
    from kvkeep.types import Role
    from kvkeep.wire import messages as m

    hello = m.Hello(m.VERSIONS, "test-operator", Role.OPERATOR, wants_arena=False)
    client = Client(socket, hello)
    client.connect()
    try:
        reply = client.ask(lambda seq: m.Query(seq, what, argument), 10.0)
        assert isinstance(reply, m.Answer), reply
        return json.loads(reply.body)
    finally:
        client.close()


class StoreReader:
    """Reads stored chunks of an engine's layout through a session of its own."""

    def __init__(self, engine: Engine) -> None:
        from kvkeep.client import Client
        from kvkeep.types import Role
        from kvkeep.wire import messages as m

        side = engine.worker.worker_side
        hello = side.client._hello
        mine = m.Hello(
            m.VERSIONS,
            "store-reader",
            Role.BOTH,
            rows=hello.rows,
            fingerprint=hello.fingerprint,
            writes=False,
        )
        self.chunk_tokens = engine.chunk_tokens
        self.size = hello.rows[0].object_bytes
        self.client: Any = Client(engine.socket, mine)
        self.client.start()
        engine.wait_for(lambda: self.client.ready is not None, "reader ready")

    def chunks(self, prompt: list[int]) -> list[Any]:
        """The stored leading chunks of a prompt, as float32 arrays."""
        import ctypes
        from array import array

        import numpy as np

        from kvkeep.core.keys import extend_chain, root_hash
        from kvkeep.types import EndOutcome
        from kvkeep.wire import messages as m

        root = root_hash(self.client.ready.fingerprint, None)
        hashes = b"".join(extend_chain(root, prompt, self.chunk_tokens))
        if not hashes:
            return []
        found = self.client.ask(lambda seq: m.Lookup(seq, "reader", hashes), 10.0)
        assert isinstance(found, m.Found)
        if not found.lease:
            return []
        rows = []
        for offset in array("Q", found.columns[0].offsets):
            raw = ctypes.string_at(self.client.mapping.address + offset, self.size)
            rows.append(np.frombuffer(raw, np.float32))
        self.client.notify(m.End(found.lease, (0,), EndOutcome.USED))
        return rows

    def close(self) -> None:
        self.client.close()


def differing(clean: dict[str, list[Any]], now: dict[str, list[Any]]) -> dict[str, int]:
    """Chunks stored now, and how many of them differ from the clean store by > 1e-3."""
    import numpy as np

    stored = wrong = 0
    for name, chunks in now.items():
        for index, chunk in enumerate(chunks):
            stored += 1
            wrong += float(np.abs(chunk - clean[name][index]).max()) > 1e-3
    return {"stored": stored, "wrong": wrong}


@contextlib.contextmanager
def failing_loads(engine: Engine, first_chunk: int) -> Iterator[list[str]]:
    """Every load scribbles over its chunks from `first_chunk` on and reports them as broken."""
    side = engine.worker.worker_side
    real, hit = side._retrieve, []

    def retrieve(task: Any) -> tuple[set[int], set[int]]:
        broken, stale = real(task)
        load = task.load
        bad = set(range(first_chunk, len(load.blocks)))
        for index in bad:
            for block in load.blocks[index]:
                if block is not None:
                    for (
                        tensor
                    ) in engine.core.model_executor.driver_worker.worker.model_runner.kv_caches:
                        tensor[block].fill_(1.0)
        if bad:
            hit.append(load.request)
        return broken | bad, stale - bad

    side._retrieve = retrieve
    try:
        yield hit
    finally:
        del side._retrieve


def main() -> None:
    name, socket, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    for module in SCENARIOS:
        scenario = getattr(importlib.import_module(f"tests.engine.{module}"), name, None)
        if scenario is not None:
            break
    else:
        raise SystemExit(f"no scenario {name}")
    print(ANSWER + json.dumps(scenario(socket, **options)), flush=True)
    # vLLM's own teardown may take long; everything of ours is already closed or dies with us.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
