"""L2: whether each configured backend can be read, and its place can take what it may hold.

Also whether the quota file can be used. Nothing is opened for use or made. What `kvkeep serve`
would refuse at such a place fails here, with the same fix.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from kvkeep.backends import fs_identity, registry
from kvkeep.backends.encrypted import sealers
from kvkeep.backends.fs_place import Identity, Place
from kvkeep.backends.registry import BackendUrl
from kvkeep.config import L2Config, QuotaConfig
from kvkeep.doctor.check import Check, Status
from kvkeep.errors import BackendError, ConfigError
from kvkeep.limits import format_bytes
from kvkeep.server.quota_book import QuotaBook

_BLOCK_BYTES = 512  # of st_blocks

Known = dict[object, str]  # what identifies a directory -> the name of its backend


def check_storage(l2: L2Config) -> Iterator[Check]:
    """One check for each URL, and one of the keys; nothing is opened or made."""
    if l2.key_file:
        yield _check_keys(l2)
    try:
        urls = registry.parse(l2.backends)
    except ConfigError as error:
        yield Check("L2", Status.FAIL, str(error), "correct l2.backends")
        return
    if not urls:
        yield Check("L2", Status.OK, "none is configured: what is stored ends with the server")
    known: Known = {}
    for url in urls:
        try:
            registry.backend(url)
        except ConfigError as error:
            yield Check("L2", Status.FAIL, str(error), "correct l2.backends")
            continue
        if url.scheme == "fs":
            yield _check_directory(url, known)
        else:
            yield Check("L2", Status.OK, f"{url.name}: {url.public}")


def check_quotas(config: QuotaConfig) -> Iterator[Check]:
    """One check of the quota file, where there is to be one; it is not made."""
    name = "quota file"
    if not config.file:
        return
    try:
        tenants = len(QuotaBook(config).own)
    except ConfigError as error:
        detail, _, fix = str(error).rpartition(": ")
        yield Check(name, Status.FAIL, detail, fix)
        return
    folder, is_there = Path(config.file).parent, os.path.exists(config.file)
    held = f": {tenants} with limits of their own" if is_there else " is not there yet"
    detail = f"{config.file}{held}"
    if wrong := _not_writable(folder):
        why, fix = wrong
        status = Status.WARN if is_there else Status.FAIL  # it is read at least
        yield Check(name, status, f"{detail}, and {why}: kvkeep quota set cannot write it", fix)
        return
    yield Check(name, Status.OK, detail)


def _check_keys(l2: L2Config) -> Check:
    try:
        make = sealers(l2.key_file, l2.encrypt_buffer_bytes)
    except ConfigError as error:
        detail, _, fix = str(error).rpartition(": ")
        return Check("L2 encryption", Status.FAIL, detail, fix)
    assert make is not None
    sealer = make()
    detail = f"{l2.key_file}: new objects are encrypted under {sealer.active}"
    others = sealer.keys - 1
    return Check("L2 encryption", Status.OK, f"{detail}, {others} more to read with")


def _check_directory(url: BackendUrl, known: Known) -> Check:
    root = Path(os.path.normpath(url.path))
    try:
        found = _stat(root)
        there = root if found is not None else root.parent
        wrong = (
            _not_a_directory(root, found)
            or _shared(root, found, url.name, known)
            or _not_writable(there)
        )
        if wrong is None:
            return _room(url, root, _identity(root, found))
    except BackendError as error:
        detail, _, fix = str(error).rpartition(": ")
        wrong = detail, fix
    except OSError as error:
        detail = f"{root} cannot be looked at: {error.strerror}"
        fix = "name a place that can be read"
        if error.errno in (errno.EACCES, errno.EPERM):
            fix = "let this user enter it and the directories above it, or run as its owner"
        wrong = detail, fix
    detail, fix = wrong
    return Check("L2", Status.FAIL, f"{url.name}: {detail}", fix)


def _stat(path: Path) -> os.stat_result | None:
    """None: there is nothing. Raises OSError when that cannot be seen."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _not_a_directory(root: Path, found: os.stat_result | None) -> tuple[str, str] | None:
    if found is None and root.is_symlink():
        return f"{root} is a link to nothing", "remove it, or make what it names"
    if found is None:
        above = _stat(root.parent)
        if above is None:
            detail = f"neither {root} nor the directory above it is there"
            return detail, f"mount it, or mkdir -p {root}"
        found, root = above, root.parent
    if stat.S_ISDIR(found.st_mode):
        return None
    return f"{root} is not a directory", "remove the file, or name a directory"


def _shared(
    root: Path, found: os.stat_result | None, name: str, known: Known
) -> tuple[str, str] | None:
    """Two backends on one directory, however it is spelled or mounted."""
    key: object = os.path.realpath(root) if found is None else (found.st_dev, found.st_ino)
    other = known.setdefault(key, name)
    if other == name:
        return None
    return f"{root} is the directory of {other} too", "give each backend a directory of its own"


def _not_writable(there: Path) -> tuple[str, str] | None:
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{there} is mounted read-only: nothing can be stored there", "mount it writable"
    if os.access(there, os.R_OK | os.W_OK | os.X_OK):
        return None
    return f"this user may not write to {there}", f"chown {there}, or run as its owner"


def _identity(root: Path, found: os.stat_result | None) -> Identity | None:
    """Of the L2 that is there. Raises BackendError for somebody else's directory."""
    fs_identity.refuse_nested(root)
    if found is None:
        return None
    place = Place(root, os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    identity = fs_identity.read_identity(place)
    if identity is None:
        fs_identity.refuse_foreign(place)
    return identity


def _room(url: BackendUrl, root: Path, identity: Identity | None) -> Check:
    free_bytes = shutil.disk_usage(root if root.is_dir() else root.parent).free
    detail = f"{url.name}: {root}, {format_bytes(free_bytes)} free"
    capacity_bytes = url.size("capacity")
    if capacity_bytes is None and identity is not None:
        capacity_bytes = identity.capacity_bytes
    if capacity_bytes is None or capacity_bytes <= free_bytes:
        return Check("L2", Status.OK, detail)
    used_bytes = _used_bytes(root)  # only now: it looks at every file
    if used_bytes:
        detail += f" and {format_bytes(used_bytes)} in it"
    if capacity_bytes <= free_bytes + used_bytes:
        return Check("L2", Status.OK, detail)
    detail += f", and it may take {format_bytes(capacity_bytes)}"
    return Check("L2", Status.WARN, detail, "set capacity in its URL to less")


def _used_bytes(root: Path) -> int:
    """What the disk gives to the files below it; one that leaves meanwhile counts nothing."""
    total = 0
    for folder, _, files in os.walk(root):
        for file in files:
            with contextlib.suppress(OSError):
                total += _BLOCK_BYTES * os.lstat(os.path.join(folder, file)).st_blocks
    return total
