"""Chunks in the order of their last use: what an eviction policy takes its victims from.

Blocks of some hundred chunks, sorted, in a list. Every call costs a few microseconds however many
chunks there are: nothing is ever rebuilt, and what leaves leaves at once, so nothing stale is kept.
A chunk's `last_use` is its own alone, and does not change while the chunk is in here.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvkeep.core.eviction import Chunk

BLOCK = 512  # chunks; one that was inserted into grows to twice that before it is split
_last_use = attrgetter("last_use")


def _warmest(block: "list[Chunk]") -> int:
    return block[-1].last_use


class Candidates:
    """A sorted collection of chunks, coldest first."""

    def __init__(self) -> None:
        self._blocks: list[list[Chunk]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, chunk: "Chunk") -> bool:
        block, position = self._find(chunk.last_use)
        blocks = self._blocks
        return block < len(blocks) and blocks[block][position] is chunk

    def add(self, chunk: "Chunk") -> None:
        """Put a chunk where its last use belongs."""
        blocks, use = self._blocks, chunk.last_use
        self._count += 1
        if not blocks or (use > blocks[-1][-1].last_use and len(blocks[-1]) >= BLOCK):
            blocks.append([chunk])
        elif use > blocks[-1][-1].last_use:
            blocks[-1].append(chunk)
        else:
            is_coldest = use < blocks[0][0].last_use  # often: the parent of what was just evicted
            number, position = (0, 0) if is_coldest else self._find(use)
            block = blocks[number]
            assert block[position].last_use != use
            block.insert(position, chunk)
            if len(block) > 2 * BLOCK:
                blocks[number : number + 1] = [block[:BLOCK], block[BLOCK:]]

    def remove(self, chunk: "Chunk") -> None:
        """Take out a chunk that is in here."""
        is_coldest = self._blocks[0][0] is chunk
        number, position = (0, 0) if is_coldest else self._find(chunk.last_use)
        block = self._blocks[number]
        assert block[position] is chunk
        del block[position]
        self._count -= 1
        if not block:
            del self._blocks[number]
        elif len(block) < BLOCK // 8:
            self._join(number)

    def after(self, use: int) -> "Iterator[Chunk]":
        """Chunks last used after `use` (0: all), coldest first; the one yielded may be removed."""
        while True:
            number = bisect_right(self._blocks, use, key=_warmest) if use > 0 else 0
            if number == len(self._blocks):
                return
            block = self._blocks[number]
            chunk = block[0]
            if chunk.last_use <= use:
                chunk = block[bisect_right(block, use, key=_last_use)]
            use = chunk.last_use
            yield chunk

    def part(self, use: int, most: int) -> "list[Chunk]":
        """Up to `most` chunks last used after `use`, coldest first; fewer only at the end."""
        number = bisect_right(self._blocks, use, key=_warmest)
        found: list[Chunk] = []
        while number < len(self._blocks) and len(found) < most:
            block = self._blocks[number]
            start = 0 if found else bisect_right(block, use, key=_last_use)
            found += block[start : start + most - len(found)]
            number += 1
        return found

    def _find(self, use: int) -> tuple[int, int]:
        """Block and position of the first chunk that is not colder than `use`."""
        number = bisect_left(self._blocks, use, key=_warmest)
        if number == len(self._blocks):
            return number, 0
        block = self._blocks[number]
        if block[0].last_use >= use:
            return number, 0
        return number, bisect_left(block, use, key=_last_use)

    def _join(self, number: int) -> None:
        """A block that has become short is joined to a neighbour that has room."""
        blocks = self._blocks
        for left in (number, number - 1):
            if 0 <= left < len(blocks) - 1 and len(blocks[left]) + len(blocks[left + 1]) <= BLOCK:
                blocks[left : left + 2] = [blocks[left] + blocks[left + 1]]
                return
