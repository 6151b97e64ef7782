"""Asks a server's /healthz all the time, in a thread, and remembers the slowest answer.

Time in which the server or the asking thread was ready to run while the machine ran others does
not count: a test must fail for a stalled server, not for a busy machine.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.servers import Server

PAUSE_S = 0.02


@dataclass(slots=True)
class Health:
    """`slowest_s` over `answers` answers; `bad` holds every answer that was not 200."""

    slowest_s: float = 0.0
    answers: int = 0
    bad: list[int] = field(default_factory=list)


def run_delay_s(thread: str = "thread-self") -> float:
    """How long a thread (a directory below /proc) was ready to run and did not."""
    with open(f"/proc/{thread}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


@contextmanager
def watched_health(server: Server) -> Iterator[Health]:
    """Ask until the end of the block."""
    health, stop = Health(), threading.Event()
    loop = f"{server.pid}/task/{server.pid}"

    def ask() -> None:
        while not stop.wait(PAUSE_S):
            started_s, queued_s = time.monotonic(), run_delay_s() + run_delay_s(loop)
            code, _ = server.get("/healthz")
            took_s = time.monotonic() - started_s
            took_s -= run_delay_s() + run_delay_s(loop) - queued_s
            health.slowest_s = max(health.slowest_s, took_s)
            health.answers += 1
            if code != 200:
                health.bad.append(code)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield health
    finally:
        stop.set()
        thread.join(10)
