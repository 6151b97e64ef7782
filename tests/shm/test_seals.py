"""What a client's descriptors do not allow: other sizes, writing where it may only read."""

import ctypes
import fcntl
import mmap
import os

import pytest
from tests.shm.memory import ARENA_BYTES, MIB, SLOTS, arena, memory, table


@pytest.mark.parametrize("size", [0, ARENA_BYTES - 4096, ARENA_BYTES + 4096])
def test_a_client_cannot_resize_the_arena(size: int) -> None:
    """A shrunk memfd would be a SIGBUS for everybody who maps it."""
    with memory() as (owner, _, mapping):
        theirs = os.dup(owner.fd)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(theirs, size)
        finally:
            os.close(theirs)
        assert os.fstat(owner.fd).st_size == ARENA_BYTES
        assert ctypes.string_at(mapping.address + ARENA_BYTES - 1, 1) == b"\0"


def test_a_client_cannot_write_beyond_the_end() -> None:
    with arena() as owner, pytest.raises(PermissionError):
        os.pwrite(owner.fd, b"x", ARENA_BYTES)


def test_a_client_cannot_punch_away_the_size_of_the_table() -> None:
    with table() as words, pytest.raises(PermissionError):
        os.ftruncate(words.fd, 0)


@pytest.mark.parametrize("kind", ["arena", "table"])
def test_seals_are_final(kind: str) -> None:
    with arena() as owner, table() as words:
        fd = owner.fd if kind == "arena" else words.fd
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_the_table_cannot_be_mapped_writable_or_written() -> None:
    with table() as words:
        for fd in (os.dup(words.fd), os.open(f"/proc/self/fd/{words.fd}", os.O_RDWR)):
            try:
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, 8 * SLOTS)
                with pytest.raises(PermissionError):
                    os.pwrite(fd, b"\xff" * 8, 0)
            finally:
                os.close(fd)
        assert list(words.words) == [0] * SLOTS


def test_a_client_sees_generations_change_at_once() -> None:
    with memory() as (_, words, mapping), mapping.use():
        assert mapping.generation(5) == 0
        words.words[5] += 1
        words.words[SLOTS - 1] = 2**64 - 1
        assert mapping.generation(5) == 1
        assert mapping.generation(SLOTS - 1) == 2**64 - 1


def test_a_reading_descriptor_cannot_be_mapped_or_used_for_writing() -> None:
    with arena() as owner:
        fd = owner.read_only_fd()
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, ARENA_BYTES)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, b"x", 0)
            with pytest.raises(OSError, match="Invalid argument"):
                os.ftruncate(fd, MIB)
        finally:
            os.close(fd)


def test_a_reader_sees_what_a_writer_wrote() -> None:
    with memory(write=False) as (owner, _, reader):
        ctypes.memmove(owner.address + 123, b"kv", 2)
        with reader.use():
            assert ctypes.string_at(reader.address + 123, 2) == b"kv"
        assert not reader.writable


def test_descriptors_are_closed_on_exec() -> None:
    with arena() as owner, table() as words:
        reading = owner.read_only_fd()
        try:
            assert not any(map(os.get_inheritable, (owner.fd, words.fd, reading)))
        finally:
            os.close(reading)
