"""Takes a directory into use for `fs`: refuses what is not ours, and says why with the fix.

Nothing is made and nothing is changed before it is certain that the directory is new, empty, or an
L2 that no other server has. A root that was open before is taken back only when it is the same one.
"""

import contextlib
import errno
import os
import stat
from pathlib import Path

import msgspec

from kvkeep.backends import fs_identity
from kvkeep.backends.fs_place import (
    DIRECTORY_MODE,
    NO_WRITING,
    QUARANTINE,
    TMP,
    Identity,
    Place,
    another,
    gone,
    own_directory,
)
from kvkeep.errors import BackendError

_FIXES = {
    errno.ENOSPC: "make room on its disk",
    errno.EDQUOT: "make room in its quota",
    errno.EIO: "look at its disk",
    errno.ESTALE: "mount it again",
    errno.EMFILE: "raise the limit of open files",
    errno.ELOOP: "put a directory or a file in place of the link",
}


def open_place(root: Path, *, capacity_bytes: int | None, before: Place | None = None) -> Place:
    """Open and lock the root; `before` is the same root as it was when it vanished.

    Makes the root and what belongs in it, but only where none was `before`. Raises BackendError.
    """
    try:
        place = _opened(root) if before is None else _opened_again(root, before)
        try:
            _take(place, capacity_bytes, before)
        except BaseException:
            place.release()
            raise
    except OSError as error:
        raise _cannot_be_used(root, error) from error
    return place


def refuse_another(root: Path, before: Place) -> None:
    """Raise BackendError unless the root is the one from `before`, or that one mounted again."""
    try:
        _opened_again(root, before)
    except OSError as error:
        raise _cannot_be_used(root, error) from error


def disk_size_bytes(place: Place) -> int:
    """What the whole file system can hold."""
    disk = os.fstatvfs(place.fd)
    return disk.f_blocks * disk.f_frsize


def _opened(root: Path) -> Place:
    fs_identity.refuse_nested(root)
    try:
        if not root.is_dir():
            with contextlib.suppress(FileExistsError):
                os.mkdir(root, DIRECTORY_MODE)
        place = Place(root, os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _cannot_be_made(root) from error
    if os.fstat(place.fd).st_mode & stat.S_IWOTH:
        raise BackendError(
            f"{root} may be written by everybody, who could put KV of theirs in it: "
            f"chmod o-w {root}"
        )
    return place


def _opened_again(root: Path, before: Place) -> Place:
    try:
        place = Place(root, os.open(root, os.O_RDONLY | os.O_DIRECTORY))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise gone(root) from error
    known, found = before.identity, fs_identity.read_identity(place)
    is_same = (place.device, place.inode) == (before.device, before.inode)
    if found is None and is_same:
        return place  # it was read-only then, and never got its kvkeep.json
    if known is None or found is None or found.id != known.id:
        raise another(root)
    return place


def _take(place: Place, capacity_bytes: int | None, before: Place | None) -> None:
    place.read_only = not os.access(place.root, os.W_OK)
    if not place.read_only:
        place.lock_directory()
    found = fs_identity.read_identity(place)
    if found is None and before is None:
        fs_identity.refuse_foreign(place)
    known = found or (before.identity if before is not None else None)
    identity = known or fs_identity.new_identity(place, capacity_bytes)
    if capacity_bytes is not None:
        identity = msgspec.structs.replace(identity, capacity_bytes=capacity_bytes)
    place.identity = identity
    _prepare(place, found, identity)


def _prepare(place: Place, found: Identity | None, identity: Identity) -> None:
    """kvkeep.json first: what a start that is killed leaves must be known as ours."""
    try:
        if not place.read_only:
            fs_identity.clear_unfinished(place)
            if found is None:
                fs_identity.write_identity(place, identity)
            place.lock_file()
        if not place.read_only and found is not None and found != identity:
            fs_identity.write_identity(place, identity)
        _own_directories(place)
    except OSError as error:
        if error.errno not in NO_WRITING:
            raise
        place.read_only = True
        _own_directories(place)


def _own_directories(place: Place) -> None:
    for name in (TMP, QUARANTINE):
        with (
            contextlib.suppress(FileNotFoundError),
            own_directory(place, name, make=not place.read_only),
        ):
            pass


def _cannot_be_made(root: Path) -> BackendError:
    if root.is_symlink() and not root.exists():
        return BackendError(f"{root} is a link to nothing: remove it, or make what it names")
    if root.exists():
        return BackendError(f"{root} is not a directory but a file: name a directory")
    for parent in root.parents:
        if parent.exists() and not parent.is_dir():
            return BackendError(
                f"{root} cannot be made: {parent} is a file, not a directory; name another place"
            )
    return BackendError(f"{root} cannot be made: create {root.parent} first, or name another place")


def _cannot_be_used(root: Path, error: OSError) -> BackendError:
    fix = "correct that"
    if error.errno in NO_WRITING:
        fix = f"let the server's user (uid {os.geteuid()}) read and write it"
    elif error.errno is not None:
        fix = _FIXES.get(error.errno, fix)
    named = error.filename if isinstance(error.filename, str) else ""
    path = root / named  # what is relative is below the root
    return BackendError(
        f"{root} cannot be used: {path}: {error.strerror}; {fix}, or name another directory"
    )
