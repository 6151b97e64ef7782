"""Owns the slot table: the one place where an extent's state and generation change.

A slot is a row: state, offset, length, readers. Its 64-bit generation word changes on *every*
leave of staging or resident, before the extent can be free, so that a client that compares before
and after its copy can never take reused bytes for the old ones (DESIGN section 2).
"""

from collections.abc import Iterable
from typing import Protocol

from kvkeep.core.arena import Arena
from kvkeep.types import SlotId, SlotState

_LEFT_FOR = {  # state -> states that may follow it
    SlotState.STAGING: {
        SlotState.RESIDENT,
        SlotState.ORPHANED,
        SlotState.QUARANTINED,
        SlotState.FREE,
    },
    SlotState.ORPHANED: {SlotState.QUARANTINED, SlotState.FREE},
    SlotState.QUARANTINED: {SlotState.FREE},
    SlotState.RESIDENT: {SlotState.FREE},
}


class Generations(Protocol):
    """A mutable row of u64 words: shared memory in the server, a list in tests."""

    def __len__(self) -> int: ...
    def __getitem__(self, slot: int, /) -> int: ...
    def __setitem__(self, slot: int, word: int, /) -> None: ...


class SlotTable:
    """Extents of the arena with their states; `generations` is the shared table clients read.

    `generations` is any mutable sequence of u64 (shared memory in the server, a list in tests);
    its length is the most objects there can be.
    """

    def __init__(self, arena: Arena, generations: Generations) -> None:
        self.arena = arena
        self.generations = generations
        self.state: list[SlotState] = []
        self.offset: list[int] = []
        self.length: list[int] = []  # exact bytes of the object, not rounded
        self.size: list[int] = []  # bytes of arena it takes (rounded)
        self.readers: list[int] = []
        self.bytes_in: dict[SlotState, int] = dict.fromkeys(SlotState, 0)
        self.reserved_bytes = 0
        self._recycled: list[SlotId] = []

    def stage(self, size_bytes: int) -> SlotId | None:
        """A slot in STAGING with an extent, or None when memory or slots ran out."""
        if not self._recycled and len(self.state) >= len(self.generations):
            return None
        offset = self.arena.allocate(size_bytes)
        if offset is None:
            return None
        if self._recycled:
            slot = self._recycled.pop()
        else:
            slot = SlotId(len(self.state))
            self.state.append(SlotState.FREE)
            self.offset.append(0)
            self.length.append(0)
            self.size.append(0)
            self.readers.append(0)
        assert self.state[slot] is SlotState.FREE
        self.state[slot] = SlotState.STAGING
        self.offset[slot], self.length[slot] = offset, size_bytes
        size = self.size[slot] = self.arena.taken_size(offset)
        self.bytes_in[SlotState.STAGING] += size
        return slot

    def slots_left(self) -> int:
        """How many more objects the generation table has room for."""
        return len(self._recycled) + len(self.generations) - len(self.state)

    def move(self, slot: SlotId, to: SlotState) -> None:
        """Change a slot's state; frees its extent when `to` is FREE. Generation first."""
        old = self.state[slot]
        assert to in _LEFT_FOR[old], f"slot {slot}: {old.name} -> {to.name}"
        assert self.readers[slot] == 0 or to is SlotState.RESIDENT
        size = self.size[slot]
        if old in (SlotState.STAGING, SlotState.RESIDENT):
            self.generations[slot] += 1
        self.state[slot] = to
        self.bytes_in[old] -= size
        if to is SlotState.FREE:
            self.arena.free(self.offset[slot])
            self._recycled.append(slot)
        else:
            self.bytes_in[to] += size

    def hold(self, slots: Iterable[SlotId]) -> None:
        """One more reader for each."""
        state, readers, resident = self.state, self.readers, SlotState.RESIDENT
        for slot in slots:
            assert state[slot] is resident
            if readers[slot] == 0:
                self.reserved_bytes += self.size[slot]
            readers[slot] += 1

    def unhold(self, slot: SlotId) -> bool:
        """One reader less; True when it was the last."""
        self.readers[slot] -= 1
        assert self.readers[slot] >= 0
        if self.readers[slot] == 0:
            self.reserved_bytes -= self.size[slot]
            return True
        return False
