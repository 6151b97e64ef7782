"""Clients die at every point of their work: no wrong byte is served, no byte of the arena is lost.

Several at a time, against one server whose arena is far smaller than what they store, so that
extents are reused all the time. What a key holds follows from the key; every read that passes its
generation check is compared.
"""

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, Engine
from tests.process.health import watched_health
from tests.process.peer import held_bytes, l1, settle
from tests.process.victim import POINTS, REQUESTS
from tests.servers import Server, kvkeep_env, running_server

ARENA = "8MiB"  # 128 objects, of 320 that are stored
AT_A_TIME = 3
SOONEST_S, LATEST_S = 0.0, 0.08  # after a victim began to work
PATIENCE_S = 20.0
HEALTHY_S = 1.0
SETTINGS = {"l1.session_staging_fraction": 1}


@dataclass(slots=True)
class Victim:
    """One process: it dies by itself at `doom`, or at `die_s` by our hand."""

    process: subprocess.Popen[str]
    doom: str
    die_s: float = 0.0

    def poll(self, now_s: float) -> bool:
        """True when it is dead."""
        late = self.doom != "none" and now_s > self.die_s + PATIENCE_S
        assert not late, f"it never came to {self.doom!r}"
        if self.doom == "none" and now_s >= self.die_s:
            self.process.kill()
        if self.process.poll() is None:
            return False
        out, _ = self.process.communicate()
        assert self.process.returncode == -signal.SIGKILL, out
        return True


@dataclass(slots=True)
class Storm:
    """Counts of one run."""

    deaths: Counter[str] = field(default_factory=Counter)
    right: int = 0
    lost: int = 0


def start(server: Server, rng: random.Random, doom: str) -> Victim:
    command = [sys.executable, "-m", "tests.process.victim"]
    process = subprocess.Popen(
        [*command, server.socket, str(rng.getrandbits(64)), doom],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=kvkeep_env(),
        cwd=Path(__file__).parents[2],
    )
    return Victim(process, doom)


def half_by_themselves(kills: int) -> list[str]:
    """Half of the deaths at a chosen point, half at a random time."""
    return [POINTS[n // 2 % len(POINTS)] if n % 2 else "none" for n in range(kills)]


def storm(server: Server, reader: Engine, dooms: list[str], seed: int) -> Storm:
    """One death for each doom, while the reader verifies."""
    rng = random.Random(seed)
    counts, waiting, running = Storm(), dooms[::-1], list[Victim]()
    try:
        while waiting or running:
            while waiting and len(running) < AT_A_TIME:
                victim = start(server, rng, waiting.pop())
                running.append(victim)
                assert victim.process.stdout is not None
                assert victim.doom != "none" or victim.process.stdout.readline() == "up\n"
                victim.die_s = time.monotonic() + rng.uniform(SOONEST_S, LATEST_S)
            right, lost = reader.load(rng.randrange(REQUESTS))
            counts.right, counts.lost = counts.right + right, counts.lost + lost
            dead = [victim for victim in running if victim.poll(time.monotonic())]
            counts.deaths.update(victim.doom for victim in dead)
            running = [victim for victim in running if victim not in dead]
    finally:
        for victim in running:
            victim.process.kill()
            victim.process.communicate()
    return counts


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(200, marks=[pytest.mark.prove, pytest.mark.timeout(900)]),
    ],
)
def test_killed_clients_cost_nothing(tmp_path: Path, kills: int) -> None:
    with (
        running_server(tmp_path, l1_size=ARENA, settings=SETTINGS) as server,
        Engine(server.socket, "reader").wait_ready() as reader,
        watched_health(server) as health,
    ):
        counts = storm(server, reader, half_by_themselves(kills), seed=kills)
        settle(server)
        assert sum(counts.deaths.values()) == kills
        assert set(counts.deaths) == {*POINTS, "none"}
        assert counts.right > kills
        assert_whole(server, reader)
    assert health.answers > 10
    assert health.bad == []
    assert health.slowest_s < HEALTHY_S


@pytest.mark.slow
def test_every_point_once(tmp_path: Path) -> None:
    """The everyday form: one death at each point of the work."""
    with (
        running_server(tmp_path, l1_size=ARENA, settings=SETTINGS) as server,
        Engine(server.socket, "reader").wait_ready() as reader,
    ):
        counts = storm(server, reader, [*POINTS], seed=1)
        assert counts.deaths == Counter(POINTS)
        settle(server)
        assert_whole(server, reader)


def assert_whole(server: Server, reader: Engine) -> None:
    """Nobody else is there; nothing is lost; the whole arena can be stored into again."""
    body = l1(server)
    assert held_bytes(server) == 0
    assert body["free_bytes"] + body["resident_bytes"] == body["populated_bytes"]
    assert body["populated_bytes"] == body["capacity_bytes"]
    status = server.status()
    assert [session["session"] for session in status["sessions"]] == ["reader"]
    assert status["leases"] == 0
    for request in range(REQUESTS):
        right, lost = reader.load(request)
        assert lost == 0
        assert right <= CHAIN_CHUNKS
    new = range(1_000, 1_000 + body["capacity_bytes"] // (CHAIN_CHUNKS << 16))
    assert [reader.store(request) for request in new] == [CHAIN_CHUNKS] * len(new)
    assert [reader.load(request) for request in new] == [(CHAIN_CHUNKS, 0)] * len(new)
    assert l1(server)["free_bytes"] == 0
