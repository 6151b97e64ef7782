"""A real server with a planted fault of its own; and what a real server says is so at once."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, Engine, hello, until
from tests.process.peer import Peer, settle
from tests.servers import Server, kvkeep_env, running_server

from kvkeep.wire import messages as m

# `kvkeep serve`, but a lookup of the request "bug" raises what nobody expects.
BROKEN_SERVE = """
import sys
from kvkeep.cli import main
from kvkeep.core import events as ev
from kvkeep.core.directory import Directory

handle = Directory.handle

def broken(self, event, now_s):
    if isinstance(event, ev.Lookup) and event.request == "bug":
        raise RuntimeError("planted")
    return handle(self, event, now_s)

Directory.handle = broken
main()
"""


@contextmanager
def broken_server(socket: str) -> Iterator[subprocess.Popen[bytes]]:
    flags = ["serve", "--socket", socket, "--l1-size", "16MiB", "--no-http"]
    flags += ["--set", "l1.session_staging_fraction=1"]
    process = subprocess.Popen(
        [sys.executable, "-c", BROKEN_SERVE, *flags],
        stderr=subprocess.DEVNULL,
        env=kvkeep_env(),
    )
    try:
        until(lambda: os.path.exists(socket))
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


@pytest.mark.slow
def test_an_error_in_the_server_is_told_at_once_and_harms_nobody_else(tmp_path: Path) -> None:
    """Whoever asked is told, or loses its connection: it never waits for an answer in vain."""
    path = str(tmp_path / "run" / "k.sock")
    with broken_server(path) as process:
        with Engine(path, "bystander").wait_ready() as engine:
            # It populates L1 meanwhile: the first store may get less than it asks for.
            until(lambda: (engine.store(1), engine.load(1))[1] == (CHAIN_CHUNKS, 0))
            with Peer.at(path) as peer:
                peer.hello(hello("asks"))
                peer.expect(m.Ready)
                peer.sock.settimeout(5)
                peer.send(m.Lookup(7, "bug", b"".join(engine.keys(1))))
                answer = peer.read()
                assert answer is None or isinstance(answer, m.Failed), answer
            assert engine.load(1) == (CHAIN_CHUNKS, 0)
            assert engine.client.up
        assert process.poll() is None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"l1.session_staging_fraction": 1}
    with running_server(tmp_path_factory.mktemp("at-once"), settings=settings) as running:
        yield running


@pytest.mark.slow
def test_what_is_said_to_be_stored_is_found_at_once(server: Server) -> None:
    """By another engine, in the next call, every time."""
    with (
        Engine(server.socket, "stores").wait_ready() as writer,
        Engine(server.socket, "finds").wait_ready() as reader,
    ):
        for request in range(200):
            assert writer.store(request) == CHAIN_CHUNKS
            assert reader.load(request) == (CHAIN_CHUNKS, 0)
    settle(server)


@pytest.mark.slow
def test_no_byte_lies_in_a_place_that_outlives_its_processes(server: Server) -> None:
    """All shared memory is memfds: it ends with the last process that maps it."""
    with Engine(server.socket, "maps").wait_ready() as engine:
        assert engine.store(1_000) == CHAIN_CHUNKS
        for pid in (server.pid, os.getpid()):
            maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            ours = [line for line in maps if "kvkeep" in line and line.split()[1].endswith("s")]
            assert ours
            assert all("/memfd:kvkeep-" in line for line in ours), ours
            assert not [line for line in maps if "/dev/shm/" in line and "kvkeep" in line]
