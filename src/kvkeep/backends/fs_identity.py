"""Whose directory it is: kvkeep.json is read, checked and written here, and nothing else is ours.

A directory becomes an L2 by its kvkeep.json, which is written before anything else is made, whole
or not at all. One that has content and no kvkeep.json belongs to somebody else. What kvkeep.json
says is checked before it is acted upon: a wrong capacity would evict everything.
"""

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path

import msgspec

from kvkeep.backends.fs_place import FILE_MODE, IDENTITY, LOCK, Identity, Place
from kvkeep.errors import BackendError
from kvkeep.limits import format_bytes

VERSION = 1
LEAST_CAPACITY_BYTES = 1 << 20
MOST_CAPACITY_BYTES = 1 << 60
FREE_SHARE = 0.8  # of what is free at the first start
LOST_AND_FOUND = "lost+found"
UNFINISHED = re.compile(rf"{re.escape(IDENTITY)}\.[0-9a-f]{{16}}")  # a start that was killed
_ID = re.compile(r"[0-9a-f]{16}")
_LOCK_TEXT = re.compile(rb"([0-9]{1,10}\n([ -~]*\n)?)?")
_MAX_BYTES = 4_096
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


def read_identity(place: Place) -> Identity | None:
    """What kvkeep.json says; None when there is none. Raises BackendError when it is not sound."""
    path = place.root / IDENTITY
    try:
        fd = os.open(IDENTITY, _READ, dir_fd=place.fd)
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.close(fd)
            raise BackendError(f"{path} is a directory: name another directory for the L2")
        with open(fd, "rb") as file:
            text = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BackendError(
            f"{path} cannot be read ({error.strerror}): make it a readable file of kvkeep, "
            "or name another directory"
        ) from error
    try:
        identity = msgspec.json.decode(text, type=Identity)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BackendError(
            f"{path} cannot be read ({error}): correct it, or name another directory"
        ) from error
    _refuse_unsound(path, identity)
    return identity


def _refuse_unsound(path: Path, identity: Identity) -> None:
    if identity.version != VERSION:
        raise BackendError(
            f"{path} has version {identity.version}, and this kvkeep knows {VERSION}: "
            "use the kvkeep that made it, or name another directory"
        )
    if not LEAST_CAPACITY_BYTES <= identity.capacity_bytes <= MOST_CAPACITY_BYTES:
        raise BackendError(
            f"{path} has capacity_bytes {identity.capacity_bytes}, and it must be at least "
            f"{LEAST_CAPACITY_BYTES} (1 MiB) and at most {MOST_CAPACITY_BYTES}: correct the number"
        )
    if _ID.fullmatch(identity.id) is None:
        raise BackendError(
            f"{path} has the id {identity.id[:40]!r}, and it must be 16 hex digits: correct it"
        )


def new_identity(place: Place, capacity_bytes: int | None) -> Identity:
    """For a first start."""
    if capacity_bytes is None:
        disk = os.fstatvfs(place.fd)
        capacity_bytes = int(FREE_SHARE * disk.f_bavail * disk.f_frsize)
        if capacity_bytes < LEAST_CAPACITY_BYTES and not place.read_only:
            raise BackendError(
                f"the disk of {place.root} has {format_bytes(disk.f_bavail * disk.f_frsize)} "
                "free, which is too little: make room there, or name another directory"
            )
    return Identity(secrets.token_hex(8), capacity_bytes, VERSION)


def write_identity(place: Place, identity: Identity) -> None:
    """Replace kvkeep.json, whole or not at all. Raises OSError."""
    temporary = f"{IDENTITY}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(temporary, flags, FILE_MODE, dir_fd=place.fd)
    try:
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(identity))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, IDENTITY, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=place.fd)
        raise


def clear_unfinished(place: Place) -> None:
    """Remove what a start that was killed while it wrote kvkeep.json has left."""
    for name in os.listdir(place.fd):
        if UNFINISHED.fullmatch(name) and _is(place, name, stat.S_IFREG):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=place.fd)


def refuse_foreign(place: Place) -> None:
    """A root without kvkeep.json must be empty. Raises BackendError."""
    for name in os.listdir(place.fd):
        if not _is_nothing(place, name):
            raise BackendError(
                f"{place.root} is not empty and not an L2 of kvkeep: "
                "name a new or an empty directory"
            )


def refuse_nested(root: Path) -> None:
    """One L2 in another would be foreign files there. Raises BackendError."""
    for parent in Path(os.path.realpath(root)).parents:
        if os.path.lexists(parent / IDENTITY):
            raise BackendError(
                f"{root} is inside of {parent}, which is an L2 itself (it has {IDENTITY}): "
                "name a directory outside of it"
            )


def _is_nothing(place: Place, name: str) -> bool:
    """Whether an empty directory may have this: its disk's own, or left by a start that died."""
    if name == LOST_AND_FOUND:
        return _is(place, name, stat.S_IFDIR)
    if name == LOCK:
        return _is(place, name, stat.S_IFREG) and _is_our_lock(place)
    return UNFINISHED.fullmatch(name) is not None and _is(place, name, stat.S_IFREG)


def _is(place: Place, name: str, kind: int) -> bool:
    try:
        mode = os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    return stat.S_IFMT(mode) == kind


def _is_our_lock(place: Place) -> bool:
    with open(os.open(LOCK, _READ, dir_fd=place.fd), "rb") as file:
        return _LOCK_TEXT.fullmatch(file.read(_MAX_BYTES)) is not None
