"""Scenarios: many requests in little KV space, while the server is killed and stopped again.

The requests follow from their numbers, so that an engine without kvkeep can answer the same ones.
Families of them begin alike; they do not all fit into the engine's KV space at once, so some are
preempted and computed or loaded a second time.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.engine.child import Engine, query
from tests.engine.scenarios_l2 import Server

REQUESTS, FAMILIES = 8, 2
SHARED_TOKENS, OWN_TOKENS, NEW_TOKENS = 160, 48, 36
CHUNK_TOKENS = 32
SMALL = {"num_gpu_blocks_override": 26, "max_model_len": 512, "max_num_seqs": 8}
STEPS_BETWEEN = (10, 50)  # of the engine, between two strikes
STOPPED_S = 1.0  # at most
DEAD_S = 0.5  # at most
BACK_S = 60.0
STOPS_EVERY = 3  # strikes


def prompts(engine: Engine) -> list[list[int]]:
    """All requests."""
    found = []
    for number in range(REQUESTS):
        family = number % FAMILIES
        own = OWN_TOKENS // 2 + number * 7 % OWN_TOKENS
        start = FAMILIES * SHARED_TOKENS + number * 2 * OWN_TOKENS
        shared = engine.tokens(SHARED_TOKENS, family * SHARED_TOKENS)
        found.append([*shared, *engine.tokens(own, start)])
    return found


def without_kvkeep(socket: str) -> Any:
    """The answers of an engine that has never heard of kvkeep."""
    engine = Engine(socket, {**SMALL, "kv_transfer_config": None})
    outputs = engine.generate(prompts(engine), NEW_TOKENS)
    return [output.tokens for output in outputs]


class Striker:
    """Kills or stops the server at random moments of a busy engine, until it has done so often."""

    def __init__(self, server: Server, engine: Engine, strikes: int, seed: int) -> None:
        self.kills = self.stops = 0
        self.failure = ""
        self._server, self._engine, self._strikes = server, engine, strikes
        self._rng = random.Random(seed)
        self._done = threading.Event()

    @property
    def done(self) -> bool:
        """Every strike has been made, and the server is there again."""
        return self._done.is_set()

    def work(self) -> None:
        """For a thread of its own."""
        try:
            for number in range(self._strikes):
                self._wait_steps(self._rng.randint(*STEPS_BETWEEN))
                if number % STOPS_EVERY == STOPS_EVERY - 1:
                    self._stop()
                else:
                    self._kill()
                self._engine.wait_for(lambda: self._engine.side.client.ready, "back", BACK_S)
        except AssertionError as error:
            self.failure = str(error)
        finally:
            self._done.set()

    def _wait_steps(self, steps: int) -> None:
        """Under load, by the engine's own clock: this machine may be slow."""
        seen = len(self._engine.side.step_waits_s)
        self._engine.wait_for(
            lambda: len(self._engine.side.step_waits_s) >= seen + steps, "steps", BACK_S
        )

    def _kill(self) -> None:
        epoch = self._engine.side.client.epoch
        self._server.kill()
        self.kills += 1
        time.sleep(self._rng.random() * DEAD_S)
        self._server.start()
        self._engine.wait_for(lambda: self._engine.side.client.epoch != epoch, "found", BACK_S)

    def _stop(self) -> None:
        pid = self._server.pid
        os.kill(pid, signal.SIGSTOP)
        self.stops += 1
        time.sleep(self._rng.random() * STOPPED_S)
        os.kill(pid, signal.SIGCONT)


@contextmanager
def striking(striker: Striker) -> Iterator[None]:
    """Strikes beside what the block does."""
    thread = threading.Thread(target=striker.work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(2 * BACK_S)


def struck(socket: str, place: str, strikes: int, seed: int) -> Any:
    """Serve batches of the same requests until every strike is made, and once more after that."""
    server = Server(socket, place, "64MiB")
    server.start()
    try:
        engine = Engine(socket, SMALL, chunk_tokens=CHUNK_TOKENS)
        engine.wait_ready()
        wanted, rng = prompts(engine), random.Random(seed)
        striker = Striker(server, engine, strikes, seed)
        answers: list[tuple[int, list[int]]] = []
        cached = rounds = 0
        with striking(striker):
            last = False
            while not last:
                last = striker.done
                order = rng.sample(range(REQUESTS), REQUESTS)
                outputs = engine.generate([wanted[n] for n in order], NEW_TOKENS)
                answers += [(n, o.tokens) for n, o in zip(order, outputs, strict=True)]
                cached += sum(output.cached for output in outputs)
                engine.llm.reset_prefix_cache()
                rounds += 1
        return {
            "answers": answers,
            "rounds": rounds,
            "cached": cached,
            "kills": striker.kills,
            "stops": striker.stops,
            "failure": striker.failure,
            "preemptions": engine.metric("vllm:num_preemptions"),
            "loaded_tokens": engine.metric("vllm:kvkeep_loaded_tokens"),
            "left": _left(engine),
            "errors": engine.connector.errors,
        }
    finally:
        server.kill()


def _left(engine: Engine) -> dict[str, int]:
    """What the server still holds for an engine that has nothing to do."""
    engine.flush()

    def held() -> dict[str, int]:
        status = query(engine.socket, "status")
        parts = ("staging_bytes", "reserved_bytes", "orphaned_bytes", "quarantined_bytes")
        return {part: status["l1"][part] for part in parts} | {"leases": status["leases"]}

    until_s = time.monotonic() + BACK_S
    while any((left := held()).values()) and time.monotonic() < until_s:
        time.sleep(0.05)
    return left
