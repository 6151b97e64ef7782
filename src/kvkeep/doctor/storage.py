"""L2: whether each configured backend can be read, and its place can take what it may hold."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvkeep.backends import registry
from kvkeep.config import L2Config
from kvkeep.doctor.check import Check, Status
from kvkeep.errors import ConfigError
from kvkeep.limits import format_bytes


def check_storage(l2: L2Config) -> Iterator[Check]:
    """One check for each URL; nothing is opened or made."""
    try:
        urls = registry.parse(l2.backends)
    except ConfigError as error:
        yield Check("L2", Status.FAIL, str(error), "correct l2.backends")
        return
    if not urls:
        yield Check("L2", Status.OK, "none is configured: what is stored ends with the server")
    for url in urls:
        try:
            registry.backend(url)
        except ConfigError as error:
            yield Check("L2", Status.FAIL, str(error), "correct l2.backends")
            continue
        if url.scheme == "fs":
            yield _check_directory(url.name, Path(url.path), url.size("capacity"))
        else:
            yield Check("L2", Status.OK, f"{url.name}: {url.public}")


def _check_directory(name: str, root: Path, capacity_bytes: int | None) -> Check:
    there = root if root.is_dir() else root.parent
    if not there.is_dir():
        detail = f"{name}: neither {root} nor the directory above it is there"
        return Check("L2", Status.FAIL, detail, f"mount it, or mkdir -p {root}")
    if not os.access(there, os.W_OK | os.X_OK):
        detail = f"{name}: this user may not write to {there}"
        return Check("L2", Status.FAIL, detail, f"chown {there}, or run as its owner")
    free_bytes = shutil.disk_usage(there).free
    detail = f"{name}: {root}, {format_bytes(free_bytes)} free"
    if capacity_bytes is not None and capacity_bytes > free_bytes and there != root:
        detail += f", and it may take {format_bytes(capacity_bytes)}"
        return Check("L2", Status.WARN, detail, "set capacity in its URL to less")
    return Check("L2", Status.OK, detail)
