"""Staged memory belongs to its process: a closed socket, a stop or a timer does not free it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, OBJECT_BYTES, Engine, chain, hello, until
from tests.process.obeying import Obeying, obeying
from tests.process.peer import Peer, held_bytes, l1, settle
from tests.servers import Server, kvkeep_env, running_server

from kvkeep.core.keys import root_hash
from kvkeep.types import CommitOutcome, Fingerprint, Role
from kvkeep.wire import messages as m

AGAIN_S = 1.2  # when a second staging of a key is allowed; 2 s by default
STAGED_BYTES = CHAIN_CHUNKS * OBJECT_BYTES


@contextmanager
def holder(server: Server, request: int) -> Iterator[Obeying]:
    """It holds a staged chain."""
    with obeying("holder", server, f"holder-{request}", request, CHAIN_CHUNKS) as held:
        yield held


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"l1.session_staging_fraction": 1, "limits.inprogress_after_s": AGAIN_S}
    with running_server(tmp_path_factory.mktemp("owners"), settings=settings) as running:
        yield running


def test_a_closed_socket_frees_nothing_until_its_process_dies(server: Server) -> None:
    with holder(server, 1) as owner:
        assert l1(server)["staging_bytes"] == STAGED_BYTES
        owner.tell("close")
        assert owner.line() == "done"
        until(lambda: l1(server)["orphaned_bytes"] == STAGED_BYTES)
        time.sleep(1.1 * AGAIN_S)  # no timer frees it
        assert l1(server)["orphaned_bytes"] == STAGED_BYTES
        owner.signal(signal.SIGKILL)
        settle(server)


def test_a_stopped_owner_keeps_its_memory_and_loses_its_key(server: Server) -> None:
    with (
        holder(server, 2) as owner,
        Engine(server.socket, "second").wait_ready() as engine,
    ):
        owner.signal(signal.SIGSTOP)
        assert engine.stage(2).leases == ()  # in progress
        time.sleep(AGAIN_S)
        assert engine.store(2) == CHAIN_CHUNKS
        assert l1(server)["staging_bytes"] == STAGED_BYTES  # the stopped one's, untouched
        assert engine.load(2) == (CHAIN_CHUNKS, 0)
        owner.signal(signal.SIGCONT)
        owner.tell("commit")
        assert owner.line() == bytes([CommitOutcome.ALREADY_RESIDENT] * CHAIN_CHUNKS).hex()
        settle(server)
        assert engine.load(2) == (CHAIN_CHUNKS, 0)


def test_a_dead_owners_key_is_free_at_once(server: Server) -> None:
    with holder(server, 3) as owner, Engine(server.socket, "heir").wait_ready() as engine:
        owner.signal(signal.SIGKILL)
        settle(server)
        assert engine.store(3) == CHAIN_CHUNKS


def test_a_dead_scheduler_leaves_its_workers_memory(server: Server) -> None:
    """The worker may still be copying: its process counts, not the one that asked."""
    with holder(server, 4) as unrelated, Peer.at(server.socket) as worker:
        worker.hello(hello("split", role=Role.WORKER))
        with Peer.at(server.socket) as scheduler:
            scheduler.hello(hello("split", role=Role.SCHEDULER))
            ready: m.Ready = scheduler.expect(m.Ready)
            keys = chain(root_hash(Fingerprint(ready.fingerprint)), 5)
            scheduler.send(m.Stage(1, (m.StageItem("r", keys[0], b"".join(keys)),)))
            assert len(scheduler.expect(m.Granted).leases) == CHAIN_CHUNKS
            assert l1(server)["staging_bytes"] == 2 * STAGED_BYTES
        until(lambda: l1(server)["orphaned_bytes"] == STAGED_BYTES)
        worker.send(m.Bye())
        until(lambda: l1(server)["orphaned_bytes"] == 0)
        unrelated.signal(signal.SIGKILL)
        settle(server)


@pytest.mark.slow
def test_a_device_may_write_after_its_process_is_gone(tmp_path: Path) -> None:
    """An owner with DMA is quarantined for a while: the only timer, and it only delays."""
    settings = {"limits.gpu_quarantine_s": 1.0}
    with running_server(tmp_path, settings=settings) as server:
        read_end, write_end = os.pipe()
        script = (
            "import sys\nfrom tests.process.engine import Engine\n"
            "e = Engine(sys.argv[1], 'dma', dma=True).wait_ready()\n"
            "print(len(e.stage(1, 2).leases), flush=True)\nsys.stdin.read()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script, server.socket],
            stdin=read_end,
            stdout=subprocess.PIPE,
            text=True,
            env=kvkeep_env(),
            cwd=Path(__file__).parents[2],
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "2\n"
        child.kill()
        child.communicate()
        os.close(read_end)
        os.close(write_end)
        until(lambda: l1(server)["quarantined_bytes"] == 2 * OBJECT_BYTES)
        assert settle(server) > 0.3
        assert held_bytes(server) == 0
