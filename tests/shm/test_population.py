"""Memory is allocated by the server, in steps, where it was told; clients never allocate."""

import ctypes
import os
from pathlib import Path

import pytest
from tests.shm.memory import ARENA_BYTES, MIB, arena, blocks_bytes, mapped, memory, table

from kvkeep import shm
from kvkeep.errors import MemoryRefused

NO_NODE = 40  # a number that no host of a test has
FAR_NODE = 300  # beyond one word of the kernel's mask


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(shm, "POPULATE_STEP_BYTES", MIB)
    return MIB


def test_population_goes_in_steps(small_steps: int) -> None:
    with arena(ARENA_BYTES - 4096) as owner:
        assert blocks_bytes(owner.fd) == 0
        seen = []
        while owner.populated_bytes < owner.size_bytes:
            seen.append(owner.populate_step())
            assert blocks_bytes(owner.fd) == owner.populated_bytes
        assert seen == [small_steps, 2 * small_steps, 3 * small_steps, ARENA_BYTES - 4096]


def test_a_client_touches_only_what_is_populated(small_steps: int) -> None:
    with arena() as owner, table() as words:
        owner.populate_step()
        mapping = mapped(owner, words)
        mapping.populate(owner.populated_bytes)
        assert mapping.touched_bytes == small_steps
        assert blocks_bytes(owner.fd) == small_steps
        owner.populate_step()
        mapping.populate(owner.populated_bytes)
        assert mapping.touched_bytes == blocks_bytes(owner.fd) == 2 * small_steps
        assert mapping.close()


@pytest.mark.parametrize("write", [True, False])
def test_touched_pages_are_in_the_clients_page_table(write: bool) -> None:
    with memory(write=write) as (owner, _, mapping):
        before = resident_kib(mapping.address)
        mapping.populate(owner.populated_bytes)
        assert before == 0
        assert resident_kib(mapping.address) == ARENA_BYTES >> 10


def test_touching_changes_no_byte() -> None:
    with memory() as (owner, _, mapping):
        pattern = bytes(range(256)) * (ARENA_BYTES // 256)
        ctypes.memmove(owner.address, pattern, ARENA_BYTES)
        mapping.populate(ARENA_BYTES)
        assert ctypes.string_at(mapping.address, ARENA_BYTES) == pattern


def test_touching_after_close_is_refused() -> None:
    with memory() as (_, _, mapping):
        mapping.close()
        with pytest.raises(MemoryRefused):
            mapping.populate(ARENA_BYTES)


def test_node_0_gives_memory() -> None:
    refusal = ""
    try:
        with arena(numa=frozenset({0})) as owner:
            assert owner.populate_step() == ARENA_BYTES
            assert "bind:0" in numa_policy(owner.address)
    except MemoryRefused as error:
        refusal = str(error)
    # Some sandboxes forbid the call to everybody; then we say so.
    assert refusal == "" or refusal.endswith("Operation not permitted")


@pytest.mark.parametrize("nodes", [{NO_NODE}, {FAR_NODE}, {63}, {64}])
def test_a_node_that_is_not_there_is_named(nodes: set[int]) -> None:
    names = ", ".join(map(str, sorted(nodes)))
    with pytest.raises(MemoryRefused, match=rf"NUMA node {names}: correct \[l1\] numa"):
        shm.SharedArena(ARENA_BYTES, numa=frozenset(nodes))


def test_huge_pages_that_are_not_reserved_are_refused_with_the_fix() -> None:
    pages = free_huge_pages() + 1
    with pytest.raises(MemoryRefused, match=rf"{pages} huge pages .* vm\.nr_hugepages .* \"off\""):
        shm.SharedArena(pages * 2 * MIB, hugepages=True)


def test_a_size_nobody_has_is_refused() -> None:
    with pytest.raises(MemoryRefused, match=f"{1 << 62} bytes"):
        shm.SharedArena(1 << 62)


@pytest.mark.parametrize("numa", [{NO_NODE}, set()])
def test_a_refused_arena_leaves_nothing_behind(numa: set[int]) -> None:
    def left() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("memfd:kvkeep-arena")

    before = left()
    with pytest.raises(MemoryRefused):
        shm.SharedArena(ARENA_BYTES if numa else 1 << 62, numa=frozenset(numa))
    assert left() == before


def resident_kib(address: int) -> int:
    """Resident size of the mapping that starts here."""
    return int(mapping_field(address, "Rss:").split()[0])


def mapping_field(address: int, name: str) -> str:
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            found = True
        elif found and line.startswith(name):
            return line.removeprefix(name).strip()
    raise AssertionError(f"no {name} of {address:x}")


def numa_policy(address: int) -> str:
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return next(line for line in lines if line.startswith(f"{address:x} "))


def free_huge_pages() -> int:
    folder = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
    return int((folder / "free_hugepages").read_text()) if folder.exists() else 0
