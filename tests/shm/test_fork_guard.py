"""A fork in another thread does not fall into the moment in which the arena is being mapped."""

import os
import threading
from pathlib import Path

import pytest

from kvkeep import shm

SIZE_BYTES = 1 << 20


def test_a_child_never_gets_half_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mapping is there and not yet kept from children; then somebody forks."""
    inside, forking = threading.Event(), threading.Event()
    real_map = shm._map

    def slow(fd: int, size_bytes: int, *, write: bool) -> int:
        address = real_map(fd, size_bytes, write=write)
        inside.set()
        forking.wait(10)
        return address

    monkeypatch.setattr(shm, "_map", slow)
    arena = os.memfd_create("kvkeep-arena")
    table = os.memfd_create("kvkeep-generations")
    os.ftruncate(arena, SIZE_BYTES)
    os.ftruncate(table, 4096)
    made: list[shm.Mapping] = []

    def connect() -> None:
        made.append(shm.Mapping(arena, table, arena_bytes=SIZE_BYTES, slots=8, write=True))

    thread = threading.Thread(target=connect)
    thread.start()
    assert inside.wait(10)
    threading.Timer(0.05, forking.set).start()
    pid = os.fork()
    if not pid:
        mapped = "kvkeep-arena" in Path("/proc/self/maps").read_text()
        os._exit(int(mapped))
    thread.join(10)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    made[0].close()
