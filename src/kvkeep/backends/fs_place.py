"""The directory of the `fs` backend: taken with a lock, known by its identity, never mixed up.

    <root>/kvkeep.json     who this directory is, and its capacity
    <root>/lock            held by the one server that writes here
    <root>/<label>/<2 hex digits>/<stem>.kv
    <root>/tmp, quarantine, trash-*

All work goes through an open descriptor of the root. When the root's path no longer leads to it (a
disk that was unmounted), that is an error: nothing is ever created in its stead.
"""

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path

import msgspec

from kvkeep.errors import BackendError

IDENTITY = "kvkeep.json"
LOCK = "lock"
TMP = "tmp"
QUARANTINE = "quarantine"
TRASH = "trash-"
SUFFIX = ".kv"
FREE_SHARE = 0.8  # of what is free at the first start
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
_MAX_IDENTITY_BYTES = 4_096
_NO_WRITING = (errno.EROFS, errno.EACCES, errno.EPERM)


class Identity(msgspec.Struct, frozen=True):
    """What kvkeep.json says."""

    id: str
    capacity_bytes: int
    version: int = 1


class Place:
    """An open, locked root. The descriptors close when the last thread is done with it."""

    def __init__(self, root: Path, fd: int) -> None:
        self.root = root
        self.fd = fd
        self._lock_fd: int | None = None
        stat = os.fstat(fd)
        self.device = stat.st_dev
        self._inode = stat.st_ino
        self.identity: Identity | None = None
        self.read_only = False
        self.released = False

    def __del__(self) -> None:
        for fd in (self.fd, self._lock_fd):
            if fd is not None:
                os.close(fd)

    def check(self) -> None:
        """Raise BackendError when the root's path leads elsewhere, or nowhere."""
        try:
            stat = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise gone(self.root) from error
        if (stat.st_dev, stat.st_ino) != (self.device, self._inode):
            raise BackendError(
                f"{self.root} is not the directory that was opened: is its disk still mounted?"
            )
        if self.released:
            raise BackendError(f"{self.root} is closed")

    def lock(self) -> None:
        """Take the lock for as long as this process lives, or find that nothing can be written."""
        try:
            self._lock_fd = os.open(
                LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, FILE_MODE, dir_fd=self.fd
            )
        except OSError as error:
            if error.errno not in _NO_WRITING:
                raise
            self.read_only = True
            return
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock_fd, 32, 0).decode("ascii", "replace").strip()
            raise BackendError(
                f"{self.root} is in use by another server (pid {holder or 'unknown'}): "
                "give each server a directory of its own"
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)

    def release(self) -> None:
        """Give up the lock, also when a stuck thread still has the root open."""
        self.released = True
        if self._lock_fd is not None:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)


def gone(root: Path) -> BackendError:
    """The root is not there."""
    return BackendError(
        f"{root} has vanished: mount its disk again, or create the directory; "
        "kvkeep takes it back by itself"
    )


def open_place(root: Path, *, capacity_bytes: int | None, before: Place | None = None) -> Place:
    """Open and lock the root; `before` is the same root as it was when it vanished.

    Makes the root and what belongs in it, but only where none was `before`: a directory on
    another device that does not know our identity is a mount point without its disk.
    """
    try:
        if before is None:
            _make(root)
        place = Place(root, os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise gone(root) if before is not None else _no_parent(root) from error
    known = before.identity if before is not None else None
    identity = _read_identity(place)
    if before is not None and known is not None and (identity is None or identity.id != known.id):
        empty = not os.listdir(place.fd)
        if place.device != before.device or not empty:
            raise BackendError(
                f"{root} is another directory than the one that was opened: mount its disk again, "
                "or restart the server to use this one"
            )
    place.lock()
    identity = identity or known or Identity(secrets.token_hex(8), _default_capacity(place))
    if capacity_bytes is not None:
        identity = msgspec.structs.replace(identity, capacity_bytes=capacity_bytes)
    place.identity = identity
    if not place.read_only:
        _prepare(place, identity)
    return place


def make_directory(place: Place, name: str) -> None:
    """One directory below the root; one that is there is fine."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, DIRECTORY_MODE, dir_fd=place.fd)


def _prepare(place: Place, identity: Identity) -> None:
    try:
        for name in (TMP, QUARANTINE):
            make_directory(place, name)
        if _read_identity(place) != identity:
            temporary = f"{TMP}/{secrets.token_hex(8)}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with open(os.open(temporary, flags, FILE_MODE, dir_fd=place.fd), "wb") as file:
                file.write(msgspec.json.encode(identity))
            os.rename(temporary, IDENTITY, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except OSError as error:
        if error.errno not in _NO_WRITING:
            raise
        place.read_only = True


def _make(root: Path) -> None:
    if not root.is_dir():
        with contextlib.suppress(FileExistsError):
            os.mkdir(root, DIRECTORY_MODE)


def _no_parent(root: Path) -> BackendError:
    if root.exists():
        return BackendError(f"{root} is not a directory: name one, or remove the file")
    return BackendError(f"{root} cannot be made: create {root.parent} first, or name another place")


def _read_identity(place: Place) -> Identity | None:
    try:
        fd = os.open(IDENTITY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=place.fd)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        text = file.read(_MAX_IDENTITY_BYTES)
    try:
        return msgspec.json.decode(text, type=Identity)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BackendError(
            f"{place.root}/{IDENTITY} cannot be read ({error}): remove it, "
            "or name another directory"
        ) from error


def _default_capacity(place: Place) -> int:
    stat = os.fstatvfs(place.fd)
    return int(FREE_SHARE * stat.f_bavail * stat.f_frsize)
