"""The directory of the `fs` backend as it is open: its descriptors, its locks, its own directories.

    <root>/kvkeep.json     who this directory is, and its capacity
    <root>/lock            held by the one server that writes here
    <root>/<label>/<2 hex digits>/<stem>.kv
    <root>/tmp, quarantine, trash-*

All work goes through an open descriptor of the root, and through real directories below it: no
symlink is ever followed. When the root's path no longer leads to what was opened (a disk that was
unmounted), that is an error: nothing is ever created in its stead.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvkeep.errors import BackendError

IDENTITY = "kvkeep.json"
LOCK = "lock"
TMP = "tmp"
QUARANTINE = "quarantine"
TRASH = "trash-"
SUFFIX = ".kv"
DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
NO_WRITING = (errno.EROFS, errno.EACCES, errno.EPERM)
NO_DIRECTORY = (errno.ENOTDIR, errno.ELOOP)
_NO_LOCKS = (errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_THROUGH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
_TO_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_MAX_LOCK_BYTES = 256


class Identity(msgspec.Struct, frozen=True):
    """What kvkeep.json says."""

    id: str
    capacity_bytes: int
    version: int = 1


class Place:
    """An open root. The descriptors close when the last thread is done with it."""

    def __init__(self, root: Path, fd: int) -> None:
        self.root = root
        self.fd = fd
        self._lock_fd: int | None = None
        found = os.fstat(fd)
        self.device = found.st_dev
        self.inode = found.st_ino
        self.identity: Identity | None = None
        self.read_only = False
        self.released = False
        self._tag = secrets.token_hex(4)

    def __del__(self) -> None:
        for fd in (self.fd, self._lock_fd):
            if fd is not None:
                os.close(fd)

    def check(self) -> None:
        """Raise BackendError when the root's path leads elsewhere, or nowhere."""
        try:
            found = os.stat(self.root)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise gone(self.root) from error
        if (found.st_dev, found.st_ino) != (self.device, self.inode):
            raise another(self.root)
        if self.released:
            raise BackendError(f"{self.root} is closed")

    def temporary(self) -> str:
        """A new name for a file in `tmp`, known as this opening's own."""
        return self._tag + secrets.token_hex(4)

    def is_own(self, temporary: str) -> bool:
        """Whether this opening made the name: such a file is being written, not left over."""
        return temporary.startswith(self._tag)

    def lock_directory(self) -> None:
        """Take the root itself, which nobody can remove as they can a file in it.

        Where a file system has no such locks, the lock file alone must do.
        """
        try:
            self._flock(self.fd)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise

    def lock_file(self) -> None:
        """Take the lock file for as long as this process lives, or find that nothing is written."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._lock_fd = os.open(LOCK, flags, FILE_MODE, dir_fd=self.fd)
        except OSError as error:
            if error.errno not in NO_WRITING:
                raise
            self.read_only = True
            return
        if not stat.S_ISREG(os.fstat(self._lock_fd).st_mode):
            raise BackendError(f"{self.root}/{LOCK} is not a regular file: remove it")
        self._flock(self._lock_fd)
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n{_process()}\n".encode(), 0)

    def release(self) -> None:
        """Give up the locks, also when a stuck thread still has the root open."""
        self.released = True
        for fd in (self.fd, self._lock_fd):
            if fd is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)

    def _flock(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._in_use() from error

    def _in_use(self) -> BackendError:
        text = ""
        with contextlib.suppress(OSError):
            fd = os.open(LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd)
            with open(fd, "rb") as file:
                text = file.read(_MAX_LOCK_BYTES).decode("ascii", "replace")
        pid, _, process = text.strip().partition("\n")
        if pid == str(os.getpid()) and process == _process():
            return BackendError(
                f"two backends of this server use {self.root}: give each a directory of its own"
            )
        return BackendError(
            f"{self.root} is in use by another server (pid {pid or 'unknown'}): "
            "give each server a directory of its own"
        )


def gone(root: Path) -> BackendError:
    """The root is not there."""
    return BackendError(
        f"{root} has vanished: mount its disk again, and kvkeep takes it back by itself; "
        "or restart the server to begin a new one"
    )


def another(root: Path) -> BackendError:
    """The root's path leads to something else."""
    return BackendError(
        f"{root} is another directory than the one that was opened: mount its disk again, "
        "or restart the server to use this one"
    )


@contextlib.contextmanager
def directory(fd: int, path: str, *, make: bool = False, to_list: bool = False) -> Iterator[int]:
    """A descriptor of a directory below another one; each part of the path is a real directory.

    Raises FileNotFoundError, or an OSError of NO_DIRECTORY where something else is in the way.
    """
    opened: list[int] = []
    try:
        for part in path.split("/") if path else ():
            fd = _step(fd, part, _TO_LIST if to_list else _THROUGH, make=make)
            opened.append(fd)
        yield fd
    finally:
        for one in opened:
            os.close(one)


@contextlib.contextmanager
def own_directory(
    place: Place, name: str, *, make: bool = False, to_list: bool = False
) -> Iterator[int]:
    """`tmp` or `quarantine`. Raises BackendError when that is something else."""
    try:
        fd = _step(place.fd, name, _TO_LIST if to_list else _THROUGH, make=make)
    except OSError as error:
        if error.errno not in NO_DIRECTORY:
            raise
        raise BackendError(
            f"{place.root}/{name} is a link or a file, and must be a directory: "
            "move it away; kvkeep makes its own"
        ) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _step(fd: int, name: str, flags: int, *, make: bool) -> int:
    try:
        return os.open(name, flags, dir_fd=fd)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, DIRECTORY_MODE, dir_fd=fd)
    return os.open(name, flags, dir_fd=fd)


def _process() -> str:
    """What tells equal pids of two containers, or of two machines, apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "unknown"
