"""How much host memory this process may use, and how much of it is free now.

Linux gives three answers that disagree inside containers: the machine's RAM, the limit of every
control group (cgroup v2 or v1) above this process, and what is available at this moment. A server
that believes the largest of them is killed by the smallest, so the smallest wins here and its name
is kept for messages. The file-system root is an argument: tests build `/proc` and `/sys` trees.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kvkeep.errors import ConfigError

MIB = 1 << 20
MOST_NODES = 1023  # CONFIG_NODES_SHIFT of the kernel is at most 10
L1_STEP_BYTES = 2 * MIB  # one huge page: every size of L1 is a whole number of them
L1_MIN_BYTES = 4 * MIB
_LEAST_BARE_BYTES = MIB  # less without a unit is a slip
_LEAST_SHARE = Fraction(1, 100_000)
SMALLEST_OBJECT_BYTES = 4096  # of L1: so many objects may be there at most
ENTRY_BYTES = 600  # of the index, for each object; tests/core/test_million.py measures it
GENERATION_BYTES = 8  # of the table that clients see, for each object
PROCESS_BYTES = 96 * MIB  # code, libraries and connections; 52 MiB right after the start

_UNITS = {
    "": 1,
    "B": 1,
    "K": 1 << 10,
    "KIB": 1 << 10,
    "KB": 10**3,
    "M": 1 << 20,
    "MIB": 1 << 20,
    "MB": 10**6,
    "G": 1 << 30,
    "GIB": 1 << 30,
    "GB": 10**9,
    "T": 1 << 40,
    "TIB": 1 << 40,
    "TB": 10**12,
}
_NUMBER = r"([0-9]{1,19}(?:\.[0-9]{1,9})?)"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*([A-Za-z]{{0,3}})\s*")
_NODES = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
_PERCENT = re.compile(rf"\s*{_NUMBER}\s*%\s*")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Host memory this process may use, what is free now, and which source was the tightest."""

    limit_bytes: int
    limit_source: str
    free_bytes: int
    free_source: str
    huge_free_bytes: int  # free 2 MiB huge pages; they are no part of `free_bytes`


def parse_bytes(text: str) -> int:
    """Read "2GiB", "1.5 GB" or "4096"; K, M, G and T alone are powers of 1024.

    Raises ValueError with a sentence that says how to write it.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError("write a number of bytes with an optional unit, such as 512MiB or 2GiB")
    return int(Fraction(match.group(1)) * unit)


def parse_amount(text: str) -> Fraction | int:
    """Read "25%" or "2GiB": a Fraction is a share of something, an int is bytes.

    A small number alone, but for 0, lacks its unit or percent sign: it is refused. Raises
    ValueError with a sentence that says how to write it.
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        try:
            size_bytes = parse_bytes(text)
        except ValueError:
            raise ValueError("write a share such as 25% or a size such as 2GiB") from None
        number = text.strip()
        if number[-1].isdigit() and 0 < float(number) < _LEAST_BARE_BYTES:
            other = f"{number}%" if float(number) <= 100 else f"{number}MiB"
            raise ValueError(
                f"{number} has no unit and is hardly bytes; write {other}, or {number}GiB"
            )
        return size_bytes
    share = Fraction(match.group(1)) / 100
    if not _LEAST_SHARE <= share <= 1:
        raise ValueError("a share is at least 0.001% and at most 100%, such as 25%")
    return share


def parse_nodes(text: str) -> frozenset[int]:
    """Read a list of NUMA nodes as the kernel writes it: "0-1,3"; empty text is no node.

    Raises ValueError with a sentence that says how to write it.
    """
    nodes: set[int] = set()
    for part in text.split(",") if text else ():
        match = _NODES.fullmatch(part)
        first = int(match.group(1)) if match else 1
        last = int(match.group(2) or first) if match else 0
        if last < first or last > MOST_NODES:
            raise ValueError(
                "write node numbers and ranges (at most 1023) with commas, such as '0' or '0-1,3'"
            )
        nodes.update(range(first, last + 1))
    return frozenset(nodes)


def format_bytes(size_bytes: int) -> str:
    """Write bytes for people, rounded down so that a printed limit can be typed back in."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= scale:
            whole, tenths = divmod(size_bytes * 10 // scale, 10)
            return f"{whole}.{tenths}{unit}" if tenths else f"{whole}{unit}"
    return f"{size_bytes}B"


def resolve_l1_size(text: str, budget: MemoryBudget, *, hugepages: str = "off") -> int:
    """Turn `l1.size` into bytes, rounded down to whole 2 MiB.

    Raises ConfigError with the numbers and the fix if that is below 4 MiB or more than is free now.
    """
    try:
        size = parse_amount(text)
    except ValueError as error:
        raise ConfigError(f"l1.size = {text!r} is not a size: {error}") from None
    wanted_bytes = int(size * budget.limit_bytes) if isinstance(size, Fraction) else size
    size_bytes = wanted_bytes // L1_STEP_BYTES * L1_STEP_BYTES
    name = f"l1.size = {text!r}"
    if isinstance(size, Fraction):
        limit = f"{format_bytes(budget.limit_bytes)} ({budget.limit_source})"
        name += f" of {limit} is {format_bytes(wanted_bytes)}, which"
    if size_bytes < L1_MIN_BYTES:
        raise ConfigError(
            f"{name} is below the smallest L1, {format_bytes(L1_MIN_BYTES)}: "
            f"set l1.size to {format_bytes(L1_MIN_BYTES)} or more"
        )
    free_bytes, source = budget.free_bytes, budget.free_source
    if hugepages != "off":
        free_bytes, source = budget.huge_free_bytes, "free 2 MiB huge pages"
    if size_bytes > free_bytes:
        raise ConfigError(
            f"{name} is more than the {format_bytes(free_bytes)} free now "
            f"({source}; this process may use {format_bytes(budget.limit_bytes)} by "
            f"{budget.limit_source}): {_fix_for_size(free_bytes, hugepages, size_bytes)}"
        )
    return size_bytes


def memory_budget(root: str | Path = "/") -> MemoryBudget:
    """Read RAM, the cgroups of this process and what is free, below the file-system `root`.

    Raises ConfigError if `/proc/meminfo` cannot be read.
    """
    base = Path(root)
    meminfo = _meminfo(base)
    ram_bytes = meminfo["MemTotal"]
    limits = [(ram_bytes, "RAM")]
    # Kernels before 3.14 have no MemAvailable; what is plainly free is the safe answer there.
    available = "MemAvailable" if "MemAvailable" in meminfo else "MemFree"
    frees = [(meminfo.get(available, 0), available)]
    for folder, version, shown in _memory_cgroups(base):
        for limit_bytes, used_bytes, file_name in _cgroup_limits(folder, version):
            if limit_bytes >= ram_bytes:
                continue  # "no limit" in v1 is a huge number; one above RAM limits nothing
            source = f"cgroup v{version} {shown} {file_name}"
            limits.append((limit_bytes, source))
            frees.append((max(0, limit_bytes - used_bytes), source))
    # min() keeps the first of equals, so RAM is named before a cgroup that says the same.
    limit_bytes, limit_source = min(limits, key=lambda pair: pair[0])
    free_bytes, free_source = min(frees, key=lambda pair: pair[0])
    huge_page_bytes = meminfo.get("Hugepagesize", 0)
    huge_free = _huge_free_bytes(base, meminfo, huge_page_bytes)
    return MemoryBudget(limit_bytes, limit_source, free_bytes, free_source, huge_free)


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes memory, at most so much, and the setting that changes it."""

    name: str
    size_bytes: int
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Budget:
    """All memory of a server, against what it may use."""

    parts: tuple[Part, ...]
    memory: MemoryBudget
    huge_bytes: int = 0  # of it in reserved huge pages, which no other memory is taken from
    used_bytes: int = 0  # that this process has already

    @property
    def total_bytes(self) -> int:
        """Everything at its largest."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def room_bytes(self) -> int:
        """What there is for it, huge pages left out."""
        return min(self.memory.limit_bytes, self.memory.free_bytes + self.used_bytes)

    def check(self) -> None:
        """Raise ConfigError with the numbers and the fix when it does not fit."""
        needed_bytes = self.total_bytes - self.huge_bytes
        if needed_bytes <= self.room_bytes:
            return
        memory = self.memory
        room = f"{format_bytes(memory.free_bytes)} are free now ({memory.free_source})"
        if self.room_bytes == memory.limit_bytes:
            room = f"this process may use {format_bytes(memory.limit_bytes)}"
            room += f" ({memory.limit_source})"
        parts = ", ".join(f"{part.name} {format_bytes(part.size_bytes)}" for part in self.parts)
        raise ConfigError(
            f"the server may need {format_bytes(needed_bytes)} of memory and {room}; "
            f"it is made of {parts}: {self._fix()}"
        )

    def as_dict(self) -> dict[str, object]:
        """For `kvkeep status` and `kvkeep doctor`."""
        return {
            "total_bytes": self.total_bytes,
            "limit_bytes": self.memory.limit_bytes,
            "limit_source": self.memory.limit_source,
            "free_at_start_bytes": self.memory.free_bytes,
            "parts": {part.name: part.size_bytes for part in self.parts},
        }

    def fields(self) -> dict[str, object]:
        """For one line of the log."""
        parts = {
            f"{part.name.replace(' ', '_')}_bytes".lower(): part.size_bytes for part in self.parts
        }
        return {"most_bytes": self.total_bytes, "limit_bytes": self.memory.limit_bytes, **parts}

    def _fix(self) -> str:
        """What to set so that it fits, computed from the sizes of the other parts."""
        sizes = {part.name: part.size_bytes for part in self.parts}
        l1_bytes, per_object = sizes["L1"] - self.huge_bytes, ENTRY_BYTES + GENERATION_BYTES
        objects = sizes["generation table"] // GENERATION_BYTES
        kept_bytes = self.total_bytes - sizes["L1"] - objects * per_object
        room_bytes = self.room_bytes - kept_bytes
        # With less L1 there are fewer objects too, until every page has one.
        share = room_bytes * SMALLEST_OBJECT_BYTES // (SMALLEST_OBJECT_BYTES + per_object)
        fits_bytes = max(room_bytes - objects * per_object, min(share, l1_bytes))
        fits_bytes = fits_bytes // L1_STEP_BYTES * L1_STEP_BYTES
        fixes = ["free memory", "raise the limit"]
        fewer = (room_bytes - l1_bytes) // per_object
        if fewer > 0:
            fixes.insert(0, f"set l1.max_objects to {fewer} or less")
        if not self.huge_bytes and fits_bytes >= L1_MIN_BYTES:
            fixes.insert(0, f"set l1.size to {fits_bytes // MIB}MiB or less")
        backends = next((part.setting for part in self.parts if part.setting[:3] == "l2."), "")
        if backends:
            fixes.append(f"lower {backends}")
        return ", or ".join(fixes)


def server_budget(
    memory: MemoryBudget,
    l1_bytes: int,
    max_objects: int,
    *,
    huge: bool = False,
    buffers: Mapping[str, int] | None = None,
    used_bytes: int = 0,
) -> Budget:
    """Sum what a server may need. `buffers`: the most that each L2 takes beside the arena."""
    objects = min(max_objects, l1_bytes // SMALLEST_OBJECT_BYTES)
    parts = [
        Part("L1", l1_bytes, "l1.size"),
        Part("generation table", GENERATION_BYTES * objects, "l1.max_objects"),
        Part("index", ENTRY_BYTES * objects, "l1.max_objects"),
        Part("process", PROCESS_BYTES),
    ]
    for name, size_bytes in (buffers or {}).items():
        if size_bytes:
            parts.append(Part(f"buffers of L2 {name}", size_bytes, "l2.encrypt_buffer_bytes"))
    return Budget(tuple(parts), memory, l1_bytes if huge else 0, used_bytes)


def resident_bytes(root: str | Path = "/") -> int:
    """What this process has in memory now; 0 when nobody says."""
    fields = "".join(_read_lines(Path(root) / "proc/self/statm")[:1]).split()
    pages = _number(fields[1]) if len(fields) > 1 else None
    return (pages or 0) * 4096


def _fix_for_size(free_bytes: int, hugepages: str, wanted_bytes: int) -> str:
    if hugepages != "off":
        pages = -(-wanted_bytes // L1_STEP_BYTES)
        return f"reserve them (sysctl vm.nr_hugepages={pages}) or set l1.hugepages to off"
    usable_bytes = free_bytes // L1_STEP_BYTES * L1_STEP_BYTES
    if usable_bytes < L1_MIN_BYTES:
        return "free memory or raise the limit"
    return f"set l1.size to {usable_bytes // MIB}MiB or less, free memory, or raise the limit"


def _meminfo(base: Path) -> dict[str, int]:
    """Values of `/proc/meminfo` in bytes (page counts as they are)."""
    path = base / "proc/meminfo"
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"cannot read {path} ({error.strerror}): mount /proc, the memory limit comes from it"
        ) from None
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isascii() and number.isdigit():
            values[name] = int(number) * (1024 if unit == "kB" else 1)
    if "MemTotal" not in values:
        raise ConfigError(f"{path} names no MemTotal: mount a complete /proc")
    return values


def _huge_free_bytes(base: Path, meminfo: dict[str, int], huge_page_bytes: int) -> int:
    """Free 2 MiB pages that nobody has reserved; `/proc/meminfo` speaks of the default size."""
    folder = base / "sys/kernel/mm/hugepages/hugepages-2048kB"
    free = _read_number(folder / "free_hugepages")
    if free is not None:
        promised = _read_number(folder / "resv_hugepages") or 0
        return max(0, free - promised) * L1_STEP_BYTES
    if huge_page_bytes != L1_STEP_BYTES:
        return 0
    promised = meminfo.get("HugePages_Rsvd", 0)
    return max(0, meminfo.get("HugePages_Free", 0) - promised) * L1_STEP_BYTES


def _memory_cgroups(base: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield (folder, cgroup version, name to show) from this process's cgroup up to the root.

    On a hybrid machine both versions are mounted and only one carries the memory controller; the
    files of the other are absent, so looking at both is harmless.
    """
    mounts = _cgroup_mounts(base)
    for version, path in _own_cgroups(base):
        if version not in mounts:
            continue
        mount_root, mount_point = mounts[version]
        parts = _below(path, mount_root)
        for depth in range(len(parts), -1, -1):
            folder = base.joinpath(mount_point.lstrip("/"), *parts[:depth])
            yield folder, version, "/" + "/".join(parts[:depth])


def _own_cgroups(base: Path) -> Iterator[tuple[int, str]]:
    """Parse `/proc/self/cgroup`: lines of `id:controllers:path`, id 0 being version 2."""
    for line in _read_lines(base / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield 2, path
        elif "memory" in controllers.split(","):
            yield 1, path


def _cgroup_mounts(base: Path) -> dict[int, tuple[str, str]]:
    """Map cgroup version to (root of the mount inside the hierarchy, mount point)."""
    mounts: dict[int, tuple[str, str]] = {}
    for line in _read_lines(base / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(tail) < 3:
            continue
        place = (_unescape(fields[3]), _unescape(fields[4]))
        if tail[0] == "cgroup2":
            mounts.setdefault(2, place)
        elif tail[0] == "cgroup" and "memory" in tail[2].split(","):
            mounts.setdefault(1, place)
    if not mounts:
        return {2: ("/", "/sys/fs/cgroup"), 1: ("/", "/sys/fs/cgroup/memory")}
    return mounts


def _below(path: str, mount_root: str) -> tuple[str, ...]:
    """Parts of a cgroup's path below the mount.

    A container without a cgroup namespace sees the host's path while its mount starts at its own
    cgroup; a path outside the mount ("/../..") can only be answered with the mount itself.
    """
    parts = tuple(part for part in path.split("/") if part)
    top = tuple(part for part in mount_root.split("/") if part)
    if ".." in parts or ".." in top or parts[: len(top)] != top:
        return ()
    return parts[len(top) :]


def _cgroup_limits(folder: Path, version: int) -> Iterator[tuple[int, int, str]]:
    """Yield (limit, bytes in use that cannot be dropped, file name) for one cgroup.

    `memory.high` counts as a limit: above it the kernel throttles, and an arena in memory without
    swap is nothing it could take back. In version 1 `hierarchical_memory_limit` also tells of
    limits on parents that a container cannot see.
    """
    stat = dict(line.partition(" ")[::2] for line in _read_lines(folder / "memory.stat"))
    if version == 2:
        used_bytes = _read_number(folder / "memory.current") or 0
        cached_bytes = _number(stat.get("inactive_file", "")) or 0
        limits = {name: _read_number(folder / name) for name in ("memory.max", "memory.high")}
    else:
        used_bytes = _read_number(folder / "memory.usage_in_bytes") or 0
        cached_bytes = _number(stat.get("total_inactive_file", "")) or 0
        limits = {
            "memory.limit_in_bytes": _read_number(folder / "memory.limit_in_bytes"),
            "hierarchical_memory_limit": _number(stat.get("hierarchical_memory_limit", "")),
        }
    for name, limit_bytes in limits.items():
        if limit_bytes is not None:
            yield limit_bytes, max(0, used_bytes - cached_bytes), name


def _read_number(path: Path) -> int | None:
    """The number in a file; None if the file is absent, unreadable or says "max"."""
    return _number("".join(_read_lines(path)[:1]))


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 32 else None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _unescape(field: str) -> str:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
