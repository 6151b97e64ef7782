"""Scenarios: the server is absent, stopped, killed or restarted while the engine serves."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from tests.engine.child import Engine


def _serve(socket: str, *flags: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvkeep", "serve", "--socket", socket, "--l1-size", "512MiB"]
    return subprocess.Popen([*command, "--no-http", *flags], stderr=subprocess.DEVNULL)


def absent(socket: str) -> Any:
    """No server at all: the engine serves; then one appears and caching begins by itself."""
    engine = Engine(socket)
    prompt = engine.tokens(700)
    before = engine.one(prompt)
    server = _serve(socket)
    try:
        engine.wait_ready()
        engine.forget_locally()
        stored = engine.one(prompt)
        engine.forget_locally()
        after = engine.one(prompt)
    finally:
        server.kill()
        server.wait()
    return {
        "same": before.tokens == stored.tokens == after.tokens,
        "cached": [before.cached, stored.cached, after.cached],
        "errors": engine.connector.errors,
    }


def arenas_mapped() -> int:
    """How many arenas this process maps."""
    with open("/proc/self/maps") as maps:
        return sum("kvkeep-arena" in line for line in maps)


def killed(socket: str, times: int) -> Any:
    """SIGKILL and restart again and again; idle in between, and once with a hit right after."""
    engine = Engine(socket)
    prompt = engine.tokens(700)
    engine.forget_locally()
    want = engine.one(prompt).tokens
    rows = []
    for _ in range(times):
        server = _serve(socket)
        try:
            engine.wait_ready()
            engine.forget_locally()
            stored = engine.one(prompt)
            engine.forget_locally()
            hit = engine.one(prompt)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
        died = time.monotonic()
        engine.wait_for(lambda: arenas_mapped() == 0, "unmapped", 10)
        unmapped_s = time.monotonic() - died
        engine.forget_locally()
        miss = engine.one(prompt)
        rows.append(
            {
                "same": [o.tokens == want for o in (stored, hit, miss)],
                "cached": [stored.cached, hit.cached, miss.cached],
                "unmapped_s": unmapped_s,
            }
        )
    return {"rows": rows, "errors": engine.connector.errors}


def stopped(socket: str, seconds: float) -> Any:
    """SIGSTOP under load for `seconds`: no step waits beyond the budget, no request fails."""
    server = _serve(socket)
    try:
        engine = Engine(socket)
        engine.wait_ready()
        prompts = [engine.tokens(300, 400 * i) for i in range(4)]
        want = [engine.one(p, 8).tokens for p in prompts]
        engine.forget_locally()
        waits = engine.side.step_waits_s
        waits.clear()
        os.kill(server.pid, signal.SIGSTOP)
        wrong = rounds = 0
        stop_at = time.monotonic() + seconds
        try:
            while time.monotonic() < stop_at:
                engine.llm.reset_prefix_cache()
                outputs = engine.generate(prompts, 8)
                wrong += [o.tokens for o in outputs] != want
                rounds += 1
            state = engine.side.client.state.value
        finally:
            os.kill(server.pid, signal.SIGCONT)
        longest_ms = max(waits) * 1e3
        engine.wait_for(lambda: engine.side.client.up, "up again")
        engine.forget_locally()
        engine.generate(prompts, 8)
        engine.forget_locally()
        resumed = engine.generate(prompts, 8)
        return {
            "rounds": rounds,
            "wrong": wrong,
            "state_while_stopped": state,
            "longest_wait_ms": longest_ms,
            "steps": len(waits),
            "resumed_cached": [o.cached for o in resumed],
            "resumed_same": [o.tokens for o in resumed] == want,
            "errors": engine.connector.errors,
        }
    finally:
        server.kill()
        server.wait()


def internal_error(socket: str) -> Any:
    """A bug inside kvkeep (a hook that raises): the engine goes on without it."""
    server = _serve(socket)
    try:
        engine = Engine(socket)
        engine.wait_ready()
        prompt = engine.tokens(700)
        want = engine.one(prompt).tokens
        engine.forget_locally()
        side = engine.side

        def explode(*_: Any) -> None:
            raise RuntimeError("planted")

        side.allocated = explode
        after_failed_load = engine.one(prompt)
        later = engine.one(prompt)
        return {
            "same": [o.tokens == want for o in (after_failed_load, later)],
            "errors": engine.connector.errors,
            "details": json.dumps(str(side.client.state)),
        }
    finally:
        server.kill()
        server.wait()
