"""Walks the directory of the `fs` backend: what is an object by its place and name, what is not.

Blocking, made in a thread; used by the scan that rebuilds the index at start and by the scrub.
Whatever does not stand where an object of its name belongs is counted and left alone.
"""

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.fs_place import IDENTITY, LOCK, QUARANTINE, SUFFIX, TMP, TRASH, Place
from kvkeep.backends.header import LABEL_DIGITS, SALT_DIGITS, file_stem, parse_stem
from kvkeep.types import ObjectKey

SLICE = 256  # files per report: what the loop takes in one callback
SHARD_DIGITS = 2

_LABEL = re.compile(rf"[0-9a-f]{{{LABEL_DIGITS}}}(-[0-9a-f]{{{SALT_DIGITS}}})?")
_SHARD = re.compile(rf"[0-9a-f]{{{SHARD_DIGITS}}}")
_OURS = {IDENTITY, LOCK, QUARANTINE, TMP}


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
        if label in _OURS or label.startswith(TRASH):
            continue
        if _LABEL.fullmatch(label) is None:
            foreign += 1
            continue
        for shard in sorted(_listed(place, label)):
            if _SHARD.fullmatch(shard):
                found.append((label, shard))
            else:
                foreign += 1
    return found, foreign


def listing(place: Place, label: str, shard: str) -> Listing:
    """The objects in one directory. One that has gone meanwhile is empty."""
    found = []
    foreign = 0
    with _opened(place, f"{label}/{shard}") as fd:
        if fd is None:
            return Listing([], 0)
        with os.scandir(fd) as entries:
            for entry in entries:
                key = _key_of(entry.name, shard)
                if key is None:
                    foreign += 1
                    continue
                with contextlib.suppress(FileNotFoundError):
                    data = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(data.st_mode):
                        found.append(Found(key, data.st_size, data.st_mtime_ns))
                    else:
                        foreign += 1
    return Listing(found, foreign)


def clear_temporaries(place: Place) -> None:
    """Remove what earlier runs did not finish."""
    with _opened(place, TMP) as fd:
        for name in os.listdir(fd) if fd is not None else ():
            with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                os.unlink(name, dir_fd=fd)


def throw_away(place: Place, first: str, name: Callable[[], str]) -> list[str]:
    """Rename the labels that begin with `first` to trash names; returns those."""
    trash = []
    for label in os.listdir(place.fd):
        if label == first or label.startswith(f"{first}-"):
            with contextlib.suppress(FileNotFoundError):
                new = f"{TRASH}{name()}"
                os.rename(label, new, src_dir_fd=place.fd, dst_dir_fd=place.fd)
                trash.append(new)
    return trash


def trash_names(place: Place) -> list[str]:
    """What was thrown away and is still there."""
    return [name for name in os.listdir(place.fd) if name.startswith(TRASH)]


def delete_tree(place: Place, name: str) -> Iterator[int]:
    """Delete a directory below the root; yields the bytes of every few files that went."""
    freed = count = 0
    for _, directories, files, fd in os.fwalk(name, topdown=False, dir_fd=place.fd):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                size = os.stat(file, dir_fd=fd, follow_symlinks=False).st_size
                os.unlink(file, dir_fd=fd)
                freed += -(-size // PAGE_BYTES) * PAGE_BYTES
            count += 1
            if count % SLICE == 0:
                yield freed
                freed = 0
        for directory in directories:
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(directory, dir_fd=fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=place.fd)
    yield freed


def _key_of(name: str, shard: str) -> ObjectKey | None:
    if not name.startswith(shard) or not name.endswith(SUFFIX):
        return None
    return parse_stem(name[: -len(SUFFIX)])


def _listed(place: Place, name: str) -> list[str]:
    with _opened(place, name) as fd:
        return [] if fd is None else os.listdir(fd)


@contextlib.contextmanager
def _opened(place: Place, name: str) -> Iterator[int | None]:
    """A directory below the root; None when there is none of this name."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=place.fd)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)
