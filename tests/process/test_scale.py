"""A real server with very many objects, clients and requests: right answers, and nobody waits long.

The server's own watchdog says how long its loop was held. Its CPU time is asserted, not the wall
clock: a busy machine may not fail the test, a long callback must.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.engine import ANSWER_S, hello, until
from tests.process.peer import Peer, held_bytes
from tests.servers import Server, kvkeep_env, running_server

from kvkeep.core.keys import root_hash
from kvkeep.server.overview import SESSIONS_SHOWN
from kvkeep.types import (
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    GroupKind,
    Role,
    RowSpec,
    StageOutcome,
)
from kvkeep.wire import messages as m

PAGE = 4096
CHAIN = 128  # chunks of one prompt
LONGEST_MS = 5.0
SPEC = (RowSpec(0, GroupKind.FULL_ATTENTION, PAGE),)
WATCHED = {"log.loop_cpu": "true", "limits.max_connections": 4096}


def chains(name: str, count: int) -> Iterator[list[bytes]]:
    """`count` hashes in chains that share nothing."""
    for start in range(0, count, CHAIN):
        numbers = range(start, min(start + CHAIN, count))
        yield [hashlib.sha256(f"{name} {n}".encode()).digest() for n in numbers]


class Engine:
    """A session of one connection that stores without bytes and looks up."""

    def __init__(self, server: Server, name: str, ends: ExitStack) -> None:
        self.forgotten: list[m.Forgotten] = []
        self.peer = ends.enter_context(Peer.at(server.socket))
        self.peer.sock.settimeout(60 * ANSWER_S)
        self.peer.hello(hello(name, rows=SPEC, fingerprint=hashlib.sha256(name.encode()).digest()))
        ready: m.Ready = self.peer.expect(m.Ready)
        self.root = root_hash(Fingerprint(ready.fingerprint))

    def store(self, keys: list[bytes]) -> None:
        item = m.StageItem("fill", self.root, b"".join(keys))
        self.peer.send(m.Stage(1, (item,)))
        granted: m.Granted = self.peer.expect(m.Granted)
        assert granted.outcomes == bytes([StageOutcome.GRANTED]) * len(keys)
        self.peer.send(m.Commit(2, granted.leases))
        committed: m.Committed = self.peer.expect(m.Committed)
        assert committed.outcomes == bytes([CommitOutcome.COMMITTED]) * len(keys)

    def find(self, keys: list[bytes]) -> int:
        """How many chunks of the chain are found; given back at once."""
        self.peer.send(m.Lookup(3, "look", b"".join(keys), fetch=False))
        while not isinstance(found := self.peer.read(), m.Found):
            assert isinstance(found, m.Forgotten), found
            self.forgotten.append(found)
        if found.lease:
            self.peer.send(m.End(found.lease, (0,), EndOutcome.USED))
        return found.chunks


class Operator:
    """Asks; the answer is taken when it is wanted."""

    def __init__(self, server: Server, ends: ExitStack) -> None:
        self.peer = ends.enter_context(Peer.at(server.socket))
        self.peer.sock.settimeout(60 * ANSWER_S)
        self.peer.hello(m.Hello(m.VERSIONS, "", Role.OPERATOR, writes=False, wants_arena=False))

    def ask(self, what: str, argument: str = "") -> None:
        self.peer.send(m.Query(1, what, argument))

    def answer(self) -> Any:
        answer: m.Answer = self.peer.expect(m.Answer)
        return json.loads(answer.body)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(1_000_000, marks=[pytest.mark.prove, pytest.mark.timeout(1800)]),
    ],
)
def test_no_callback_is_long_with_very_many_objects(tmp_path: Path, count: int) -> None:
    (tmp_path / "l2").mkdir()
    settings = WATCHED | {"l2.policy": "write_back", "l2.low_water_fraction": 0.01}
    size = f"{(count * PAGE * 9 // 8 >> 20) + 64}MiB"
    l2 = f"fs://{tmp_path}/l2"
    with running_server(tmp_path, l1_size=size, settings=settings, l2=l2) as server:
        with ExitStack() as ends:
            first, second = Engine(server, "a", ends), Engine(server, "b", ends)
            use_all(server, (first, second), Operator(server, ends), count // 2)
        loop = server.status()["loop"]
        print(f"{count} objects: {json.dumps(loop)}")
        times = {what: seen["longest_cpu_ms"] for what, seen in loop["entries"].items()}
        assert max(times.values()) <= LONGEST_MS, times


def use_all(server: Server, engines: tuple[Engine, Engine], operator: Operator, half: int) -> None:
    """Everything that once looked at all chunks at once."""
    first, second = engines
    for engine, name in ((first, "a"), (second, "b")):
        for keys in chains(name, half):
            engine.store(keys)
    assert server.status()["l1"]["objects"] == 2 * half
    some = {name: next(chains(name, CHAIN)) for name in "ab"}
    for _ in range(100):
        assert first.find(some["a"]) == second.find(some["b"]) == CHAIN
    assert server.get("/readyz")[0] == server.get("/metrics")[0] == 200

    operator.ask("wait_persisted", "1")
    answer = operator.answer()
    assert not answer["done"]
    assert answer["missing_chunks"] > 0

    first.peer.send(m.Forget(4))
    rounds = 0
    while not first.forgotten:
        assert first.find(some["a"]) == 0, "forgotten, and found"
        assert second.find(some["b"]) == CHAIN, "another layout is served meanwhile"
        rounds += 1
    assert first.forgotten[0].chunks == half
    assert rounds > 2, "it was done in one go"

    operator.ask("clear")
    while second.find(some["b"]):  # sent on another connection: it may come first
        pass
    fresh = next(chains("fresh", CHAIN))
    second.store(fresh)
    assert operator.answer()["cleared_chunks"] == half
    assert second.find(fresh) == CHAIN, "stored after the order, and gone"
    assert server.status()["l1"]["objects"] == CHAIN


@pytest.mark.slow
def test_a_thousand_clients_and_their_end(tmp_path: Path) -> None:
    clients = 1_000
    settings = WATCHED | {"limits.gpu_quarantine_s": "0"}
    with running_server(tmp_path, settings=settings) as server, crowd(server, clients) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == ["held", str(clients)]
        status = server.status()
        assert status["session_count"] == clients
        assert len(status["sessions"]) == SESSIONS_SHOWN
        assert server.get("/metrics")[0] == 200
        assert status["l1"]["objects"] == clients
        assert status["l1"]["staging_bytes"] == status["l1"]["reserved_bytes"] == clients * PAGE
        assert status["leases"] == 3 * clients
        process.kill()
        process.wait()
        until(lambda: held_bytes(server) == 0, 6 * ANSWER_S, server.log)
        until(lambda: not server.status()["session_count"], 6 * ANSWER_S, server.log)
        status = server.status()
        assert (status["leases"], status["l1"]["resident_bytes"]) == (0, clients * PAGE)
        with ExitStack() as ends:
            operator = Operator(server, ends)
            operator.ask("clear")
            assert operator.answer()["cleared_chunks"] == clients
        until(lambda: descriptors(server) < clients, 6 * ANSWER_S, server.log)
        print(f"{clients} clients: {json.dumps(server.status()['loop'])}")
        l1 = server.status()["l1"]
        assert l1["free_bytes"] == l1["populated_bytes"]


def descriptors(server: Server) -> int:
    """How many the server has open."""
    return len(os.listdir(f"/proc/{server.pid}/fd"))


@contextmanager
def crowd(server: Server, clients: int) -> Iterator[subprocess.Popen[str]]:
    """A process with so many connections; gone at the end."""
    command = [sys.executable, "-m", "tests.process.crowd", server.socket, str(clients)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kvkeep_env()
    ) as process:
        try:
            yield process
        finally:
            process.kill()
