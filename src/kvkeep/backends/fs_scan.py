"""Walks the directory of the `fs` backend: what is an object by its place and name, what is not.

Blocking, made in a thread; used by the scan that rebuilds the index at start and by the scrub.
Whatever does not stand where an object of its name belongs is counted and left alone, also in
the directories that we clean up: only names of exactly the form that we give are ever deleted.
"""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.fs_identity import LOST_AND_FOUND, UNFINISHED
from kvkeep.backends.fs_place import (
    IDENTITY,
    LOCK,
    NO_DIRECTORY,
    QUARANTINE,
    SUFFIX,
    TMP,
    TRASH,
    Place,
    directory,
    own_directory,
)
from kvkeep.backends.header import LABEL_DIGITS, SALT_DIGITS, file_stem, parse_stem
from kvkeep.types import ObjectKey

SLICE = 256  # files per report: what the loop takes in one callback
SHARD_DIGITS = 2

_LABEL = re.compile(rf"[0-9a-f]{{{LABEL_DIGITS}}}(-[0-9a-f]{{{SALT_DIGITS}}})?")
_SHARD = re.compile(rf"[0-9a-f]{{{SHARD_DIGITS}}}")
_TEMPORARY = re.compile(r"[0-9a-f]{16}")
_TRASH = re.compile(rf"{TRASH}[0-9a-f]{{16}}")
_OURS = {IDENTITY, LOCK, QUARANTINE, TMP, LOST_AND_FOUND}
_SHUT = (errno.EACCES, errno.EPERM)


class Found(NamedTuple):
    """One file under an object's name."""

    key: ObjectKey
    size: int  # of the whole file
    mtime_ns: int


class Listing(NamedTuple):
    """What one directory has, and how many things in it are not ours."""

    found: list[Found]
    foreign: int


def object_path(label: str, key: ObjectKey) -> str:
    """Where an object is, below the root."""
    stem = file_stem(key)
    return f"{label}/{stem[:SHARD_DIGITS]}/{stem}{SUFFIX}"


def shards(place: Place) -> tuple[list[tuple[str, str]], int]:
    """(label, shard) of every directory that may have objects, and the count of strange names."""
    found = []
    foreign = 0
    for label in sorted(os.listdir(place.fd)):
        if label in _OURS or _is_trash(place, label) or UNFINISHED.fullmatch(label):
            continue
        if _LABEL.fullmatch(label) is None:
            foreign += 1
            continue
        with _opened(place.fd, label) as fd:
            inside = sorted(os.listdir(fd)) if fd is not None else [""]
        for shard in inside:
            if _SHARD.fullmatch(shard):
                found.append((label, shard))
            else:
                foreign += 1
    return found, foreign


def listing(place: Place, label: str, shard: str) -> Listing:
    """The objects in one directory. One that has gone meanwhile is empty."""
    found = []
    foreign = 0
    with _opened(place.fd, f"{label}/{shard}") as fd:
        if fd is None:
            return Listing([], 1 if _exists(place, f"{label}/{shard}") else 0)
        for name in os.listdir(fd):
            key = _key_of(name, shard)
            with contextlib.suppress(FileNotFoundError):
                data = _stat_of_file(name, fd) if key is not None else None
                if key is None or data is None:
                    foreign += 1
                else:
                    found.append(Found(key, data.st_size, data.st_mtime_ns))
    return Listing(found, foreign)


def clear_temporaries(place: Place) -> int:
    """Remove what earlier runs did not finish; returns how many other things are there."""
    foreign = 0
    with own_directory(place, TMP, make=True, to_list=True) as fd:
        for name in os.listdir(fd):
            if place.is_own(name):  # a probe beside this scan
                continue
            with contextlib.suppress(FileNotFoundError):
                if _TEMPORARY.fullmatch(name) and _stat_of_file(name, fd) is not None:
                    os.unlink(name, dir_fd=fd)
                else:
                    foreign += 1
    return foreign


def throw_away(place: Place, first: str, name: Callable[[], str]) -> list[str]:
    """Rename the labels that begin with `first` to trash names; returns those."""
    trash = []
    for label in os.listdir(place.fd):
        is_label = _LABEL.fullmatch(label) and (label == first or label.startswith(f"{first}-"))
        if is_label and _is_directory(place, label):
            with contextlib.suppress(FileNotFoundError):
                new = f"{TRASH}{name()}"
                os.rename(label, new, src_dir_fd=place.fd, dst_dir_fd=place.fd)
                trash.append(new)
    return trash


def trash_names(place: Place) -> list[str]:
    """What was thrown away and is still there."""
    return [name for name in os.listdir(place.fd) if _is_trash(place, name)]


def delete_tree(place: Place, name: str) -> Iterator[int]:
    """Delete the objects in a thrown away label, and what is empty then.

    Yields the bytes of every few files that went. Anything else in there stays.
    """
    freed = count = 0
    with _opened(place.fd, name) as fd:
        for shard in os.listdir(fd) if fd is not None else ():
            if fd is None or _SHARD.fullmatch(shard) is None:
                continue
            with _opened(fd, shard) as shard_fd:
                for file in os.listdir(shard_fd) if shard_fd is not None else ():
                    freed += _delete_object(file, shard, shard_fd)
                    count += 1
                    if count % SLICE == 0:
                        yield freed
                        freed = 0
            _remove_empty(shard, fd)
    _remove_empty(name, place.fd)
    yield freed


def _delete_object(name: str, shard: str, fd: int | None) -> int:
    """Unlink a file that has an object's name; returns the bytes that went."""
    if fd is None or _key_of(name, shard) is None:
        return 0
    with contextlib.suppress(FileNotFoundError, PermissionError):
        data = _stat_of_file(name, fd)
        if data is not None:
            os.unlink(name, dir_fd=fd)
            return -(-data.st_size // PAGE_BYTES) * PAGE_BYTES
    return 0


def _remove_empty(name: str, fd: int) -> None:
    try:
        os.rmdir(name, dir_fd=fd)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, *NO_DIRECTORY, *_SHUT):
            raise


def _key_of(name: str, shard: str) -> ObjectKey | None:
    if not name.startswith(shard) or not name.endswith(SUFFIX):
        return None
    return parse_stem(name[: -len(SUFFIX)])


def _stat_of_file(name: str, fd: int) -> os.stat_result | None:
    """None for what is no regular file, or shut."""
    try:
        data = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except PermissionError:
        return None
    return data if stat.S_ISREG(data.st_mode) else None


def _is_directory(place: Place, name: str) -> bool:
    try:
        mode = os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(mode)


def _exists(place: Place, path: str) -> bool:
    try:
        os.stat(path, dir_fd=place.fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def _is_trash(place: Place, name: str) -> bool:
    return _TRASH.fullmatch(name) is not None and _is_directory(place, name)


@contextlib.contextmanager
def _opened(fd: int, path: str) -> Iterator[int | None]:
    """A directory below another; None when something else has its name, or it is shut or gone."""
    with contextlib.ExitStack() as stack:
        try:
            inner = stack.enter_context(directory(fd, path, to_list=True))
        except OSError as error:
            if error.errno not in (errno.ENOENT, *NO_DIRECTORY, *_SHUT):
                raise
            yield None
            return
        yield inner
