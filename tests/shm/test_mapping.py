"""A mapping is used under `use()`, ends when no copy runs, and does not reach forked children."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
from tests.servers import kvkeep_env
from tests.shm.memory import ARENA_BYTES, arena, mapped, memory, table

from kvkeep import shm
from kvkeep.errors import MemoryRefused

SOON_S = 5.0

FORK = """
import ctypes, os, resource, signal
from tests.shm.memory import memory
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
with memory() as (owner, words, mapping):
    pid = os.fork()
    if pid == 0:
        {child}
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    ctypes.memmove(mapping.address, b"parent", 6)
    assert ctypes.string_at(owner.address, 6) == b"parent"
print(os.waitstatus_to_exitcode(status) + signal.{sign})
"""


def in_fork(child: str, sign: str = "SIGSEGV") -> str:
    """How a forked child ended: `0` for death by `sign`."""
    script = FORK.format(child=child, sign=sign)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=kvkeep_env(), timeout=30
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "child",
    [
        "ctypes.memset(mapping.address, 1, 1)",
        "ctypes.string_at(mapping.address + 4096, 1)",
        "mapping.generation(0)",
    ],
)
def test_a_forked_child_that_touches_dies(child: str) -> None:
    assert in_fork(child) == "0"


def test_an_abandoned_mapping_is_refused_not_touched() -> None:
    child = """
        mapping.abandon()
        assert mapping.close()
        try:
            with mapping.use():
                pass
        except Exception as error:
            os._exit(7 if type(error).__name__ == "MemoryRefused" else 1)"""
    assert in_fork(child.strip("\n ")) == str(7 + 11)


def test_close_waits_for_running_copies() -> None:
    with memory() as (_, _, mapping):
        inside, leave = threading.Event(), threading.Event()

        def copy() -> None:
            with mapping.use():
                inside.set()
                assert leave.wait(SOON_S)
                ctypes.memset(mapping.address, 1, ARENA_BYTES)

        copying = threading.Thread(target=copy)
        copying.start()
        assert inside.wait(SOON_S)
        assert not mapping.close(timeout_s=0.05)
        assert mapping.address
        with pytest.raises(MemoryRefused, match="unmapped"), mapping.use():
            pass
        leave.set()
        assert mapping.close(SOON_S)
        assert mapping.address == 0
        copying.join(SOON_S)
        assert not copying.is_alive()


def test_close_returns_as_soon_as_the_last_copy_ends() -> None:
    with memory() as (_, _, mapping):
        closed = threading.Event()

        def close() -> None:
            assert mapping.close(SOON_S)
            closed.set()

        with mapping.use(), mapping.use():
            closing = threading.Thread(target=close)
            closing.start()
            assert not closed.wait(0.05)
        assert closed.wait(SOON_S)
        closing.join(SOON_S)


def test_an_error_inside_a_copy_ends_its_use() -> None:
    with memory() as (_, _, mapping):
        with pytest.raises(ZeroDivisionError), mapping.use():
            raise ZeroDivisionError
        assert mapping.close(timeout_s=0.0)


def test_closing_twice_is_fine_and_the_pages_are_gone() -> None:
    with arena() as owner, table() as words:
        mapping = mapped(owner, words)
        names = f"{mapping.address:x}-"
        assert any(line.startswith(names) for line in maps())
        assert mapping.close()
        assert not any(line.startswith(names) for line in maps())
        assert mapping.close()


def test_a_mapping_that_fails_leaves_nothing_behind() -> None:
    """The second of the two descriptors is no memory: the first is unmapped again."""
    with arena() as owner, table() as words:
        before = sum("kvkeep-arena" in line for line in maps())
        bad = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(MemoryRefused):
            shm.Mapping(
                os.dup(owner.fd), bad, arena_bytes=ARENA_BYTES, slots=words.slots, write=True
            )
        assert sum("kvkeep-arena" in line for line in maps()) == before
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(bad)


def maps() -> list[str]:
    with open("/proc/self/maps") as lines:
        return lines.readlines()
