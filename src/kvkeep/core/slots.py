"""Owns the slot table: the one place where an extent's state and generation change.

A slot is a row: state, offset, length, readers. Its 64-bit generation word changes on *every*
leave of staging or resident, before the extent can be free, so that a client that compares before
and after its copy can never take reused bytes for the old ones (DESIGN section 2).
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from kvkeep.core.arena import Arena
from kvkeep.core.columns import column
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
# The same by number: a member of an enum is slow to find and to hash.
_STATES = tuple(SlotState)
_FREE, _STAGING, _RESIDENT, *_ = map(int, SlotState)
_MAY_FOLLOW = [sum(1 << to for to in _LEFT_FOR.get(state, ())) for state in SlotState]


class Generations(Protocol):
    """A mutable row of u64 words: shared memory in the server, a list in tests."""

    def __len__(self) -> int: ...
    def __getitem__(self, slot: int, /) -> int: ...
    def __setitem__(self, slot: int, word: int, /) -> None: ...


class States:
    """The state of every slot there has been, a byte each."""

    def __init__(self, most: int) -> None:
        self.packed = column("B", most)
        self.made = 0  # slots that were used at least once

    def __len__(self) -> int:
        return self.made

    def __getitem__(self, slot: int) -> SlotState:
        return _STATES[self.packed[slot]]

    def __iter__(self) -> Iterator[SlotState]:
        return (_STATES[number] for number in self.packed[: self.made])


class SlotTable:
    """Extents of the arena with their states; `generations` is the shared table clients read.

    `generations` is any mutable sequence of u64 (shared memory in the server, a list in tests);
    its length is the most objects there can be. The columns are that long as well.
    """

    def __init__(self, arena: Arena, generations: Generations) -> None:
        most = len(generations)
        assert arena.most_taken >= most
        self.arena = arena
        self.generations = generations
        self.state = States(most)
        self.offset = column("Q", most)
        self.length = column("Q", most)  # exact bytes of the object, not rounded
        self.size = column("Q", most)  # bytes of arena it takes (rounded)
        self.readers = column("I", most)
        self.extent = column("I", most)  # in the arena; of a free slot: the next free one, + 1
        self.bytes_in: list[int] = [0] * len(SlotState)  # by state
        self.reserved_bytes = 0
        self._spare = 0  # slot + 1 that was freed last

    def stage(self, size_bytes: int) -> SlotId | None:
        """A slot in STAGING with an extent, or None when memory or slots ran out."""
        state, spare = self.state, self._spare
        if not spare and state.made >= len(self.generations):
            return None
        slot = SlotId(spare - 1 if spare else state.made)
        extent = self.arena.allocate(size_bytes, slot)
        if extent is None:
            return None
        if spare:
            self._spare = self.extent[slot]
        else:
            state.made += 1
        assert state.packed[slot] == _FREE
        state.packed[slot] = _STAGING
        self.extent[slot] = extent
        self.offset[slot], self.length[slot] = self.arena.offset[extent], size_bytes
        size = self.size[slot] = self.arena.size_bytes(extent)
        self.bytes_in[_STAGING] += size
        return slot

    def move(self, slot: SlotId, to: SlotState) -> None:
        """Change a slot's state; frees its extent when `to` is FREE. Generation first."""
        old = self.state.packed[slot]
        assert _MAY_FOLLOW[old] >> to & 1, f"slot {slot}: {_STATES[old].name} -> {to.name}"
        assert self.readers[slot] == 0 or to is SlotState.RESIDENT
        size = self.size[slot]
        if old in (_STAGING, _RESIDENT):
            self.generations[slot] += 1
        self.state.packed[slot] = to
        self.bytes_in[old] -= size
        if to == _FREE:
            self.arena.free(self.extent[slot])
            self.extent[slot], self._spare = self._spare, slot + 1
        else:
            self.bytes_in[to] += size

    def hold(self, slots: Iterable[SlotId]) -> None:
        """One more reader for each."""
        states, readers = self.state.packed, self.readers
        for slot in slots:
            assert states[slot] == _RESIDENT
            before = readers[slot]
            readers[slot] = before + 1
            if not before:
                self.reserved_bytes += self.size[slot]

    def unhold(self, slot: SlotId) -> bool:
        """One reader less; True when it was the last."""
        left = self.readers[slot] - 1
        assert left >= 0
        self.readers[slot] = left
        if left == 0:
            self.reserved_bytes -= self.size[slot]
            return True
        return False
