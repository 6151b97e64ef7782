"""One arena with its table, and the mapping a client gets of them, for the tests of this room."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvkeep.shm import GenerationTable, Mapping, SharedArena

MIB = 1 << 20
ARENA_BYTES = 4 * MIB
SLOTS = 100


@contextmanager
def arena(
    size_bytes: int = ARENA_BYTES, numa: frozenset[int] = frozenset()
) -> Iterator[SharedArena]:
    made = SharedArena(size_bytes, numa=numa)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def table(slots: int = SLOTS) -> Iterator[GenerationTable]:
    made = GenerationTable(slots)
    try:
        yield made
    finally:
        made.close()


def mapped(owner: SharedArena, words: GenerationTable, *, write: bool = True) -> Mapping:
    """What a client maps; the caller closes it."""
    arena_fd = os.dup(owner.fd) if write else owner.read_only_fd()
    return Mapping(
        arena_fd,
        os.dup(words.fd),
        arena_bytes=owner.size_bytes,
        slots=words.slots,
        write=write,
    )


@contextmanager
def memory(*, write: bool = True) -> Iterator[tuple[SharedArena, GenerationTable, Mapping]]:
    """A populated arena, its table, and a client's mapping of both."""
    with arena() as owner, table() as words:
        while owner.populated_bytes < owner.size_bytes:
            owner.populate_step()
        mapping = mapped(owner, words, write=write)
        try:
            yield owner, words, mapping
        finally:
            assert mapping.close()


def blocks_bytes(fd: int) -> int:
    """Memory that is allocated behind a memfd."""
    return os.fstat(fd).st_blocks * 512
