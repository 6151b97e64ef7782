"""status, leases, explain, clear: what they ask of a real server and what they print."""

import os
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.cli.conftest import CHUNK_BYTES, STAGED, STORED, Busy, Command
from tests.servers import running_server

from kvkeep.cli.show import ranges

STATUS_KEYS = {"version", "epoch", "uptime_s", "l1", "leases", "sessions", "l2"}
L1_KEYS = {
    "capacity_bytes",
    "populated_bytes",
    "free_bytes",
    "staging_bytes",
    "resident_bytes",
    "reserved_bytes",
    "orphaned_bytes",
    "quarantined_bytes",
    "objects",
}
EXPLAIN_KEYS = {
    "request",
    "session",
    "at",
    "prompt_tokens",
    "hit_tokens",
    "computed_tokens",
    "chunks",
    "timeline",
    "saved_ms",
}


def test_status(busy: Busy, kvkeep: Command) -> None:
    done = kvkeep("status", "--socket", busy.server.socket, "--json")
    assert done.code == 0
    assert set(done.json) >= STATUS_KEYS
    l1 = done.json["l1"]
    assert set(l1) >= L1_KEYS
    assert l1["resident_bytes"] == l1["reserved_bytes"] == STORED * CHUNK_BYTES
    assert l1["staging_bytes"] == STAGED * CHUNK_BYTES
    assert [session["pids"] for session in done.json["sessions"]] == [[os.getpid()]]


def test_status_for_people(busy: Busy, kvkeep: Command) -> None:
    done = kvkeep("status", "--socket", busy.server.socket)
    assert done.code == 0
    assert "192KiB" in done.out  # resident
    assert "2 leases open" in done.out
    assert f"bench-cli-{os.getpid()}" in done.out


def test_leases(busy: Busy, kvkeep: Command) -> None:
    done = kvkeep("leases", "--socket", busy.server.socket, "--json")
    assert done.code == 0
    assert {(row["kind"], row["chunks"]) for row in done.json} == {
        ("read", STORED),
        ("write", STAGED),
    }
    shown = kvkeep("leases", "--socket", busy.server.socket)
    assert shown.code == 0
    assert all(row["lease"] in shown.out for row in done.json)


def test_explain(busy: Busy, kvkeep: Command) -> None:
    newest = kvkeep("explain", "--socket", busy.server.socket, "--json")
    assert newest.code == 0
    assert set(newest.json) >= EXPLAIN_KEYS
    assert newest.json["request"] == "request-1"
    assert newest.json["session"] == f"bench-cli-{os.getpid()}"
    age = datetime.now(UTC) - datetime.fromisoformat(newest.json["at"])
    assert timedelta(0) < age < timedelta(minutes=10)
    assert [c["outcome"] for c in newest.json["chunks"]] == ["hit"] * STORED + ["miss"] * STAGED
    assert newest.json["chunks"][STORED]["reason"] == "never_stored"
    assert set(newest.json["hit_tokens"]) == {"device", "l1", "l2"}
    by_start = kvkeep("explain", "request", "--socket", busy.server.socket, "--json")
    assert by_start.json == newest.json


def test_explain_for_people(busy: Busy, kvkeep: Command) -> None:
    done = kvkeep("explain", "--socket", busy.server.socket)
    assert done.code == 0
    rows = [line.split() for line in done.out.splitlines()]
    assert ["0-2", "hit", "l1"] in rows
    assert any(row[:3] == ["3", "miss", "never_stored"] for row in rows)


def test_explain_of_an_unknown_request(busy: Busy, kvkeep: Command) -> None:
    done = kvkeep("explain", "nobody", "--socket", busy.server.socket)
    assert done.code == 1
    assert "begins with 'nobody': it was not looked up" in done.sentence


def test_clear(own_busy: Busy, kvkeep: Command) -> None:
    done = kvkeep("clear", "--socket", own_busy.server.socket, "--json")
    assert done.code == 0
    assert done.json["cleared_chunks"] == STORED
    # Being read: unfindable at once, but the memory stays until the reader is done.
    assert done.json["status"]["l1"]["reserved_bytes"] == STORED * CHUNK_BYTES


def test_clear_with_force_ends_reads(own_busy: Busy, kvkeep: Command) -> None:
    done = kvkeep("clear", "--force", "--socket", own_busy.server.socket)
    assert done.code == 0
    assert f"cleared {STORED} chunks" in done.out
    l1 = own_busy.server.status()["l1"]
    assert l1["reserved_bytes"] == l1["resident_bytes"] == 0
    assert l1["staging_bytes"] == STAGED * CHUNK_BYTES  # a write is never revoked


def test_an_empty_server(tmp_path: Path, kvkeep: Command) -> None:
    with running_server(tmp_path) as server:
        assert "no sessions" in kvkeep("status", "--socket", server.socket).out
        assert "no leases" in kvkeep("leases", "--socket", server.socket).out
        refused = kvkeep("explain", "--socket", server.socket)
        assert "no request has been seen" in refused.sentence


def test_the_socket_comes_from_the_environment_too(
    busy: Busy, kvkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVKEEP_SOCKET_PATH", busy.server.socket)
    assert kvkeep("status", "--json").json["epoch"] == busy.server.status()["epoch"]


@pytest.mark.slow
def test_a_stopped_server(tmp_path: Path, kvkeep: Command) -> None:
    with running_server(tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
        done = kvkeep("status", "--socket", server.socket)
        assert done.code == 1
        assert "did not answer within" in done.sentence


def test_ranges_join_equal_neighbours_only() -> None:
    chunks = [
        {"index": index, "outcome": outcome, "reason": reason}
        for index, (outcome, reason) in enumerate(
            [("hit", None), ("hit", None), ("miss", "evicted"), ("miss", "no_room"), ("hit", None)]
        )
    ]
    assert [(first, last) for first, last, _ in ranges(chunks)] == [(0, 1), (2, 2), (3, 3), (4, 4)]
