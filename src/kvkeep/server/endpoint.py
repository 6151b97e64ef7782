"""Makes the control socket: directory, lock, stale file, modes; and says clearly when it cannot.

A lock file next to the socket is held for the server's life, so two servers never share a path and
a stale socket file can be removed safely. The socket file is only removed while it is our own.
Whoever can put another socket in its place gets the KV of every engine that connects: a directory
where somebody else could is refused.
"""

import errno
import fcntl
import grp
import os
import socket
import stat
from pathlib import Path

from kvkeep.config import SOCKET_PATH_MAX_BYTES
from kvkeep.errors import SocketError


class Endpoint:
    """A bound, listening unix socket with mode 0600 (0660 with a group) in a 0700 directory."""

    def __init__(self, path: str, group: str = "") -> None:
        self.path = Path(path)
        _check_length(path)
        gid = _gid(group) if group else None
        self._make_directory(gid)
        if _is_no_socket(self.path):
            raise SocketError(
                f"cannot serve {path}: it exists and is not a socket; choose another [socket] path"
            )
        self._made: tuple[int, int] | None = None
        self._lock = self._take_lock()
        try:
            self.socket = self._bind(gid)
        except BaseException:
            self._release_lock()
            raise

    def close(self) -> None:
        """Stop listening and remove the socket file; the lock goes last."""
        if self.in_place():
            self.path.unlink(missing_ok=True)
        self.socket.close()
        self._release_lock()

    def in_place(self) -> bool:
        """True while the file at the path is the socket that this server made."""
        return self._made is not None and _identity(self.path) == self._made

    def _release_lock(self) -> None:
        # Only while it is held: then nobody else can have taken this file for its lock.
        if _identity(self._lock_path) == _identity(self._lock):
            self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    @property
    def _lock_path(self) -> Path:
        return Path(f"{self.path}.lock")

    def _make_directory(self, gid: int | None) -> None:
        folder = self.path.parent
        try:
            if not os.path.lexists(folder):
                for above in reversed(folder.parents):
                    if not above.exists():
                        above.mkdir(mode=0o755)  # not more, whatever the umask
                folder.mkdir(mode=0o700)
                os.chmod(folder, 0o700 if gid is None else 0o750)
                if gid is not None:
                    os.chown(folder, -1, gid)
        except NotADirectoryError as error:
            raise SocketError(_not_a_directory(folder)) from error
        except OSError as error:
            raise SocketError(
                f"cannot make the socket's directory {folder}: {error.strerror}; "
                "choose another [socket] path or make the directory yourself"
            ) from error
        if not folder.is_dir():
            raise SocketError(_not_a_directory(folder))
        problem = unsafe(folder)
        if problem is not None:
            what, fix = problem
            raise SocketError(
                f"the socket's directory {what}, so the socket could be replaced: {fix}, "
                "or choose another [socket] path"
            )

    def _take_lock(self) -> int:
        """Holds the lock file that the path names; one that its owner just removed is no lock."""
        while True:
            lock = self._open_lock()
            if _identity(lock) == _identity(self._lock_path):
                break
            os.close(lock)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock

    def _open_lock(self) -> int:
        name = str(self._lock_path)
        try:
            lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SocketError(
                f"cannot open {name}: {error.strerror}; the directory must belong to the user "
                "that runs kvkeep serve"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(lock, 32).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise SocketError(
                f"{self.path} is already served by process {owner}: stop it, or choose another "
                "[socket] path"
            ) from error
        return lock

    def _bind(self, gid: int | None) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        try:
            if self.path.is_socket():
                self.path.unlink()  # we hold the lock: nobody serves it
            sock.bind(str(self.path))
            self._made = _identity(self.path)
            if gid is not None:
                os.chown(self.path, -1, gid)
                os.chmod(self.path, 0o660)
            sock.listen(128)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            if self.in_place():
                self.path.unlink(missing_ok=True)
            what = (
                "exists and is not a socket" if error.errno == errno.EADDRINUSE else error.strerror
            )
            raise SocketError(
                f"cannot serve {self.path}: {what}; choose another [socket] path"
            ) from error
        finally:
            os.umask(old_mask)
        return sock


def unsafe(folder: Path) -> tuple[str, str] | None:
    """Who else could put a socket there: what is wrong with the directory, and the fix."""
    found, above = os.lstat(folder), os.stat(folder.parent)
    if stat.S_ISLNK(found.st_mode):
        return f"{folder} is a link to {os.readlink(folder)}", "name the directory itself"
    if found.st_uid not in (os.geteuid(), 0):
        return (
            f"{folder} belongs to another user (uid {found.st_uid})",
            f"chown {os.geteuid()} {folder}",
        )
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        return f"{folder} has mode {mode:04o} and lets others write", f"chmod go-w {folder}"
    if above.st_mode & 0o002 and not above.st_mode & stat.S_ISVTX:
        return f"{folder} is in {folder.parent}, where all may write", f"chmod o-w {folder.parent}"
    return None


def _check_length(path: str) -> None:
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_MAX_BYTES:
        raise SocketError(
            f"the socket path {path} has {size} bytes, a unix socket takes at most "
            f"{SOCKET_PATH_MAX_BYTES}: choose a shorter [socket] path"
        )


def _identity(file: Path | int) -> tuple[int, int] | None:
    """What tells this file from every other one that exists; None when there is none."""
    try:
        found = os.stat(file) if isinstance(file, int) else os.lstat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_no_socket(path: Path) -> bool:
    try:
        return not stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return os.path.lexists(path)  # a link to nowhere


def _not_a_directory(folder: Path) -> str:
    return (
        f"the socket's directory {folder} is a file, or one of its parents is: remove it or choose "
        "another [socket] path"
    )


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise SocketError(
            f'[socket] group = "{group}" does not exist on this host: create it or leave it empty'
        ) from error
