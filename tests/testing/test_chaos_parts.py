"""What chaos judges by can say no: everything that may be left over is found, and told."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvkeep.children import ENDING, ends_like_ctrl_c
from kvkeep.testing import chaos_after
from kvkeep.testing.chaos_after import Findings, look_after_stop, look_at_quiet
from kvkeep.testing.chaos_client import Layout, content
from kvkeep.testing.chaos_fork import forked, open_files
from kvkeep.testing.chaos_ledger import Count, Ledger, Story
from kvkeep.testing.chaos_server import RealServer, Size, disk_bytes
from kvkeep.types import ChunkHash

BASE = Counter({"socket": 2, "memfd": 2})


class QuietServer(RealServer):
    """A server with nothing left over, but for what a test plants."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Size())
        for path in (self.socket.parent, self.place, self.place / "tmp"):
            path.mkdir()
        self.found = BASE.copy()
        self.code = 0
        self.bad_lines: list[str] = []
        self.answer: dict[str, Any] = {
            "l1": {
                "capacity_bytes": 100, "populated_bytes": 100, "free_bytes": 60,
                "resident_bytes": 40, "staging_bytes": 0, "reserved_bytes": 0,
                "orphaned_bytes": 0, "quarantined_bytes": 0,
            },
            "leases": 0,
            "sessions": [],
            "transfers": {"fetches": 0},
            "problems": [],
            "l2": [{"used_bytes": 0}],
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        return self.answer

    def descriptors(self) -> Counter[str]:
        return self.found

    def stop(self) -> int:
        return self.code

    def broken(self) -> list[str]:
        return self.bad_lines

    def log_end(self) -> str:
        return ""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> QuietServer:
    monkeypatch.setattr(chaos_after, "SETTLES_S", 0.0)
    return QuietServer(tmp_path)


def test_nothing_is_left(server: QuietServer) -> None:
    assert look_at_quiet(server, BASE) == Findings(0, [])


def in_l1(**parts: int) -> Callable[[QuietServer], None]:
    return lambda server: server.answer["l1"].update(parts)


def in_status(**parts: object) -> Callable[[QuietServer], None]:
    return lambda server: server.answer.update(parts)


LEFT: dict[str, tuple[Callable[[QuietServer], None], int]] = {
    "staged": (in_l1(staging_bytes=8, free_bytes=52), 8),
    "orphaned": (in_l1(orphaned_bytes=8, free_bytes=52), 8),
    "quarantined": (in_l1(quarantined_bytes=8, free_bytes=52), 8),
    "reserved": (in_l1(reserved_bytes=8), 8),
    "in no state": (in_l1(free_bytes=52), 8),
    "in two states": (in_l1(free_bytes=68), 8),
    "not populated": (in_l1(capacity_bytes=108), 8),
    "counted but not on disk": (in_status(l2=[{"used_bytes": 8}]), 8),
    "leases": (in_status(leases=1), 0),
    "sessions": (in_status(sessions=["one"]), 0),
    "transfers": (in_status(transfers={"fetches": 1}), 0),
    "problems": (in_status(problems=["one"]), 0),
    "descriptors": (lambda server: server.found.update(memfd=1), 0),
    "descriptors of another kind": (lambda server: server.found.update(pidfd=1), 0),
}


@pytest.mark.parametrize(("plant", "size_bytes"), LEFT.values(), ids=LEFT)
def test_what_is_left_is_found(
    server: QuietServer, plant: Callable[[QuietServer], None], size_bytes: int
) -> None:
    plant(server)
    found = look_at_quiet(server, BASE)
    assert found.leaked_bytes == size_bytes
    assert len(found.what) == 1


def half_a_file(server: QuietServer) -> None:
    (server.place / "tmp" / "half").write_bytes(b"12345")


def an_exit_status(server: QuietServer) -> None:
    server.code = 1


STOPPED: dict[str, tuple[Callable[[QuietServer], object], int]] = {
    "half a file": (half_a_file, 5),
    "a socket": (lambda server: server.socket.touch(), 0),
    "an exit status": (an_exit_status, 0),
    "a line of the log": (lambda server: server.bad_lines.append("invariant_broken"), 0),
}


def sound(_server: RealServer) -> tuple[bool, str]:
    return True, ""


@pytest.mark.parametrize(("plant", "size_bytes"), STOPPED.values(), ids=STOPPED)
def test_what_a_stop_leaves_is_found(
    server: QuietServer,
    plant: Callable[[QuietServer], object],
    size_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chaos_after, "_verified", sound)
    assert look_after_stop(server, []) == Findings(0, [])
    plant(server)
    found = look_after_stop(server, [])
    assert found.leaked_bytes == size_bytes
    assert len(found.what) == 1


def test_a_process_that_stays_is_found(
    server: QuietServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_after, "_verified", sound)
    monkeypatch.setattr(chaos_after, "SETTLES_S", 0.05)
    assert look_after_stop(server, [os.getpgid(0)]).what == [
        f"processes are left: [{os.getpgid(0)}]"
    ]


def test_a_count_outlives_its_process(tmp_path: Path) -> None:
    ledger, story = Ledger(2), Story(tmp_path / "story")

    def work() -> None:
        ledger.rows[1].add(Count.RIGHT_CHUNKS, 5)
        story.tell("one line\nand another")
        os.kill(os.getpid(), signal.SIGKILL)

    pid = forked(work, story)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert ledger.total(Count.RIGHT_CHUNKS) == ledger.rows[1][Count.RIGHT_CHUNKS] == 5
    assert story.lines() == ["one line | and another"]


def test_a_child_that_breaks_says_why(tmp_path: Path) -> None:
    story = Story(tmp_path / "story")

    def work() -> None:
        raise ValueError("planted")

    assert os.waitstatus_to_exitcode(os.waitpid(forked(work, story), 0)[1]) == 1
    assert "ValueError: planted" in story.lines()[0]


def test_contents_differ_by_key_and_row() -> None:
    keys = [ChunkHash(bytes(32)), ChunkHash(b"\1" + bytes(31))]
    found = {content(key, row, 100) for key in keys for row in range(2)}
    assert len(found) == 4
    assert {len(each) for each in found} == {100}
    assert Layout("a", (10, 20)).chunk_bytes == 30


def test_what_lies_on_a_disk_counts_in_pages(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    for name, size_bytes in (("a", 1), ("tmp/b", 4096), ("c", 4097), ("k.json", 9), ("lock", 9)):
        (tmp_path / name).write_bytes(bytes(size_bytes))
    assert disk_bytes(tmp_path) == 4 * 4096


def test_descriptors_are_named_by_what_they_lead_to(tmp_path: Path) -> None:
    with (tmp_path / "here").open("w"):
        assert str(tmp_path / "here") in open_files("self")


def test_a_child_that_is_ended_at_once_ends_by_the_signal(tmp_path: Path) -> None:
    """Not by its parent's handler, which it has until it has its own."""
    story = Story(tmp_path / "story")
    handlers = {number: signal.getsignal(number) for number in ENDING}
    ends_like_ctrl_c()
    try:
        for _ in range(50):
            pid = forked(lambda: time.sleep(60), story)
            os.kill(pid, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
