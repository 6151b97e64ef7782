"""What a server may need in all, on made-up machines: shown, fitting, or refused with a fix."""

import re
from pathlib import Path

import pytest
from tests.test_limits import GIB, MOUNT_V1, MOUNT_V2, Machine

from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.registry import compose
from kvkeep.config import load_config
from kvkeep.doctor.check import Check, Status
from kvkeep.doctor.memory import check_memory
from kvkeep.errors import ConfigError
from kvkeep.limits import (
    ENTRY_BYTES,
    GENERATION_BYTES,
    L1_STEP_BYTES,
    MIB,
    PROCESS_BYTES,
    Budget,
    MemoryBudget,
    memory_budget,
    resident_bytes,
    server_budget,
)
from kvkeep.testing.faulty_backend import FaultyBackend

MANY = 1 << 24


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def v2(machine: Machine, max_gib: float, used_gib: float = 0) -> MemoryBudget:
    machine.place("0::/pod", MOUNT_V2)
    machine.v2("pod", max=int(max_gib * GIB), current=int(used_gib * GIB))
    return machine.budget()


def refused(budget: Budget) -> str:
    with pytest.raises(ConfigError) as caught:
        budget.check()
    return str(caught.value)


def test_it_is_the_sum_of_its_parts(machine: Machine) -> None:
    budget = server_budget(machine.budget(), GIB, 1000, buffers={"disk": 5 * MIB, "plain": 0})
    sizes = {part.name: part.size_bytes for part in budget.parts}
    assert sizes == {
        "L1": GIB,
        "generation table": 1000 * GENERATION_BYTES,
        "index": 1000 * ENTRY_BYTES,
        "process": PROCESS_BYTES,
        "buffers of L2 disk": 5 * MIB,
    }
    assert budget.total_bytes == sum(sizes.values())
    budget.check()
    shown = budget.as_dict()
    assert shown["parts"] == sizes
    assert shown["total_bytes"] == budget.total_bytes
    assert (shown["limit_bytes"], shown["limit_source"]) == (64 * GIB, "RAM")
    assert budget.fields()["index_bytes"] == 1000 * ENTRY_BYTES


def test_a_small_l1_has_room_for_few_objects(machine: Machine) -> None:
    budget = server_budget(machine.budget(), 16 * MIB, MANY)
    sizes = {part.name: part.size_bytes for part in budget.parts}
    assert sizes["index"] == 4096 * ENTRY_BYTES


@pytest.mark.parametrize("max_objects", [MANY, 1 << 16, 100])
def test_more_than_the_cgroup_allows_is_refused_and_the_fix_fits(
    machine: Machine, max_objects: int
) -> None:
    memory = v2(machine, 2)
    too_large = server_budget(memory, 2 * GIB - 2 * MIB, max_objects)
    text = refused(too_large)
    assert "2GiB (cgroup v2 /pod memory.max)" in text
    assert "L1 1.9GiB" in text
    assert "process 96MiB" in text
    found = re.search(r"set l1\.size to (\d+)MiB or less", text)
    assert found is not None
    l1_bytes = int(found.group(1)) * MIB
    server_budget(memory, l1_bytes, max_objects).check()
    with pytest.raises(ConfigError):
        server_budget(memory, l1_bytes + 2 * L1_STEP_BYTES, max_objects).check()


def test_fewer_objects_are_a_fix_too(machine: Machine) -> None:
    memory = v2(machine, 2)
    text = refused(server_budget(memory, 1800 * MIB, MANY))
    found = re.search(r"set l1\.max_objects to (\d+) or less", text)
    assert found is not None
    fewer = int(found.group(1))
    server_budget(memory, 1800 * MIB, fewer).check()
    with pytest.raises(ConfigError):
        server_budget(memory, 1800 * MIB, fewer + 1).check()


def test_v1_limits_count(machine: Machine) -> None:
    machine.place("4:memory:/box", MOUNT_V1.format("/"))
    machine.v1("box", limit_in_bytes=GIB, usage_in_bytes=0)
    text = refused(server_budget(machine.budget(), GIB, 1000))
    assert "cgroup v1 /box memory.limit_in_bytes" in text


def test_what_others_use_is_not_there_but_what_we_use_is(machine: Machine) -> None:
    memory = v2(machine, 8, used_gib=6)
    text = refused(server_budget(memory, 2 * GIB, 1000))
    assert "2GiB are free now (cgroup v2 /pod memory.max)" in text
    fits = server_budget(memory, 2 * GIB, 1000, used_bytes=PROCESS_BYTES + 2 * MIB)
    fits.check()


def test_huge_pages_are_not_taken_from_the_rest(machine: Machine) -> None:
    memory = v2(machine, 1)
    server_budget(memory, 4 * GIB, 1000, huge=True).check()
    text = refused(server_budget(memory, 64 * GIB, MANY, huge=True))
    assert "set l1.size" not in text
    assert re.search(r"set l1\.max_objects to \d+ or less", text)


def test_buffers_of_backends_count_and_are_named(machine: Machine) -> None:
    memory = v2(machine, 1)
    text = refused(server_budget(memory, 512 * MIB, 1000, buffers={"disk": GIB}))
    assert "buffers of L2 disk 1GiB" in text
    assert "lower l2.encrypt_buffer_bytes" in text


def test_this_process_is_measured(tmp_path: Path) -> None:
    assert 10 * MIB < resident_bytes() < memory_budget().limit_bytes
    assert resident_bytes(tmp_path) == 0


def test_a_plug_in_that_takes_memory_says_so() -> None:
    raw = FaultyBackend()
    guard = GuardSettings()
    assert compose(raw, settings=guard, log=no_log).buffer_bytes == 0
    raw.buffer_bytes = 7 * MIB  # type: ignore[attr-defined]
    assert compose(raw, settings=guard, log=no_log).buffer_bytes == 7 * MIB


def no_log(event: str, **fields: object) -> None:
    pass


# ---- doctor


def budget_check(machine: Machine, **flags: object) -> Check:
    config = load_config(flags={key.replace("__", "."): v for key, v in flags.items()}).config
    checks = {check.name: check for check in check_memory(config, root=machine.root)}
    return checks["memory budget"]


def test_doctor_says_what_a_server_may_need(machine: Machine) -> None:
    check = budget_check(machine, l1__size="1GiB")
    assert check.status is Status.OK
    assert check.detail.startswith("at most 1.2GiB in all: L1 1GiB, generation table 2MiB, index")


def test_doctor_refuses_what_serve_would_refuse(machine: Machine) -> None:
    v2(machine, 2)
    check = budget_check(machine, l1__size="1900MiB")
    assert check.status is Status.FAIL
    assert "set l1.size to" in check.fix
    assert "process 96MiB" in check.detail
