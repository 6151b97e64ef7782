"""One object is one file: a header page, then the payload. Blocking calls, made in threads.

A file is written whole under a temporary name and then renamed, so a name never leads to half an
object. Reads and writes go straight between disk and memory (O_DIRECT) where the file system allows
it. What is not a regular file under an object's name is never followed and never waited for.
"""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from enum import Enum

from kvkeep.backends.base import ABSENT, HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.fs_place import FILE_MODE, QUARANTINE, TMP, Place, make_directory

QUARANTINED_MOST = 64
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)
_FOREIGN = 0  # the payload size of what cannot be an object; its header page is zeros


class Direct(Enum):
    """Whether I/O goes past the page cache."""

    AUTO = "auto"  # as long as the file system allows it
    ON = "on"
    OFF = "off"


class Files:
    """Reads and writes objects; learns whether O_DIRECT works here."""

    def __init__(self, direct: Direct) -> None:
        self._may_fall_back = direct is Direct.AUTO
        self.direct = direct is not Direct.OFF

    def read(
        self,
        place: Place,
        name: str,
        memory: Sequence[memoryview],
        length: int,
        *,
        value_ns: int | None,
    ) -> int:
        """Read into [header, payload]; returns the payload's size or ABSENT.

        Notes the object's value, unless it is None.
        """
        try:
            return self._read(place, name, memory, length, value_ns)
        except (FileNotFoundError, NotADirectoryError):
            place.check()
            return ABSENT
        except OSError as error:
            if error.errno in _NOT_A_FILE or not _is_regular(place, name):
                return _foreign(memory[0])
            if not self._falls_back(error):
                raise
        return self._read(place, name, memory, length, value_ns)

    def write(
        self, place: Place, name: str, memory: Sequence[memoryview], length: int, *, value_ns: int
    ) -> None:
        """Store [header, payload] under the name, in place of what was there."""
        try:
            self._write(place, name, memory, length, value_ns)
        except OSError as error:
            if not self._falls_back(error):
                raise
            self._write(place, name, memory, length, value_ns)

    def _read(
        self,
        place: Place,
        name: str,
        memory: Sequence[memoryview],
        length: int,
        value_ns: int | None,
    ) -> int:
        place.check()
        header, payload = memory
        direct = os.O_DIRECT if self.direct else 0
        fd = os.open(name, _READ | direct, dir_fd=place.fd)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return _foreign(header)
            size = found.st_size - HEADER_BYTES
            wanted = [header, payload[: _whole_pages(length)]] if size == length else [header]
            got = _read_all(fd, wanted, found.st_size)
            if got < HEADER_BYTES:
                header[got:] = bytes(HEADER_BYTES - got)
            if value_ns is not None:
                with contextlib.suppress(OSError):  # a read-only disk: it only ages faster
                    os.utime(fd, ns=(value_ns, value_ns))
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        return max(0, min(size, got - HEADER_BYTES) if len(wanted) > 1 else size)

    def _write(
        self, place: Place, name: str, memory: Sequence[memoryview], length: int, value_ns: int
    ) -> None:
        place.check()
        header, payload = memory
        direct = os.O_DIRECT if self.direct else 0
        temporary = f"{TMP}/{secrets.token_hex(8)}"
        fd = _create(place, temporary, direct)
        try:
            try:
                _write_all(fd, [header, payload[: _whole_pages(length)]])
                if length % PAGE_BYTES:
                    os.ftruncate(fd, HEADER_BYTES + length)
                os.utime(fd, ns=(value_ns, value_ns))
                if not direct:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            place.check()  # it may have been closed or unmounted meanwhile
            _rename(place, temporary, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=place.fd)
            raise

    def _falls_back(self, error: OSError) -> bool:
        """Whether to try again without O_DIRECT, from now on."""
        if error.errno != errno.EINVAL or not self._may_fall_back:
            return False
        self.direct = False
        return True


def present(place: Place, names: Sequence[str]) -> list[bool]:
    """Whether there is a file under each name."""
    place.check()
    found = []
    for name in names:
        try:
            mode = os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_mode
        except (FileNotFoundError, NotADirectoryError):
            mode = 0
        found.append(stat.S_ISREG(mode))
    return found


def remove(place: Place, name: str) -> None:
    """Unlink; a file that is gone already is fine."""
    place.check()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=place.fd)


def set_aside(place: Place, name: str) -> None:
    """Move what is under an object's name into quarantine; gone already is fine."""
    place.check()
    label, _, rest = name.partition("/")
    aside = f"{QUARANTINE}/{label}_{rest.rpartition('/')[2]}_{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        _rename(place, name, aside)


def list_quarantine(place: Place) -> list[tuple[str, int]]:
    """(name, bytes) of what is in quarantine, oldest first; more than the most is unlinked."""
    found = []
    try:
        fd = os.open(QUARANTINE, os.O_RDONLY | os.O_DIRECTORY, dir_fd=place.fd)
    except FileNotFoundError:
        return []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                data = entry.stat(follow_symlinks=False)
                size = _whole_pages(data.st_size) if stat.S_ISREG(data.st_mode) else 0
                found.append((data.st_ctime_ns, f"{QUARANTINE}/{entry.name}", size))
    finally:
        os.close(fd)
    found.sort()
    kept = found[-QUARANTINED_MOST:]
    for _, name, _ in found[: -len(kept)] if kept else ():
        with contextlib.suppress(OSError):  # a directory somebody made there
            os.unlink(name, dir_fd=place.fd)
    return [(name, size) for _, name, size in kept]


def probe(place: Place, memory: memoryview) -> None:
    """Write a page, read it back, and unlink it."""
    place.check()
    temporary = f"{TMP}/{secrets.token_hex(8)}"
    fd = _create(place, temporary, 0)
    try:
        try:
            _write_all(fd, [memory])
        finally:
            os.close(fd)
        fd = os.open(temporary, _READ, dir_fd=place.fd)
        try:
            back = os.read(fd, len(memory) + 1)
        finally:
            os.close(fd)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=place.fd)
    if back != memory:
        raise OSError(errno.EIO, f"{place.root} gives back other bytes than were written")


def _create(place: Place, name: str, direct: int) -> int:
    try:
        return os.open(name, _WRITE | direct, FILE_MODE, dir_fd=place.fd)
    except FileNotFoundError:
        make_directory(place, TMP)
        return os.open(name, _WRITE | direct, FILE_MODE, dir_fd=place.fd)


def _rename(place: Place, old: str, new: str) -> None:
    try:
        os.rename(old, new, src_dir_fd=place.fd, dst_dir_fd=place.fd)
    except FileNotFoundError:
        parent = new.rpartition("/")[0]
        for end in (at for at, char in enumerate(f"{parent}/") if char == "/"):
            make_directory(place, parent[:end])
        os.rename(old, new, src_dir_fd=place.fd, dst_dir_fd=place.fd)


def _read_all(fd: int, memory: Sequence[memoryview], size: int) -> int:
    """Bytes read; less than wanted only at the file's end."""
    wanted = min(sum(map(len, memory)), size)
    got = 0
    while got < wanted:
        read = os.preadv(fd, _after(memory, got), got)
        got += read
        if not read or got % PAGE_BYTES:
            break
    return got


def _write_all(fd: int, memory: Sequence[memoryview]) -> None:
    total = sum(map(len, memory))
    done = 0
    while done < total:
        written = os.pwritev(fd, _after(memory, done), done)
        if not written:
            raise OSError(errno.EIO, f"{done} of {total} bytes were written, and then no more")
        done += written


def _after(memory: Sequence[memoryview], offset: int) -> list[memoryview]:
    rest = []
    for view in memory:
        rest.append(view[offset:])
        offset = max(0, offset - len(view))
    return [view for view in rest if len(view)]


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _is_regular(place: Place, name: str) -> bool:
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=place.fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


def _foreign(header: memoryview) -> int:
    header[:] = bytes(len(header))
    return _FOREIGN
