"""Scenarios with an L2 on disk: many requests for one stored prefix, and an L1 too small."""

import subprocess
import sys
import time
from typing import Any

from tests.engine.child import Engine, Output, query

_KVKEEP = [sys.executable, "-m", "kvkeep"]


class Server:
    """A `kvkeep serve` with an `fs` L2 below `place`; started and killed at will."""

    def __init__(self, socket: str, place: str, l1_size: str) -> None:
        self._command = [*_KVKEEP, "serve", "--socket", socket, "--l1-size", l1_size, "--no-http"]
        self._command += ["--l2", f"fs://{place}?capacity=2GiB"]
        # A hit is worth waiting for here, however slow the disk of this machine is.
        for setting in ("l2.lookup_wait_s=30", "l2.get_timeout_s=30", "l2.put_timeout_s=60"):
            self._command += ["--set", setting]
        self._command += ["--set", "l1.session_staging_fraction=1"]
        self._socket = socket
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait_persisted(self) -> None:
        command = [*_KVKEEP, "wait-persisted", "--socket", self._socket, "--timeout-s", "120"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def restart(self, engine: Engine) -> None:
        """L2 has everything; L1 is empty afterwards, and the engine has found the new server."""
        self.wait_persisted()
        epoch = engine.side.client.epoch
        self.kill()
        self.start()
        engine.wait_for(lambda: engine.side.client.epoch != epoch, "a new epoch")
        engine.wait_ready()


def _timed(engine: Engine, prompts: list[list[int]], wish: Any = None) -> tuple[float, list[Any]]:
    """All at once: (seconds, outputs)."""
    from vllm import SamplingParams

    extra = None if wish is None else {"kv_transfer_params": {"kvkeep": wish}}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    started = time.monotonic()
    outputs = engine.llm.generate(inputs, params, use_tqdm=False)
    return time.monotonic() - started, [Output.of(output) for output in outputs]


def stampede(socket: str, place: str, requests: int, prefix_tokens: int) -> Any:
    """Many requests at once for one prefix that is in L2 only; and the same without kvkeep."""
    server = Server(socket, place, "1GiB")
    server.start()
    try:
        engine = Engine(socket, {"max_model_len": 4096, "max_num_seqs": 64}, chunk_tokens=256)
        engine.wait_ready()
        prefix = engine.tokens(prefix_tokens)
        prompts = [[*prefix, *engine.tokens(16, prefix_tokens + 16 * i)] for i in range(requests)]
        engine.one(prefix, 2)
        engine.forget_locally()
        without_s, want = _timed(engine, prompts, {"no_lookup": True, "no_store": True})
        server.restart(engine)
        engine.forget_locally()
        with_s, got = _timed(engine, prompts)
        status = query(socket, "status")
        (store,) = status["l2"]
        return {
            "same": [a.tokens == b.tokens for a, b in zip(want, got, strict=True)],
            "cached": [output.cached for output in got],
            "fetched_objects": store["operations"]["get"]["outcomes"],
            "without_s": without_s,
            "with_s": with_s,
            "left": status["transfers"],
            "problems": status["problems"],
            "errors": engine.connector.errors,
        }
    finally:
        server.kill()


def small_l1(socket: str, place: str) -> Any:
    """An L1 that holds less than one prompt: what fits is used, and later requests get room too."""
    server = Server(socket, place, "48MiB")
    server.start()
    try:
        engine = Engine(socket, {"max_model_len": 4096})
        engine.wait_ready()
        long = engine.tokens(1_600)  # 25 chunks of 2.8 MiB
        others = [engine.tokens(500, 1_600 + 500 * i) for i in range(6)]
        want = engine.one(long, 8)
        wanted = [engine.one(other, 8).tokens for other in others]
        server.wait_persisted()
        engine.forget_locally()
        first = engine.one(long, 8)
        engine.forget_locally()
        burst = engine.generate(others, 8)
        engine.forget_locally()
        again = engine.one(long, 8)
        status = query(socket, "status")
        return {
            "same": [first.tokens == want.tokens, again.tokens == want.tokens],
            "same_burst": [o.tokens for o in burst] == wanted,
            "cached": [first.cached, again.cached],
            "cached_burst": [o.cached for o in burst],
            "chunk_bytes": status["sessions"][0]["chunk_bytes"],
            "l1": status["l1"],
            "left": status["transfers"],
            "problems": status["problems"],
            "errors": engine.connector.errors,
        }
    finally:
        server.kill()
