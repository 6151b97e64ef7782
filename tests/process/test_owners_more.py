"""Owners that stop, are overtaken, or meet the next server: real processes, real bytes.

What a key holds follows from the key, so a byte of somebody else's shows.
"""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, OBJECT_BYTES, Engine, content, until
from tests.process.peer import held_bytes, l1, settle
from tests.servers import Server, kvkeep_env, run_kvkeep, running_server

from kvkeep.errors import MemoryRefused
from kvkeep.types import CommitOutcome
from kvkeep.wire import messages as m

pytestmark = pytest.mark.slow

SETTINGS = {"l1.session_staging_fraction": 1}
STAGED_BYTES = CHAIN_CHUNKS * OBJECT_BYTES
STOPPED_S = 1.0  # several ticks of the server
WHOLE_L1 = (16 << 20) // STAGED_BYTES  # requests that fill it

# Stages request 1, writes half of it, says so, waits for a line, writes the rest and commits.
HALF_A_STORE = """
import sys
from tests.process.engine import Engine
left = [16]
def point(name):
    left[0] -= name == "copy"
    if name == "copy" and left[0] == 0:
        print("half", flush=True)
        sys.stdin.readline()
with Engine(sys.argv[1], "slow", point=point).wait_ready() as engine:
    held = engine.stage(1)
    engine.fill(held)
    print(bytes(engine.commit(held)).hex(), flush=True)
"""


@contextmanager
def child(script: str, server: Server) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, server.socket],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=kvkeep_env(),
        cwd=Path(__file__).parents[2],
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_stopped_writers_memory_is_not_taken_however_short_it_is(tmp_path: Path) -> None:
    """Others store four times what L1 holds meanwhile; then it goes on, and its bytes are right."""
    with (
        running_server(tmp_path, settings=SETTINGS) as server,
        child(HALF_A_STORE, server) as owner,
        Engine(server.socket, "hungry").wait_ready() as engine,
    ):
        assert line(owner) == "half"
        owner.send_signal(signal.SIGSTOP)
        stopped_s, request = time.monotonic(), 100
        while request < 100 + 4 * WHOLE_L1 or time.monotonic() - stopped_s < STOPPED_S:
            request += 1
            assert engine.store(request) == CHAIN_CHUNKS
        assert l1(server)["staging_bytes"] == STAGED_BYTES
        owner.send_signal(signal.SIGCONT)
        assert owner.stdin is not None
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert line(owner) == bytes([CommitOutcome.COMMITTED] * CHAIN_CHUNKS).hex()
        assert engine.load(1) == (CHAIN_CHUNKS, 0)
        assert engine.load(request) == (CHAIN_CHUNKS, 0)
        settle(server)


def test_a_reader_whose_reservation_is_taken_back_in_its_copy(tmp_path: Path) -> None:
    """Its memory is written over before it has read half of it: lost, not wrong."""
    pushed: list[m.ServerMessage] = []
    with (
        running_server(tmp_path, settings=SETTINGS) as server,
        Engine(server.socket, "writer").wait_ready() as writer,
    ):
        passed: list[str] = []

        def overrun(point: str) -> None:
            if point == "read" and not passed:
                passed.append(point)
                done = run_kvkeep("clear", "--force", "--socket", server.socket)
                assert done.returncode == 0, done.stderr
                assert [writer.store(n) for n in range(100, 100 + WHOLE_L1)] == [8] * WHOLE_L1

        with Engine(
            server.socket, "reader", point=overrun, on_push=pushed.append
        ).wait_ready() as reader:
            assert writer.store(1) == CHAIN_CHUNKS
            held = reader.lookup(1)
            assert reader.read(held) == (0, CHAIN_CHUNKS)
            mapping = reader.client.mapping
            assert mapping is not None
            last = ctypes.string_at(mapping.address + held.offsets[-1], OBJECT_BYTES)
            assert last != content(held.keys[-1]), "nothing was written over what it read"
            until(lambda: any(isinstance(push, m.Revoked) for push in pushed))
            reader.end(held)  # too late, and of no effect
            assert reader.load(100 + WHOLE_L1 - 1) == (CHAIN_CHUNKS, 0)
        settle(server)


def test_leases_and_mappings_of_a_killed_server_mean_nothing_to_the_next(tmp_path: Path) -> None:
    path = str(tmp_path / "k.sock")
    with running_server(tmp_path, socket=path, settings=SETTINGS) as server:
        engine = Engine(path, "survivor").wait_ready()
        assert engine.store(2) == CHAIN_CHUNKS
        read, staged, old = engine.lookup(2), engine.stage(1), engine.client.mapping
        assert old is not None
        server.kill()
    with running_server(tmp_path, socket=path, settings=SETTINGS) as server:
        until(lambda: engine.client.up and engine.client.epoch != old.epoch)
        engine.wait_ready()
        with pytest.raises(MemoryRefused), old.use():
            pass
        assert engine.commit(staged) == [CommitOutcome.UNKNOWN_LEASE] * CHAIN_CHUNKS
        engine.end(read)
        assert engine.load(1) == engine.load(2) == (0, 0)
        assert held_bytes(server) == 0
        assert engine.store(1) == CHAIN_CHUNKS
        assert engine.load(1) == (CHAIN_CHUNKS, 0)
        engine.client.close()
        settle(server)
