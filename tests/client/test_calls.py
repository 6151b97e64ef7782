"""Lookup, stage, commit and end through the client, against a real server process."""

import ctypes
import os
import threading
import time
from pathlib import Path

from tests.process.engine import CHAIN_CHUNKS, OBJECT_BYTES, Engine, content, until
from tests.process.peer import held_bytes, l1, settle
from tests.servers import Server, running_server

from kvkeep.client import State
from kvkeep.types import CommitOutcome, EndOutcome, Reason, StageOutcome
from kvkeep.wire import messages as m


def test_what_one_engine_stores_another_reads(server: Server) -> None:
    with Engine(server.socket, "a").wait_ready() as a, Engine(server.socket, "b") as b:
        b.wait_ready()
        assert a.store(1) == CHAIN_CHUNKS
        assert b.load(1) == (CHAIN_CHUNKS, 0)
        assert a.load(1) == (CHAIN_CHUNKS, 0)
        assert b.store(1) == 0  # resident already
    settle(server)


def test_a_miss_has_no_lease_and_reasons(server: Server) -> None:
    with Engine(server.socket, "miss").wait_ready() as engine:
        keys = b"".join(engine.keys(1_000))
        found = engine.ask(lambda seq: m.Lookup(seq, "r", keys), then="lookup")
        assert isinstance(found, m.Found)
        assert (found.lease, found.chunks, found.columns) == (0, 0, ())
        assert set(found.reasons) == {Reason.NEVER_STORED}


def test_nothing_is_found_before_it_is_committed(server: Server) -> None:
    with Engine(server.socket, "early").wait_ready() as engine:
        held = engine.stage(2)
        engine.fill(held)
        assert engine.lookup(2).leases == ()
        assert engine.commit(held) == [CommitOutcome.COMMITTED] * CHAIN_CHUNKS
        assert engine.commit(held) == [CommitOutcome.UNKNOWN_LEASE] * CHAIN_CHUNKS
        assert engine.load(2) == (CHAIN_CHUNKS, 0)


def test_a_reservation_holds_until_it_ends(server: Server) -> None:
    with Engine(server.socket, "hold").wait_ready() as engine:
        engine.store(3)
        held = engine.lookup(3)
        assert l1(server)["reserved_bytes"] == CHAIN_CHUNKS * OBJECT_BYTES
        assert engine.read(held) == (CHAIN_CHUNKS, 0)
        engine.end(held)
        engine.end(held)  # counted, and nothing else
        settle(server)


def test_an_abort_gives_staged_memory_back(server: Server) -> None:
    with Engine(server.socket, "abort").wait_ready() as engine:
        held = engine.stage(4)
        assert l1(server)["staging_bytes"] == CHAIN_CHUNKS * OBJECT_BYTES
        engine.client.notify(m.Abort(held.leases))
        settle(server)
        assert engine.commit(held) == [CommitOutcome.UNKNOWN_LEASE] * CHAIN_CHUNKS


def test_a_dropped_chunk_is_never_found_again(server: Server) -> None:
    with Engine(server.socket, "drop").wait_ready() as engine:
        engine.store(5)
        engine.client.notify(m.Drop(engine.keys(5)[2]))
        assert len(engine.lookup(5).keys) == 2
    settle(server)


def test_a_generation_changes_before_memory_is_used_again(server: Server) -> None:
    """A read that overlaps a reuse is lost, whatever the bytes are."""
    with Engine(server.socket, "old").wait_ready() as engine:
        engine.store(6, 1)
        held = engine.lookup(6, 1)
        engine.end(held)
        engine.client.notify(m.Drop(held.keys[0]))
        engine.ask(m.Ping, then="lookup")
        assert engine.read(held) == (0, 1)


def test_closing_says_bye_and_frees_staged_memory_at_once(server: Server) -> None:
    """This process lives on: without Bye its staged memory would stay orphaned."""
    with Engine(server.socket, "bye").wait_ready() as engine:
        assert len(engine.stage(7).leases) == CHAIN_CHUNKS
        assert held_bytes(server) == CHAIN_CHUNKS * OBJECT_BYTES
    settle(server)
    assert engine.client.state is State.CLOSED
    assert engine.client.call(m.Ping) is None
    engine.client.close()  # again: nothing happens
    until(lambda: all(s["session"] != "bye" for s in server.status()["sessions"]))


def test_a_copy_that_runs_while_we_close_keeps_its_memory(tmp_path: Path) -> None:
    """close() cannot say Bye for a thread that still writes: the server keeps the extents."""
    with running_server(tmp_path) as server:
        engine = Engine(server.socket, "busy").wait_ready()
        held = engine.stage(8, 2)
        mapping = engine.client.mapping
        assert mapping is not None
        with mapping.use():
            engine.client.close()
            until(lambda: l1(server)["orphaned_bytes"] == 2 * OBJECT_BYTES)
            ctypes.memmove(mapping.address + held.offsets[0], b"x", 1)  # no SIGSEGV
        assert mapping.address == 0  # the last copy out unmaps


def test_a_reader_gets_a_mapping_it_cannot_write(server: Server) -> None:
    with Engine(server.socket, "w").wait_ready() as writer:
        writer.store(9)
        with Engine(server.socket, "r", writes=False).wait_ready() as reader:
            assert reader.client.welcome is not None
            assert not reader.client.welcome.writable
            assert reader.load(9) == (CHAIN_CHUNKS, 0)
            keys = reader.keys(10)
            items = (m.StageItem("r", reader.root(), b"".join(keys)),)
            granted = reader.ask(lambda seq: m.Stage(seq, items), then="stage")
            assert isinstance(granted, m.Granted)
            assert set(granted.outcomes) == {StageOutcome.READ_ONLY}
            assert mapping_flags(reader) == "r--s"
        assert mapping_flags(writer) == "rw-s"


def test_only_lease_holders_bytes_change(server: Server) -> None:
    """What is resident stays byte for byte while others stage, write and abort around it."""
    with Engine(server.socket, "stay").wait_ready() as engine:
        engine.store(11)
        held = engine.lookup(11)
        for request in range(12, 40):
            staged = engine.stage(request)
            engine.fill(staged)
            assert set(staged.offsets).isdisjoint(held.offsets)
            engine.client.notify(m.Abort(staged.leases))
        mapping = engine.client.mapping
        assert mapping is not None
        for key, offset in zip(held.keys, held.offsets, strict=True):
            assert ctypes.string_at(mapping.address + offset, OBJECT_BYTES) == content(key)
        engine.end(held)


def test_calls_of_many_threads_get_their_own_answers(server: Server) -> None:
    with Engine(server.socket, "threads").wait_ready() as engine:
        answers: list[tuple[int, int]] = []

        def ping() -> None:
            for _ in range(50):
                call = engine.client.call(m.Ping)
                assert call is not None
                while not call.done:
                    engine.client.pump()
                assert isinstance(call.message, m.Ping)
                assert isinstance(call.reply, m.Pong)
                answers.append((call.message.seq, call.reply.seq))

        threads = [threading.Thread(target=ping) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(answers) == 200
        assert len(set(answers)) == 200
        assert all(asked == answered for asked, answered in answers)


def test_an_answer_read_by_another_thread_is_seen_at_once(server: Server) -> None:
    """Who waits on the socket must not sleep on when somebody else took its answer."""
    with Engine(server.socket, "thief").wait_ready() as engine:
        stop = threading.Event()

        def pump() -> None:
            while not stop.is_set():
                engine.client.pump()

        thief = threading.Thread(target=pump)
        thief.start()
        try:
            slowest_s = 0.0
            for _ in range(60):
                started_s = time.monotonic()
                engine.client.ask(m.Ping, 5.0)
                slowest_s = max(slowest_s, time.monotonic() - started_s)
        finally:
            stop.set()
            thief.join(10)
    assert slowest_s < 2.5


def test_an_unknown_end_is_no_problem(server: Server) -> None:
    with Engine(server.socket, "end").wait_ready() as engine:
        engine.client.notify(m.End(12345, (0,), EndOutcome.FAILED))
        assert engine.ask(m.Ping, then="lookup")
        assert engine.client.up


def mapping_flags(engine: Engine) -> str:
    mapping = engine.client.mapping
    assert mapping is not None
    with open(f"/proc/{os.getpid()}/maps") as lines:
        line = next(line for line in lines if line.startswith(f"{mapping.address:x}-"))
    return line.split()[1]
