"""Makes the control socket: directory, lock, stale file, modes; and says clearly when it cannot.

A lock file next to the socket is held for the server's life, so two servers never share a path and
a stale socket file can be removed safely.
"""

import errno
import fcntl
import grp
import os
import socket
from pathlib import Path

from kvkeep.config import SOCKET_PATH_MAX_BYTES
from kvkeep.errors import SocketError


class Endpoint:
    """A bound, listening unix socket with mode 0600 (0660 with a group) in a 0700 directory."""

    def __init__(self, path: str, group: str = "") -> None:
        self.path = Path(path)
        _check_length(path)
        self._make_directory(group)
        self._lock = self._take_lock()
        try:
            self.socket = self._bind(group)
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Stop listening and remove the socket file; the lock goes last."""
        self.socket.close()
        self.path.unlink(missing_ok=True)
        os.close(self._lock)

    def _make_directory(self, group: str) -> None:
        folder = self.path.parent
        try:
            if not folder.exists():
                folder.mkdir(parents=True, mode=0o700)
                os.chmod(folder, 0o750 if group else 0o700)
                if group:
                    os.chown(folder, -1, _gid(group))
        except NotADirectoryError as error:
            raise SocketError(_not_a_directory(folder)) from error
        except OSError as error:
            raise SocketError(
                f"cannot make the socket's directory {folder}: {error.strerror}; "
                "choose another [socket] path or make the directory yourself"
            ) from error
        if not folder.is_dir():
            raise SocketError(_not_a_directory(folder))

    def _take_lock(self) -> int:
        name = f"{self.path}.lock"
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
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock

    def _bind(self, group: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        old_mask = os.umask(0o177)
        try:
            if self.path.is_socket():
                self.path.unlink()  # we hold the lock: nobody serves it
            sock.bind(str(self.path))
            if group:
                os.chown(self.path, -1, _gid(group))
                os.chmod(self.path, 0o660)
            sock.listen(128)
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            what = (
                "exists and is not a socket" if error.errno == errno.EADDRINUSE else error.strerror
            )
            raise SocketError(
                f"cannot serve {self.path}: {what}; choose another [socket] path"
            ) from error
        except SocketError:
            sock.close()
            raise
        finally:
            os.umask(old_mask)
        return sock


def _check_length(path: str) -> None:
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_MAX_BYTES:
        raise SocketError(
            f"the socket path {path} has {size} bytes, a unix socket takes at most "
            f"{SOCKET_PATH_MAX_BYTES}: choose a shorter [socket] path"
        )


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
