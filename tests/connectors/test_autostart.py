"""Autostart without an engine: one server however many ask, and one clear line when it fails."""

import fcntl
import logging
import os
import signal
import socket
import struct
import threading
from pathlib import Path

import pytest

from kvkeep.connectors.vllm.autostart import Start, answers, ensure_server
from kvkeep.engine_flag import ENGINE_FLAG, EXTRA, flag_problems

FLAGS = ("--l1-size", "16MiB", "--no-http")


def end_server(path: str) -> None:
    """Ends whoever listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(path)
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        os.kill(struct.unpack("3i", found)[0], signal.SIGTERM)


@pytest.mark.slow
def test_whoever_races_one_server_is_started(tmp_path: Path) -> None:
    path = str(tmp_path / "deeper" / "k.sock")
    outcomes: list[Start] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(ensure_server(path, FLAGS)))
        for _ in range(4)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(o.name for o in outcomes) == ["STARTED", "THERE", "THERE", "THERE"]
        assert ensure_server(path, FLAGS) is Start.THERE
    finally:
        if answers(path):
            end_server(path)


@pytest.mark.slow
def test_a_server_that_refuses_to_start_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "k.sock")
    with caplog.at_level(logging.INFO, "vllm.kvkeep"):
        assert ensure_server(path, ("--l1-size", "16 apples")) is Start.FAILED
    (line,) = [record.getMessage() for record in caplog.records]
    assert path in line
    assert "apples" in line
    assert "serving without it" in line


def test_a_lock_that_is_never_free_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "k.sock")
    with open(path + ".autostart", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with caplog.at_level(logging.INFO, "vllm.kvkeep"):
            assert ensure_server(path, FLAGS, limit_s=0.1) is Start.FAILED
    (line,) = [record.getMessage() for record in caplog.records]
    assert "another engine holds" in line


def test_a_place_that_cannot_be_made_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO, "vllm.kvkeep"):
        assert ensure_server(str(tmp_path / "file" / "k.sock"), FLAGS) is Start.FAILED
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"autostart": True, "autostart_args": "--l1-size 4GiB"}, None),
        ({"autostart": 1}, "autostart = 1 must be true or false"),
        ({"autostart_args": ["--l1-size"]}, "must be one text with flags"),
        ({"autostart_args": "--l1-size '4"}, "cannot be split into flags"),
        ({"autostart_args": "--socket /k.sock"}, "leave --socket out"),
        ({"autostart_args": "--socket=/k.sock"}, "leave --socket out"),
    ],
)
def test_the_flag_says_what_is_wrong(extra: dict[str, object], problem: str | None) -> None:
    problems = flag_problems({**ENGINE_FLAG, EXTRA: extra})
    if problem is None:
        assert problems == []
    else:
        assert [problem in text for text in problems] == [True]
