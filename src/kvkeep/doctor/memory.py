"""Memory, NUMA nodes and open files, against what the configuration asks for."""

import resource
from collections.abc import Iterator
from pathlib import Path

from kvkeep.backends import registry
from kvkeep.config import Config
from kvkeep.doctor.check import Check, Status
from kvkeep.errors import ConfigError
from kvkeep.limits import (
    MemoryBudget,
    format_bytes,
    memory_budget,
    parse_nodes,
    resolve_l1_size,
    server_budget,
)

FDS_PER_CONNECTION = 2  # the socket and the peer's pidfd
FDS_BESIDES = 64  # the memory files, the log, HTTP clients, backends


def check_memory(
    config: Config, budget: MemoryBudget | None = None, *, root: Path = Path("/")
) -> Iterator[Check]:
    """The memory this process may use, and whether L1 fits into what is free now."""
    try:
        budget = memory_budget(root) if budget is None else budget
    except ConfigError as error:
        yield Check("memory", Status.FAIL, str(error), "mount /proc")
        return
    limit = f"{format_bytes(budget.limit_bytes)} by {budget.limit_source}"
    free = f"{format_bytes(budget.free_bytes)} free now by {budget.free_source}"
    yield Check("memory", Status.OK, f"this process may use {limit}; {free}")
    try:
        size = resolve_l1_size(config.l1.size, budget, hugepages=config.l1.hugepages)
    except ConfigError as error:
        problem, _, fix = str(error).rpartition(": ")
        yield Check("L1 size", Status.FAIL, problem, fix)
    else:
        yield Check("L1 size", Status.OK, f"l1.size = {config.l1.size!r} is {format_bytes(size)}")
        yield _check_budget(config, budget, size)
    if config.l1.numa:
        yield _check_numa(config.l1.numa, root / "sys/devices/system/node")


def _check_budget(config: Config, memory: MemoryBudget, l1_bytes: int) -> Check:
    """Everything that a server may need together, at its largest."""
    per_backend = config.l2.encrypt_buffer_bytes if config.l2.key_file else 0
    try:
        names = [url.name for url in registry.parse(config.l2.backends)]
    except ConfigError:  # said where L2 is checked
        names = []
    budget = server_budget(
        memory,
        l1_bytes,
        config.l1.max_objects,
        huge=config.l1.hugepages != "off",
        buffers=dict.fromkeys(names, per_backend),
    )
    try:
        budget.check()
    except ConfigError as error:
        problem, _, fix = str(error).rpartition(": ")
        return Check("memory budget", Status.FAIL, problem, fix)
    parts = ", ".join(f"{part.name} {format_bytes(part.size_bytes)}" for part in budget.parts)
    total = format_bytes(budget.total_bytes)
    return Check("memory budget", Status.OK, f"at most {total} in all: {parts}")


def _check_numa(wanted: str, folder: Path) -> Check:
    try:
        online = (folder / "online").read_text(encoding="ascii").strip()
    except OSError:
        online = "0"
    missing = sorted(parse_nodes(wanted) - parse_nodes(online))
    if missing:
        detail = f"l1.numa = {wanted!r}, but node {missing[0]} is not here (online: {online})"
        return Check("NUMA nodes", Status.FAIL, detail, f"set l1.numa to nodes among {online}")
    return Check("NUMA nodes", Status.OK, f"l1.numa = {wanted!r} (online: {online})")


def check_open_files(config: Config, limit: tuple[int, int] | None = None) -> Check:
    """Each connection takes two descriptors; `limit` is (soft, hard) of RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limit is None else limit
    needed = config.limits.max_connections * FDS_PER_CONNECTION + FDS_BESIDES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Check("open files", Status.OK, f"up to {soft}; {needed} are enough")
    possible = max(1, (soft - FDS_BESIDES) // FDS_PER_CONNECTION)
    detail = (
        f"{soft} descriptors allow {possible} connections, "
        f"limits.max_connections = {config.limits.max_connections} needs {needed}"
    )
    if hard == resource.RLIM_INFINITY or hard >= needed:
        fix = f"run `ulimit -n {needed}` before `kvkeep serve`"
    else:
        fix = (
            f"raise the hard limit (LimitNOFILE={needed}) or set limits.max_connections={possible}"
        )
    return Check("open files", Status.WARN, detail, fix)
