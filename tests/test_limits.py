"""Memory limits, read from made-up /proc and /sys trees as containers and hosts show them."""

import dataclasses
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.errors import ConfigError
from kvkeep.limits import (
    L1_STEP_BYTES,
    MIB,
    MemoryBudget,
    format_bytes,
    memory_budget,
    parse_amount,
    parse_bytes,
    parse_nodes,
    resolve_l1_size,
)

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712  # what version 1 writes for "no limit"

MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
MOUNT_V1 = "35 31 0:32 {} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
MOUNT_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"


class Machine:
    """A file-system root with the files of one machine."""

    def __init__(self, root: Path, *, ram_gib: int = 64, available_gib: int = 60) -> None:
        self.root = root
        kib = 1 << 20
        self.write(
            "proc/meminfo",
            f"MemTotal: {ram_gib * kib} kB\nMemFree: 1024 kB\n"
            f"MemAvailable: {available_gib * kib} kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n",
        )

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def place(self, cgroup: str, *mounts: str) -> None:
        self.write("proc/self/cgroup", cgroup)
        if mounts:
            self.write("proc/self/mountinfo", "\n".join(mounts))

    def v2(self, path: str, **files: str | int) -> None:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/memory.{name}", text)

    def v1(self, path: str, **files: str | int) -> None:
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/memory/{path}/memory.{name}", text)

    def budget(self) -> MemoryBudget:
        return memory_budget(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_ram_decides(machine: Machine) -> None:
    budget = machine.budget()
    assert (budget.limit_bytes, budget.limit_source) == (64 * GIB, "RAM")
    assert (budget.free_bytes, budget.free_source) == (60 * GIB, "MemAvailable")


def test_v2_limit_of_the_own_cgroup(machine: Machine) -> None:
    machine.place("0::/app.slice/kv.service", MOUNT_V2)
    machine.v2("app.slice/kv.service", max=8 * GIB, current=3 * GIB)
    machine.v2("app.slice", max="max")
    budget = machine.budget()
    source = "cgroup v2 /app.slice/kv.service memory.max"
    assert (budget.limit_bytes, budget.limit_source) == (8 * GIB, source)
    assert (budget.free_bytes, budget.free_source) == (5 * GIB, source)


def test_v2_a_parent_may_be_tighter_and_the_limit_and_the_room_may_differ(
    machine: Machine,
) -> None:
    machine.place("0::/pod/box", MOUNT_V2)
    machine.v2("pod/box", max=8 * GIB, current=1 * GIB)
    machine.v2("pod", max=10 * GIB, current=9 * GIB)  # a neighbour in the pod uses it
    budget = machine.budget()
    assert budget.limit_source == "cgroup v2 /pod/box memory.max"
    assert (budget.free_bytes, budget.free_source) == (1 * GIB, "cgroup v2 /pod memory.max")


def test_v2_cache_that_can_be_dropped_counts_as_free(machine: Machine) -> None:
    machine.place("0::/a", MOUNT_V2)
    machine.v2("a", max=8 * GIB, current=7 * GIB)
    machine.v2("a", stat=f"anon 5\ninactive_file {4 * GIB}\nactive_file {GIB}")
    assert machine.budget().free_bytes == 5 * GIB


def test_v2_usage_above_the_limit_leaves_nothing(machine: Machine) -> None:
    machine.place("0::/a", MOUNT_V2)
    machine.v2("a", max=8 * GIB, current=9 * GIB)
    assert machine.budget().free_bytes == 0


def test_v2_throttling_limit_counts(machine: Machine) -> None:
    machine.place("0::/a", MOUNT_V2)
    machine.v2("a", max=8 * GIB, high=6 * GIB, current=0)
    assert machine.budget().limit_source == "cgroup v2 /a memory.high"
    assert machine.budget().limit_bytes == 6 * GIB


def test_v2_in_a_namespace_the_mount_itself_is_the_cgroup(machine: Machine) -> None:
    machine.place("0::/", MOUNT_V2)
    machine.v2("", max=2 * GIB, current=GIB)
    budget = machine.budget()
    assert (budget.limit_bytes, budget.free_bytes) == (2 * GIB, GIB)


@pytest.mark.parametrize("path", ["/../../other", "/host/only/path"])
def test_v2_a_path_outside_the_mount_falls_back_to_the_mount(machine: Machine, path: str) -> None:
    machine.place(f"0::{path}", MOUNT_V2.replace(" / ", " /docker/abc ", 1))
    machine.v2("", max=2 * GIB, current=0)
    machine.v2("path", max=GIB, current=0)  # a cgroup that is not ours
    assert machine.budget().limit_bytes == 2 * GIB


def test_v1_limit_and_its_word_for_none(machine: Machine) -> None:
    machine.place("4:memory:/a/b\n3:cpu:/a", MOUNT_CPU, MOUNT_V1.format("/"))
    machine.v1("a/b", limit_in_bytes=UNLIMITED_V1, usage_in_bytes=GIB)
    assert machine.budget().limit_source == "RAM"
    machine.v1("a", limit_in_bytes=4 * GIB, usage_in_bytes=3 * GIB)
    machine.v1("a", stat=f"inactive_file 1\ntotal_inactive_file {GIB}")
    budget = machine.budget()
    assert budget.limit_source == "cgroup v1 /a memory.limit_in_bytes"
    assert (budget.limit_bytes, budget.free_bytes) == (4 * GIB, 2 * GIB)


def test_v1_container_sees_the_host_path_below_its_own_mount(machine: Machine) -> None:
    machine.place("4:cpu,memory:/docker/abc/sub", MOUNT_V1.format("/docker/abc"))
    machine.v1("sub", limit_in_bytes=3 * GIB, usage_in_bytes=0)
    machine.v1("", limit_in_bytes=5 * GIB, usage_in_bytes=0)
    assert machine.budget().limit_source == "cgroup v1 /sub memory.limit_in_bytes"


def test_v1_tells_of_a_parent_that_is_not_visible(machine: Machine) -> None:
    machine.place("4:memory:/docker/abc", MOUNT_V1.format("/docker/abc"))
    machine.v1("", limit_in_bytes=UNLIMITED_V1, usage_in_bytes=GIB)
    machine.v1("", stat=f"hierarchical_memory_limit {4 * GIB}")
    budget = machine.budget()
    assert (budget.limit_bytes, budget.free_bytes) == (4 * GIB, 3 * GIB)


def test_hybrid_the_version_with_the_controller_decides(machine: Machine) -> None:
    unified = MOUNT_V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    machine.place("4:memory:/x\n0::/x", unified, MOUNT_V1.format("/"))
    machine.v1("x", limit_in_bytes=4 * GIB, usage_in_bytes=0)
    assert machine.budget().limit_source == "cgroup v1 /x memory.limit_in_bytes"


def test_a_version_that_is_not_mounted_is_passed_over(machine: Machine) -> None:
    machine.place("4:memory:/x\n0::/x", MOUNT_V1.format("/"))
    machine.v2("x", max=GIB, current=0)
    assert machine.budget().limit_source == "RAM"


def test_mount_point_with_a_space(machine: Machine) -> None:
    machine.place("0::/a", r"30 23 0:26 / /my\040cgroups rw - cgroup2 none rw")
    machine.write("my cgroups/a/memory.max", 2 * GIB)
    assert machine.budget().limit_bytes == 2 * GIB


def test_without_mountinfo_the_usual_places_are_tried(machine: Machine) -> None:
    machine.place("0::/a")
    machine.v2("a", max=2 * GIB, current=0)
    assert machine.budget().limit_bytes == 2 * GIB


def test_broken_lines_are_passed_over(machine: Machine) -> None:
    machine.place("\nnonsense\n0::/a", "", "30 23", "a - b", MOUNT_V2)
    machine.v2("a", max="lots", current="x", stat="\nfoo")
    assert machine.budget().limit_source == "RAM"


def test_an_old_kernel_without_available(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemTotal: 2048 kB\nMemFree: 1024 kB\n")
    budget = machine.budget()
    assert (budget.free_bytes, budget.free_source) == (MIB, "MemFree")


@pytest.mark.parametrize("text", [None, "Nothing: here\n"])
def test_without_meminfo_the_refusal_says_so(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/meminfo").write_text(text)
    with pytest.raises(ConfigError, match="proc/meminfo"):
        memory_budget(tmp_path)


def test_huge_pages_by_either_file(machine: Machine) -> None:
    assert machine.budget().huge_free_bytes == 0
    machine.write(
        "proc/meminfo",
        "MemTotal: 9 kB\nHugePages_Free: 5\nHugePages_Rsvd: 1\nHugepagesize: 2048 kB\n",
    )
    assert machine.budget().huge_free_bytes == 4 * L1_STEP_BYTES
    machine.write("proc/meminfo", "MemTotal: 9 kB\nHugePages_Free: 5\nHugepagesize: 1048576 kB\n")
    assert machine.budget().huge_free_bytes == 0
    pages = "sys/kernel/mm/hugepages/hugepages-2048kB/"
    machine.write(pages + "free_hugepages", 7)
    machine.write(pages + "resv_hugepages", 2)
    assert machine.budget().huge_free_bytes == 5 * L1_STEP_BYTES


def test_this_machine() -> None:
    budget = memory_budget()
    assert budget.limit_bytes > 0
    assert 0 <= budget.free_bytes <= budget.limit_bytes


# --- sizes ---


BUDGET = MemoryBudget(8 * GIB, "cgroup v2 /a memory.max", 3 * GIB, "MemAvailable", 0)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("2GiB", 2 * GIB),
        (" 1.5 gib ", 3 * GIB // 2),
        ("2G", 2 * GIB),
        ("2GB", 2 * 10**9),
        ("3kB", 3000),
        ("7B", 7),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_that_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1e9", "2 GiBs", "1,5GiB", "٣", "0x10", "9" * 20]
)
def test_sizes_that_are_not(text: str) -> None:
    with pytest.raises(ValueError, match="such as"):
        parse_bytes(text)
    with pytest.raises(ValueError, match="such as"):
        parse_amount(text)


def test_shares() -> None:
    assert parse_amount("12.5%") == Fraction(1, 8)
    assert parse_amount("100 %") == 1
    assert parse_amount("0.001%") == Fraction(1, 100_000)
    assert parse_amount("1048576") == 1 << 20
    assert parse_amount("0") == 0
    assert parse_amount("100B") == 100


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("10", "write 10%, or 10GiB"),
        (" 0.5 ", "write 0.5%, or 0.5GiB"),
        ("500", "write 500MiB, or 500GiB"),
        ("1048575", "hardly bytes"),
        ("0.0009%", "at least 0.001%"),
        ("0%", "at least 0.001%"),
        ("100.1%", "at most 100%"),
    ],
)
def test_amounts_that_are_a_slip(text: str, fix: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fix)):
        parse_amount(text)


@pytest.mark.parametrize(("text", "nodes"), [("", []), ("0", [0]), ("0-2,5", [0, 1, 2, 5])])
def test_nodes(text: str, nodes: list[int]) -> None:
    assert sorted(parse_nodes(text)) == nodes


@pytest.mark.parametrize("text", ["x", "1-", "-1", "2-1", "0,", "0 1", "12345"])
def test_nodes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="ranges"):
        parse_nodes(text)


@given(st.integers(min_value=0, max_value=1 << 50))
def test_a_printed_size_can_be_typed_back_and_is_never_more(size: int) -> None:
    again = parse_bytes(format_bytes(size))
    assert again <= size
    assert again >= size * 0.9


def test_share_is_of_the_limit_and_rounded_down_to_huge_pages() -> None:
    assert resolve_l1_size("25%", BUDGET) == 2 * GIB
    assert resolve_l1_size("5MiB", BUDGET) == 4 * MIB
    assert resolve_l1_size("3GiB", BUDGET) == 3 * GIB, "all that is free may be taken"


@given(st.integers(min_value=4 * MIB, max_value=3 * GIB))
def test_resolved_sizes_are_whole_huge_pages_and_fit(size: int) -> None:
    resolved = resolve_l1_size(str(size), BUDGET)
    assert resolved % L1_STEP_BYTES == 0
    assert size - L1_STEP_BYTES < resolved <= size


def test_more_than_is_free_is_refused_with_the_numbers_and_a_fix_that_works() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_l1_size("50%", BUDGET)
    text = str(caught.value)
    for part in ("'50%'", "4GiB", "3GiB free now", "MemAvailable", "8GiB", "memory.max"):
        assert part in text
    assert "set l1.size to 3072MiB or less" in text
    assert resolve_l1_size("3072MiB", BUDGET) == 3 * GIB


def test_when_nothing_fits_the_fix_is_another() -> None:
    tight = dataclasses.replace(BUDGET, free_bytes=3 * MIB)
    with pytest.raises(ConfigError, match=r": free memory or raise the limit$"):
        resolve_l1_size("1GiB", tight)


@pytest.mark.parametrize("text", ["3MiB", "0", "0.01%"])
def test_too_small_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"set l1\.size to 4MiB or more"):
        resolve_l1_size(text, BUDGET)


def test_nonsense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"l1\.size = 'big' is not a size"):
        resolve_l1_size("big", BUDGET)


def test_huge_pages_are_a_pool_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"sysctl vm\.nr_hugepages=512"):
        resolve_l1_size("1GiB", BUDGET, hugepages="2MiB")
    some = dataclasses.replace(BUDGET, huge_free_bytes=4 * GIB)
    assert resolve_l1_size("50%", some, hugepages="2MiB") == 4 * GIB
