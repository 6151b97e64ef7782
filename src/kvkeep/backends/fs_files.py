"""One object is one file: a header page, then the payload. Blocking calls, made in threads.

A file is written whole under a temporary name and then renamed, so a name never leads to half an
object. Reads and writes go straight between disk and memory (O_DIRECT) where the file system allows
it. What is not a regular file under an object's name is never followed and never waited for.
What is wrong with one file is told apart from what is wrong with the whole place.
"""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from kvkeep.backends.base import ABSENT, HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.fs_place import (
    FILE_MODE,
    QUARANTINE,
    SUFFIX,
    TMP,
    Place,
    directory,
    own_directory,
)
from kvkeep.backends.header import LABEL_DIGITS, SALT_DIGITS, parse_stem
from kvkeep.errors import BackendError

QUARANTINED_MOST = 64
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_ONE_FILE = (
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENXIO,
    errno.ENOTDIR,
    errno.ENOTEMPTY,
    errno.EXDEV,  # something is mounted there
    errno.EBUSY,
)
_ASIDE = re.compile(
    rf"([0-9a-f]{{{LABEL_DIGITS}}}(?:-[0-9a-f]{{{SALT_DIGITS}}})?)_(.+)_[0-9a-f]{{8}}"
)
_FOREIGN = 0  # the payload size of what cannot be an object; its header page is zeros


class OneFile(BackendError):
    """Something is wrong with one object's file; all others are well."""


class Aside(NamedTuple):
    """What is in quarantine: names and bytes of what we put there, oldest first."""

    ours: list[tuple[str, int]]
    foreign: int


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
        except FileNotFoundError:
            place.check()
            return ABSENT
        except OSError as error:
            if _is_of_one_file(place, error) or not _is_regular(place, name):
                return _foreign(memory[0])
            if not self._falls_back(error):
                raise
        return self._read(place, name, memory, length, value_ns)

    def write(
        self, place: Place, name: str, memory: Sequence[memoryview], length: int, *, value_ns: int
    ) -> None:
        """Store [header, payload] under the name, in place of what was there.

        Raises OneFile when something that cannot be replaced is in the way.
        """
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
        folder, _, file = name.rpartition("/")
        with directory(place.fd, folder) as folder_fd:
            fd = os.open(file, _READ | direct, dir_fd=folder_fd)
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
        temporary = place.temporary()
        with own_directory(place, TMP, make=True) as tmp:
            fd = os.open(temporary, _WRITE | direct, FILE_MODE, dir_fd=tmp)
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
                _move_in(place, temporary, name, tmp=tmp)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=tmp)
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
    return [_mode(place, name) == stat.S_IFREG for name in names]


def remove(place: Place, name: str) -> None:
    """Unlink; what is gone already is fine. Raises OneFile when this one cannot be unlinked."""
    place.check()
    folder, _, file = name.rpartition("/")
    with _one_file(place, name), directory(place.fd, folder) as folder_fd:
        os.unlink(file, dir_fd=folder_fd)


def remove_aside(place: Place, name: str) -> None:
    """Delete something in quarantine; of a directory only an empty one."""
    place.check()
    with own_directory(place, QUARANTINE) as aside, _one_file(place, f"{QUARANTINE}/{name}"):
        _delete(name, aside)


def set_aside(place: Place, name: str) -> None:
    """Move what is under an object's name into quarantine; gone already is fine.

    Raises OneFile when this one cannot be moved.
    """
    place.check()
    folder, _, file = name.rpartition("/")
    with (
        own_directory(place, QUARANTINE, make=True) as aside,
        _one_file(place, name),
        contextlib.ExitStack() as stack,
    ):
        try:
            folder_fd = stack.enter_context(directory(place.fd, folder))
        except NotADirectoryError:
            return  # then nothing is under this name
        os.rename(file, _aside_name(name), src_dir_fd=folder_fd, dst_dir_fd=aside)


def clear_way(place: Place, name: str) -> None:
    """Move into quarantine what stands where an object, or a directory that leads to it, belongs.

    Raises OneFile when that cannot be moved.
    """
    place.check()
    ends = [at for at, char in enumerate(name) if char == "/"]
    with own_directory(place, QUARANTINE, make=True) as aside, _one_file(place, name):
        for end in (*ends, len(name)):
            folder, _, last = name[:end].rpartition("/")
            with directory(place.fd, folder) as folder_fd:
                mode = os.stat(last, dir_fd=folder_fd, follow_symlinks=False).st_mode
                if end == len(name) or not stat.S_ISDIR(mode):
                    os.rename(last, _aside_name(name), src_dir_fd=folder_fd, dst_dir_fd=aside)
                    return


def list_quarantine(place: Place) -> Aside:
    """What is in quarantine; of what we put there, more than the most is deleted."""
    found = []
    foreign = 0
    try:
        with own_directory(place, QUARANTINE, to_list=True) as fd:
            for name in os.listdir(fd):
                if not _is_aside(name):
                    foreign += 1
                    continue
                with contextlib.suppress(FileNotFoundError):
                    data = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    size = _whole_pages(data.st_size) if stat.S_ISREG(data.st_mode) else 0
                    found.append((data.st_ctime_ns, name, size))
            found.sort()
            kept = found[-QUARANTINED_MOST:]
            for number, (at_ns, name, size) in enumerate(found[: len(found) - len(kept)]):
                try:
                    _delete(name, fd)
                except OSError:  # it stays, and counts
                    kept.insert(number, (at_ns, name, size))
    except FileNotFoundError:
        return Aside([], 0)
    return Aside([(name, size) for _, name, size in kept], foreign)


def probe(place: Place, memory: memoryview) -> None:
    """Write a page, read it back, and unlink it."""
    place.check()
    temporary = place.temporary()
    with own_directory(place, TMP, make=True) as tmp:
        fd = os.open(temporary, _WRITE, FILE_MODE, dir_fd=tmp)
        try:
            try:
                _write_all(fd, [memory])
            finally:
                os.close(fd)
            fd = os.open(temporary, _READ, dir_fd=tmp)
            try:
                back = os.read(fd, len(memory) + 1)
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=tmp)
    if back != memory:
        raise OSError(errno.EIO, f"{place.root} gives back other bytes than were written")


def _move_in(place: Place, temporary: str, name: str, *, tmp: int) -> None:
    """Give a written file its name; the directories for it are made."""
    folder, _, file = name.rpartition("/")
    for is_last in (False, True):
        try:
            with (
                _one_file(place, name, may_be_gone=False),
                directory(place.fd, folder, make=True) as folder_fd,
            ):
                os.rename(temporary, file, src_dir_fd=tmp, dst_dir_fd=folder_fd)
            return
        except FileNotFoundError:  # its directory was thrown away this very moment
            if is_last:
                raise


@contextlib.contextmanager
def _one_file(place: Place, name: str, *, may_be_gone: bool = True) -> Iterator[None]:
    """Turns errors of one file into OneFile."""
    try:
        yield
    except FileNotFoundError:
        if not may_be_gone:
            raise
    except OSError as error:
        if not _is_of_one_file(place, error):
            raise
        raise OneFile(f"{place.root}/{name}: {error.strerror}") from error


def _is_of_one_file(place: Place, error: OSError) -> bool:
    """Whether only this file is concerned; when the root itself is shut, all are."""
    if error.errno not in _ONE_FILE:
        return False
    place.check()
    return os.access(place.root, os.R_OK | os.X_OK)


def _delete(name: str, fd: int) -> None:
    try:
        os.unlink(name, dir_fd=fd)
    except IsADirectoryError:
        os.rmdir(name, dir_fd=fd)


def _aside_name(name: str) -> str:
    label, _, rest = name.partition("/")
    return f"{label}_{rest.rpartition('/')[2]}_{secrets.token_hex(4)}"


def _is_aside(name: str) -> bool:
    match = _ASIDE.fullmatch(name)
    if match is None:
        return False
    file = match.group(2)
    return file.endswith(SUFFIX) and parse_stem(file[: -len(SUFFIX)]) is not None


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
    return _mode(place, name) in (stat.S_IFREG, 0)


def _mode(place: Place, name: str) -> int:
    """The kind of file; 0 when there is none."""
    folder, _, file = name.rpartition("/")
    try:
        with directory(place.fd, folder) as folder_fd:
            return stat.S_IFMT(os.stat(file, dir_fd=folder_fd, follow_symlinks=False).st_mode)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or _is_of_one_file(place, error):
            return 0
        raise


def _foreign(header: memoryview) -> int:
    header[:] = bytes(len(header))
    return _FOREIGN
