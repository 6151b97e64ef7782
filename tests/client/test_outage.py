"""The server stops answering, dies, comes back: the engine waits for none of it, and heals."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, OBJECT_BYTES, Engine, hello, until
from tests.process.health import run_delay_s
from tests.process.peer import Peer, l1, settle
from tests.servers import Server, running_server

from kvkeep.client import PATIENCE_S, Call, Client, State
from kvkeep.types import CommitOutcome, Role
from kvkeep.wire import messages as m

SLACK_S = 0.010  # what a step may wait beyond its budget
BUDGET_S = 0.002
SETTINGS = {"l1.session_staging_fraction": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("outage"), settings=SETTINGS) as running:
        yield running


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


@contextmanager
def scheduler(server: Server, session: str) -> Iterator[Client]:
    """A client with the everyday budget, ready."""
    client = Client(server.socket, hello(session))
    client.start()
    try:
        until(lambda: client.ready is not None)
        yield client
    finally:
        client.close()


def give_up(client: Client, engine: Engine, request: int) -> list[Call]:
    """One step that stages and looks up, waits, and is answered neither."""
    keys = b"".join(engine.keys(request))
    stored = b"".join(engine.keys(1))
    item = m.StageItem("late", engine.root(), keys)
    client.begin_step()
    calls = [
        client.call(lambda seq: m.Stage(seq, (item,))),
        client.call(lambda seq: m.Lookup(seq, "late", stored)),
    ]
    sent = [call for call in calls if call is not None]
    for call in sent:
        assert not client.wait(call)
    return sent


def test_late_answers_are_given_back(server: Server) -> None:
    with Engine(server.socket, "other").wait_ready() as other, scheduler(server, "late") as client:
        assert other.store(1) == CHAIN_CHUNKS
        with stopped(server):
            late = give_up(client, other, 50)
            assert len(late) == 2
            assert client.state is State.UP  # a few milliseconds are no reason yet
            until(lambda: client.state is State.AWAY, 10 * PATIENCE_S + 2)
            assert give_up(client, other, 51) == []
        until(lambda: client.up)
        # A grant that was given back must never reach a caller: its memory is somebody else's.
        assert [(call.reply, call.lost) for call in late] == [(None, True)] * 2
        settle(server)
        assert server.status()["leases"] == 0


def test_an_abandoned_call_gives_its_answer_back(server: Server) -> None:
    with Engine(server.socket, "other").wait_ready() as other, scheduler(server, "quit") as client:
        with stopped(server):
            for call in give_up(client, other, 60):
                client.abandon(call)
        settle(server)
        until(lambda: client.up)
        answered = client.call(lambda seq: m.Lookup(seq, "r", other.keys(1)[0]))
        assert answered is not None
        while not answered.done:
            client.pump()
        client.abandon(answered)  # after the answer: the same
        settle(server)


def test_a_step_never_waits_longer_than_its_budget(server: Server) -> None:
    """Twenty calls a step, in and out of `away`; the client's own counter is what counts."""
    with Engine(server.socket, "other").wait_ready() as other, scheduler(server, "step") as client:
        waits_s, beyond_s = [], []
        with stopped(server):
            end_s = time.monotonic() + 1.0
            while time.monotonic() < end_s:
                client.begin_step()
                queued_s = run_delay_s()
                for _ in range(20):
                    call = client.call(m.Ping)
                    if call is not None:
                        client.wait(call)
                waits_s.append(client.waited_s)
                beyond_s.append(client.waited_s - BUDGET_S - (run_delay_s() - queued_s))
                time.sleep(0.001)
            client.begin_step()
            assert client.state is State.AWAY
        assert len(waits_s) > 20
        assert client.max_step_wait_s == max(waits_s) >= BUDGET_S
        assert max(beyond_s) <= SLACK_S
        assert sum(waits_s) <= 2 * PATIENCE_S + 0.3  # once away, nothing is waited for
        until(lambda: client.up)
        assert other.client.ask(m.Ping, 5)


def test_a_full_send_buffer_does_not_block(server: Server) -> None:
    """A server that does not read costs bounded memory, no time, and in the end the connection."""
    with scheduler(server, "full") as client:
        longest_s, sent = 0.0, 0
        with stopped(server):
            while client.state is not State.CONNECTING:
                started_s = time.monotonic()
                client.notify(m.Note("r", "x" * 10_000))
                longest_s = max(longest_s, time.monotonic() - started_s)
                sent += 1
                assert sent < 10_000
            assert "does not read" in client.why or "did not answer" in client.why
            assert longest_s < 0.25
        until(lambda: client.up and client.ready is not None)
        settle(server)


@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("stale_first", [True, False])
def test_who_gave_up_during_the_handshake_replaces_nobody(
    server: Server, stale_first: bool, attempt: int
) -> None:
    """While a server is stopped its backlog fills with the attempts of one client."""
    session = f"stale-{stale_first}-{attempt}"
    stale, live = Peer.at(server.socket), Peer.at(server.socket)
    with stopped(server):
        for peer in (stale, live) if stale_first else (live, stale):
            peer.send(hello(session))
        stale.close()
    live.expect(m.Ready)
    live.send(m.Ping(1))
    live.expect(m.Pong)
    mine = [s["ready"] for s in server.status()["sessions"] if s["session"] == session]
    assert mine == [True]
    live.close()


def test_a_lost_connection_is_confirmed_when_its_copies_have_ended(server: Server) -> None:
    """The process lives: its staged memory comes back by its word, not by a timer."""
    with Engine(server.socket, "confirm").wait_ready() as engine:
        held = engine.stage(70)
        mapping = engine.client.mapping
        assert mapping is not None
        with mapping.use():
            engine.client.notify(m.Ping(1, "no number"))  # type: ignore[arg-type]
            until(lambda: not engine.client.up)
            until(lambda: l1(server)["orphaned_bytes"] == CHAIN_CHUNKS * OBJECT_BYTES)
            time.sleep(0.2)
            assert not engine.client.up  # one arena at a time
            assert l1(server)["orphaned_bytes"] == CHAIN_CHUNKS * OBJECT_BYTES
        engine.wait_ready()
        settle(server)
        assert engine.client.mapping is not mapping
        assert set(engine.commit(held)) == {CommitOutcome.UNKNOWN_LEASE}  # the lost connection's
        assert engine.store(70) == CHAIN_CHUNKS


def test_growth_is_pushed_and_never_touched_ahead(tmp_path: Path) -> None:
    pushed: list[int] = []

    def on_push(message: m.ServerMessage) -> None:
        if isinstance(message, m.Grown):
            pushed.append(message.populated_bytes)

    size_bytes = 128 << 20
    with (
        running_server(tmp_path, l1_size="128MiB", populated=False) as server,
        Engine(server.socket, "grow", on_push=on_push).wait_ready() as engine,
    ):
        client = engine.client
        assert client.welcome is not None
        assert client.mapping is not None
        until(lambda: client.mapping is not None and client.mapping.touched_bytes == size_bytes)
        assert pushed == sorted(set(pushed))
        assert (pushed or [client.welcome.populated_bytes])[-1] == size_bytes
        assert l1(server)["populated_bytes"] == size_bytes


def arenas() -> set[str]:
    """The different arenas this process maps, by inode."""
    with open("/proc/self/maps") as lines:
        return {line.split()[4] for line in lines if "memfd:kvkeep-arena" in line}


def restart(folder: Path, path: str, engines: list[Engine]) -> float:
    """A new server at the same path; how long until every engine has one arena and is ready."""
    others_own = arenas()  # another test of this process may have left one to the collector
    with running_server(folder, socket=path, settings=SETTINGS) as server:
        took_s = until(
            lambda: (
                all(e.client.up and e.client.ready for e in engines)
                and len(arenas() - others_own) == 1
            ),
            story=[e.log for e in engines],
        )
        settle(server)
        first, *others = engines
        assert first.store(90) == CHAIN_CHUNKS
        assert [other.load(90) for other in others] == [(CHAIN_CHUNKS, 0)] * len(others)
        server.kill()
    gone_s = until(lambda: not arenas() - others_own, story=[e.log for e in engines])
    assert gone_s < 2.0
    return took_s


@pytest.mark.parametrize("times", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_killed_server_leaves_no_arena_behind(tmp_path: Path, times: int) -> None:
    """Idle clients unmap the dead epoch by themselves, and use the new one by themselves."""
    path = str(tmp_path / "k.sock")
    engines = [Engine(path, f"idle-{number}") for number in range(3)]
    try:
        for _ in range(times):
            assert restart(tmp_path, path, engines) < 2.0
        assert all(engine.client.state is State.CONNECTING for engine in engines)
        until(
            lambda: all("no server at" in engine.client.why for engine in engines),
            story=[engine.log for engine in engines],
        )
    finally:
        for engine in engines:
            engine.client.close()


@pytest.mark.slow
def test_a_server_that_was_stopped_for_long_is_used_again(server: Server) -> None:
    """Several attempts wait in its backlog by then; only the last one counts."""
    with (
        scheduler(server, "long") as client,
        Engine(server.socket, "worker", role=Role.WORKER) as worker,
    ):
        until(lambda: worker.client.up)
        with stopped(server):
            while client.state is not State.CONNECTING:
                client.notify(m.Note("r", "x" * 100_000))
            time.sleep(8)
        until(lambda: client.up and client.ready is not None)
        time.sleep(1)
        assert client.ready is not None
        assert worker.client.up
        (mine,) = [s for s in server.status()["sessions"] if s["session"] == "long"]
        assert mine["ready"]
