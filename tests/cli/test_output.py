"""Where output goes and what may be in it: full disks, closed streams, control codes."""

import os
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Command
from tests.servers import kvkeep_command, kvkeep_env, running_server

from kvkeep.cli import FAILED, WRONG_USAGE, show

FULL = "kvkeep: cannot write the output: No space left on device\n"
BAD_NAME = "a\x1b[31m\n\x7f\x9b[bold]z"
SHOWN_NAME = r"a\x1b[31m\x0a\x7f\x9b[bold]z"


def explanation(*, l1: int, event: str = "", **more: object) -> dict[str, Any]:
    """An answer of the server about a request of 600 tokens."""
    chunk = {"index": 0, "outcome": "hit", "tier": "l1", "reason": None, "detail": ""}
    return {
        "request": "r",
        "prompt_tokens": 600,
        "hit_tokens": {"device": 512, "l1": l1, "l2": {}},
        "chunks": [chunk, chunk | {"index": 1}],
        "timeline": [{"t_ms": 0.0, "event": event}],
        "saved_ms": None,
    } | more


SESSION = {
    "session": BAD_NAME,
    "model": BAD_NAME,
    "client": BAD_NAME,
    "ranks": [0],
    "world": 1,
    "ready": True,
    "writes": True,
    "chunk_bytes": 1,
    "reserved_bytes": 0,
    "pids": [1],
}
L1_PARTS = ("capacity", "populated", "free", "resident", "reserved", "staging", "orphaned")
STATUS = {
    "version": "1",
    "epoch": "e",
    "uptime_s": 1.0,
    "problems": [BAD_NAME],
    "l1": {f"{part}_bytes": 1 for part in (*L1_PARTS, "quarantined")} | {"objects": 0},
    "leases": 0,
    "sessions": [SESSION],
    "l2": [
        {
            "name": BAD_NAME,
            "url": BAD_NAME,
            "state": "open",
            "why": BAD_NAME,
            "stuck": 1,
            "scanned": 0.5,
            "read_only": True,
            "objects": 1,
            "used_bytes": 1,
            "capacity_bytes": None,
            "evicted": 0,
            "corrupt": {},
        }
    ],
    "transfers": {"fetches": 0, "pending_lookups": 0, "persists": 0, "persist_queue_bytes": 0},
}
LEASE = {
    "lease": "1",
    "kind": "read",
    "session": BAD_NAME,
    "request": BAD_NAME,
    "chunks": 1,
    "bytes": 1,
    "age_s": 1.0,
    "pids": [1],
    "old": False,
}
ANSWERS: dict[str, Any] = {
    "status": STATUS,
    "leases": [LEASE],
    "explain": explanation(l1=0, event=BAD_NAME, request=BAD_NAME, session=BAD_NAME),
}


def shell(line: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`line` in a shell, "$@" being the kvkeep command."""
    return subprocess.run(
        ["bash", "-c", line, "bash", *kvkeep_command(*arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env=kvkeep_env(),
    )


@pytest.mark.parametrize("arguments", [["config"], ["config", "--json"], ["--version"], ["-h"]])
def test_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    done = shell('"$@" >/dev/full', *arguments)
    assert (done.returncode, done.stderr) == (FAILED, FULL)


def test_a_full_disk_for_the_sentence_too() -> None:
    assert shell('"$@" >/dev/full 2>/dev/full', "config").returncode == FAILED


@pytest.mark.slow
def test_status_on_a_full_disk(tmp_path: Path) -> None:
    with running_server(tmp_path, populated=False) as server:
        for more in ([], ["--json"]):
            done = shell('"$@" >/dev/full', "status", "--socket", server.socket, *more)
            assert (done.returncode, done.stderr) == (FAILED, FULL)


def test_a_closed_stdout_swallows_the_output() -> None:
    done = shell('"$@" >&-', "config")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr_swallows_the_sentence() -> None:
    done = shell('"$@" 2>&-', "config", "--set", "a.b=1")
    assert (done.returncode, done.stdout) == (FAILED, "")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_pipe_that_is_closed_at_once(more: list[str]) -> None:
    done = shell('set -o pipefail; "$@" | head -n 0', "config", *more)
    assert done.stderr == ""


def test_names_of_clients_are_no_control_codes(
    kvkeep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the server lets through: here an answer with raw names in it."""
    for command, answer in ANSWERS.items():
        monkeypatch.setattr("kvkeep.cli.operator.ask", lambda *_, found=answer: found)
        shown = kvkeep(command).out
        assert shown.count(SHOWN_NAME) == str(answer).count(repr(BAD_NAME)), command
        assert all(c == "\n" or c.isprintable() for c in shown), command
        exact = kvkeep(command, "--json")
        assert exact.json == answer
        assert "\x1b" not in exact.out


def test_sentences_hold_no_control_codes(kvkeep: Command, tmp_path: Path) -> None:
    done = kvkeep("status", "--socket", tmp_path / "a\x1b[31mb.sock")
    assert r"a\x1b[31mb.sock" in done.sentence


@pytest.mark.slow
def test_a_stopped_server_is_named(tmp_path: Path, kvkeep: Command) -> None:
    with running_server(tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)
        try:
            done = kvkeep("status", "--socket", server.socket)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    assert done.code == FAILED
    assert done.sentence == (
        f"kvkeep: the server at {server.socket} did not answer within 2.0 s: "
        "it is stopped or overloaded; see its process"
    )


@pytest.mark.parametrize("reads", [True, False], ids=["closed", "reset"])
def test_a_server_that_is_stopping(kvkeep: Command, *, reads: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/k.sock"
        listener.bind(path)
        listener.listen()

        def end_at_once() -> None:
            connection, _ = listener.accept()
            connection.recv(1 << 16 if reads else 1)  # unread bytes make the end a reset
            connection.close()

        thread = threading.Thread(target=end_at_once)
        thread.start()
        done = kvkeep("status", "--socket", path)
        thread.join()
    assert done.code == FAILED
    assert (
        done.sentence
        == f"kvkeep: the server at {path} ended the connection: it is stopping, or has died"
    )


def test_the_demo_refuses_a_size_before_it_starts_anything(
    kvkeep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr("kvkeep.cli.demo.require_engine", started.append)
    monkeypatch.setattr("kvkeep.cli.demo.scratch", started.append)
    done = kvkeep("demo", "--json", tmp_path / "demo.json", "--l1-size", "abc")
    assert done.code == FAILED
    assert "--l1-size 'abc' is refused: write a share such as 25%" in done.sentence
    assert (started, list(tmp_path.iterdir())) == ([], [])


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(["serve", "--l1-size"], "serve"), (["bench", "object", "--tokens"], "bench object")],
)
def test_an_option_without_its_value(kvkeep: Command, arguments: list[str], command: str) -> None:
    done = kvkeep(*arguments)
    assert done.code == WRONG_USAGE
    assert done.sentence.endswith(f"See `kvkeep {command} --help`.")


@pytest.mark.parametrize("command", ["status", "leases", "explain", "clear"])
def test_who_asks_needs_only_the_socket(
    kvkeep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("KVKEEP_L1_SIZE", "broken")
    path = tmp_path / "kvkeep.sock"
    done = kvkeep(command, "--set", f"socket.path={path}")
    assert done.code == FAILED
    assert f"no server at {path}" in done.sentence


def test_chunks_that_were_not_needed_are_not_from_l1(capsys: pytest.CaptureFixture[str]) -> None:
    event = "in L1, not needed: the engine's own cache had it"
    show.show_explanation(explanation(l1=0, event=event))
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("0-1")]
    assert row.split()[1:4] == ["in", "L1", "device"]
    assert "not loaded: the engine's own cache had it" in row
    show.show_explanation(explanation(l1=256))
    assert ["0-1", "hit", "l1"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def persisted(**more: int) -> dict[str, Any]:
    """An answer of wait_persisted: all is well, unless told otherwise."""
    names = ("persist_overflow", "persist_lost", "persist_failed", "missing_chunks")
    answer = dict.fromkeys(("queued_bytes", "running", *names), 0) | more
    waits = answer["queued_bytes"] or answer["running"] or answer["missing_chunks"]
    return answer | {"done": not waits}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "all that L1 holds is in L2"),
        (
            {"missing_chunks": 3, "persist_failed": 1, "persist_overflow": 2},
            "not in L2: 3 chunks (since the start: 1 failed, 2 dropped from a full queue)",
        ),
        ({"missing_chunks": 1}, "not in L2: 1 chunk"),
        (
            {"evicted_objects": 2},
            "all that L1 holds was written to L2; L2 has evicted 2 objects since the start",
        ),
        (
            {"persist_lost": 1},
            "all that L1 holds is in L2 (since the start: 1 evicted from L1 before)",
        ),
        ({"queued_bytes": 1024, "running": 1}, "not yet: 1KiB wait and 1 chunk is being written"),
        (
            {"running": 2, "missing_chunks": 1},
            "not yet: 0B wait and 2 chunks are being written; not in L2: 1 chunk",
        ),
    ],
)
def test_what_is_in_l2_is_said_as_it_is(
    kvkeep: Command, monkeypatch: pytest.MonkeyPatch, more: dict[str, int], says: str
) -> None:
    answer = persisted(**more)
    monkeypatch.setattr("kvkeep.cli.operator.ask", lambda *_, **__: answer)
    done = kvkeep("wait-persisted")
    assert done.out.strip() == says
    assert done.code == (0 if answer["done"] else FAILED)
    assert kvkeep("wait-persisted", "--json").json == answer


def test_a_time_that_rounds_to_zero_has_no_sign(capsys: pytest.CaptureFixture[str]) -> None:
    times = [{"t_ms": t_ms, "event": f"e{n}"} for n, t_ms in enumerate((-0.04, -0.0, -0.06, 7.25))]
    show.show_explanation(explanation(l1=0, timeline=times, saved_ms=-0.4))
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    found = [row[0] for row in rows if row[1:] in (["e0"], ["e1"], ["e2"], ["e3"])]
    assert found == ["0.0", "0.0", "-0.1", "7.2"]
    assert "saved about 0 ms" in out


def test_an_explanation_names_session_time_and_computed_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show.show_explanation(explanation(l1=0, session="s1", at=86_400.0 * 365, computed_tokens=88))
    out = capsys.readouterr().out
    assert "session s1, at 197" in out
    assert ["computed", "88"] in [line.split() for line in out.splitlines()]
