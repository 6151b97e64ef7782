"""Shared memory and process handles: the arena, the generation table, mappings, pidfds.

Decides nothing about KV. The server creates both memfds and seals them; clients map them through
this room only. A mapping is not inherited by forked children (MADV_DONTFORK), and is unmapped only
when no copy runs.
"""

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Final

from kvkeep.errors import MemoryRefused

_SO_PEERPIDFD: Final = 77  # Linux 6.5; not in the socket module of Python 3.11
_F_SEAL_FUTURE_WRITE: Final = 0x0010
_MFD_HUGETLB: Final = 0x0004
_MFD_HUGE_2MB: Final = 21 << 26
_MADV_DONTFORK: Final = 10
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_MPOL_BIND: Final = 2
_WORD_BITS: Final = 64
_SYS_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
POPULATE_STEP_BYTES: Final = 32 << 20
_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _check(result: int, doing: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise MemoryRefused(f"{doing}: {os.strerror(code)}")


def _map(fd: int, size_bytes: int, *, write: bool) -> int:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    address = _libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if address == _MAP_FAILED or address is None:
        raise MemoryRefused(
            f"mapping {size_bytes} bytes of shared memory: {os.strerror(ctypes.get_errno())}"
        )
    return int(address)


def _sealed_memfd(size_bytes: int, *, hugepages: bool) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    flags |= (_MFD_HUGETLB | _MFD_HUGE_2MB) if hugepages else 0
    try:
        fd = os.memfd_create("kvkeep-arena", flags)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
            undo.pop_all()
    except OSError as error:
        raise MemoryRefused(f"creating an arena of {size_bytes} bytes: {error}") from error
    return fd


class SharedArena:
    """The server's KV memory: a sealed memfd of fixed size, populated step by step.

    Owns `fd`. Raises MemoryRefused when the kernel refuses size, huge pages or NUMA binding.
    """

    def __init__(
        self, size_bytes: int, *, hugepages: bool = False, numa: frozenset[int] = frozenset()
    ) -> None:
        self.size_bytes = size_bytes
        self.populated_bytes = 0
        with contextlib.ExitStack() as undo:
            self.fd = _sealed_memfd(size_bytes, hugepages=hugepages)
            undo.callback(os.close, self.fd)
            try:
                self.address = _map(self.fd, size_bytes, write=True)
            except MemoryRefused as error:
                if not hugepages:
                    raise
                raise MemoryRefused(  # the kernel reserves them here, and says only ENOMEM
                    f"{error}: {size_bytes >> 21} huge pages of 2 MiB must be free; reserve them "
                    'with sysctl vm.nr_hugepages or set [l1] hugepages = "off"'
                ) from error
            undo.callback(_libc.munmap, self.address, size_bytes)
            if numa:
                self._bind(numa)
            undo.pop_all()

    @property
    def view(self) -> memoryview:
        """All of it as bytes, for I/O straight into it."""
        return memoryview((ctypes.c_char * self.size_bytes).from_address(self.address)).cast("B")

    def populate_step(self) -> int:
        """Allocate the next step of pages (releases the GIL); returns bytes populated so far."""
        step = min(POPULATE_STEP_BYTES, self.size_bytes - self.populated_bytes)
        try:
            os.posix_fallocate(self.fd, self.populated_bytes, step)
        except OSError as error:
            raise MemoryRefused(
                f"populating the arena stopped at {self.populated_bytes} of {self.size_bytes} "
                f"bytes: {error.strerror}; it serves with what it has, lower [l1] size"
            ) from error
        self.populated_bytes += step
        return self.populated_bytes

    def read_only_fd(self) -> int:
        """A descriptor of the arena that cannot be mapped for writing; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Unmap and close; memory lives on while a client maps it."""
        _libc.munmap(self.address, self.size_bytes)
        os.close(self.fd)

    def _bind(self, nodes: frozenset[int]) -> None:
        number = _SYS_MBIND.get(os.uname().machine)
        if number is None:
            raise MemoryRefused(f"[l1] numa is not supported on {os.uname().machine}")
        words = max(nodes) // _WORD_BITS + 1
        mask = (ctypes.c_uint64 * words)()
        for node in nodes:
            mask[node // _WORD_BITS] |= 1 << node % _WORD_BITS
        result = _libc.syscall(
            ctypes.c_long(number),
            ctypes.c_void_p(self.address),
            ctypes.c_ulong(self.size_bytes),
            ctypes.c_int(_MPOL_BIND),
            ctypes.byref(mask),
            ctypes.c_ulong(words * _WORD_BITS + 1),  # the kernel reads one bit less than it is told
            ctypes.c_uint(0),
        )
        names = ", ".join(map(str, sorted(nodes)))
        _check(result, f"this host cannot give memory of NUMA node {names}: correct [l1] numa")


class GenerationTable:
    """One u64 per slot; the server writes, clients can only map it for reading."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        size = max(8 * slots, mmap.PAGESIZE)
        self.fd = os.memfd_create("kvkeep-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        # Sealed after our own writable mapping exists: no later one can be made.
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | _F_SEAL_FUTURE_WRITE)
        self.words = memoryview(self._map).cast("Q")[:slots]

    def close(self) -> None:
        """Release the mapping and the descriptor."""
        self.words.release()
        self._map.close()
        os.close(self.fd)


@functools.cache
def _fork_lock() -> "threading.RLock":
    """Held by whoever forks, from just before until just after, in both processes."""
    lock = threading.RLock()
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )
    return lock


@contextlib.contextmanager
def no_fork() -> Iterator[None]:
    """No other thread forks meanwhile: for descriptors and mappings that a child must not get."""
    with _fork_lock():
        yield


class Mapping:
    """A client's view of one epoch's arena and generation table. Takes over both descriptors.

    `use()` guards every copy: after `close()` it raises MemoryRefused, and the pages go when no
    copy runs. In a forked child call `abandon()`: the pages are not there.
    """

    def __init__(
        self,
        arena_fd: int,
        table_fd: int,
        *,
        arena_bytes: int,
        slots: int,
        write: bool,
        epoch: int = 0,
    ) -> None:
        self.size_bytes = arena_bytes
        self.epoch = epoch  # handles of another server start mean nothing here
        self.writable = write
        self._table_bytes = max(8 * slots, mmap.PAGESIZE)
        with no_fork(), contextlib.ExitStack() as undo:
            undo.callback(os.close, arena_fd)
            undo.callback(os.close, table_fd)
            self.address = _map(arena_fd, arena_bytes, write=write)
            with contextlib.ExitStack() as unmap:
                unmap.callback(_libc.munmap, self.address, arena_bytes)
                self._table = _map(table_fd, self._table_bytes, write=False)
                unmap.callback(_libc.munmap, self._table, self._table_bytes)
                for start, size in ((self.address, arena_bytes), (self._table, self._table_bytes)):
                    _check(_libc.madvise(start, size, _MADV_DONTFORK), "MADV_DONTFORK")
                unmap.pop_all()
        words = (ctypes.c_uint64 * slots).from_address(self._table)
        self._generations = memoryview(words).cast("B").cast("Q")
        self._users = 0
        self._closed = False
        self._change = threading.Condition()
        self.touched_bytes = 0
        self.before_unmap: Callable[[], None] | None = None  # e.g. unregister from a device

    @contextlib.contextmanager
    def use(self) -> Iterator["Mapping"]:
        """Hold the mapping while bytes are copied."""
        with self._change:
            if self._closed:
                raise MemoryRefused("the arena of this epoch is unmapped")
            self._users += 1
        try:
            yield self
        finally:
            with self._change:
                self._users -= 1
                if self._closed:
                    self._unmap_if_unused()
                self._change.notify_all()

    def generation(self, slot: int) -> int:
        """The slot's current generation word; only inside `use()`."""
        return self._generations[slot]

    def populate(self, up_to_bytes: int) -> None:
        """Fill this process's page tables for [0, up_to_bytes), so that no copy pays for them.

        Only what the server has populated: more would allocate memory. Releases the GIL.
        """
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        while self.touched_bytes < up_to_bytes:
            step = min(POPULATE_STEP_BYTES, up_to_bytes - self.touched_bytes)
            with self.use():
                if _libc.madvise(self.address + self.touched_bytes, step, advice) != 0:
                    if ctypes.get_errno() == errno.EINVAL:  # before Linux 5.14: faults come later
                        return
                    _check(-1, "MADV_POPULATE_WRITE")
            self.touched_bytes += step

    def close(self, timeout_s: float = 1.0) -> bool:
        """Refuse new copies, wait for running ones, unmap.

        False: a copy still ran at the end of the wait; the last one to end unmaps.
        """
        with self._change:
            self._closed = True
            self._unmap_if_unused()
            return self._change.wait_for(lambda: self.address == 0, timeout_s)

    def _unmap_if_unused(self) -> None:
        if self._users == 0 and self.address:
            if self.before_unmap is not None:
                self.before_unmap()
            self._generations.release()
            _libc.munmap(self.address, self.size_bytes)
            _libc.munmap(self._table, self._table_bytes)
            self.address = 0

    def abandon(self) -> None:
        """Forget the mapping without touching memory (forked child)."""
        self._change = threading.Condition()  # the old one may have been held across the fork
        self._closed = True
        self.address = 0


def peer_pidfd(sock: socket.socket) -> int | None:
    """A pidfd of the process at the other end (Linux 6.5+), or None."""
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return None
    return fd


def pid_of(pidfd: int) -> int | None:
    """The pid behind a pidfd as this process sees it, or None."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as lines:
            for line in lines:
                if line.startswith("Pid:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        return None
    return None


def receive_with_fds(sock: socket.socket, size: int, most: int = 4) -> tuple[bytes, list[int]]:
    """recvmsg with descriptors that are closed on exec."""
    flags = socket.MSG_CMSG_CLOEXEC if hasattr(socket, "MSG_CMSG_CLOEXEC") else 0x40000000
    space = socket.CMSG_LEN(most * struct.calcsize("i"))
    data, ancillary, _, _ = sock.recvmsg(size, space, flags)
    fds: list[int] = []
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(body) // struct.calcsize("i")
            fds += struct.unpack(f"{count}i", body[: count * struct.calcsize("i")])
    return data, fds


def strong_memory_order() -> bool:
    """True when a load after a copy cannot be seen before it (x86): reads are then revocable."""
    return os.uname().machine in ("x86_64", "i686") and sys.byteorder == "little"
