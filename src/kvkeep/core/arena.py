"""Decides where in the populated arena an extent lies.

A segregated-fit allocator over [0, populated): free runs sit in bins of 32 steps per doubling and
are merged at once. Sizes are rounded up to such a step (multiples of 4 KiB), so the waste inside an
extent is at most 1/32 of it plus 4 KiB. There is no other waste: when the mix of sizes shifts,
`window` names the neighbours whose eviction makes one run that is long enough, so every byte that
may move can be recovered for any size.
"""

from collections.abc import Callable

ALIGN_BYTES = 4096
GAP_VICTIMS = 16  # most extents that go for the gaps between them
_STEPS_LOG2 = 5  # 32 bins per doubling
_STEP_MASK = (1 << _STEPS_LOG2) - 1


def rounded(size_bytes: int) -> int:
    """`size_bytes` rounded up to its size class."""
    unit = max(ALIGN_BYTES, 1 << (size_bytes - 1).bit_length() >> (1 + _STEPS_LOG2))
    return -(-size_bytes // unit) * unit


def _bin(size_bytes: int) -> int:
    """Index of the bin that holds free runs of this size (floor)."""
    pages = size_bytes // ALIGN_BYTES
    top = pages.bit_length() - 1
    if top > _STEPS_LOG2:
        pages >>= top - _STEPS_LOG2
    return (top << _STEPS_LOG2) + (pages & _STEP_MASK)


class Arena:
    """Free and taken extents of the populated range, by offset.

    Every populated byte is in exactly one extent. `allocate` and `free` cost O(1); `window` walks
    neighbours only.
    """

    def __init__(self) -> None:
        self.populated_bytes = 0
        self.free_bytes = 0
        self._free: dict[int, int] = {}  # offset -> size
        self._taken: dict[int, int] = {}
        self._start_of: dict[int, int] = {}  # end offset -> offset, for both kinds
        self._bins: dict[int, dict[int, None]] = {}
        self._nonempty = 0  # bit b set: bin b has a free run

    def grow(self, populated_bytes: int) -> None:
        """Add [old, populated_bytes) as free memory."""
        old = self.populated_bytes
        assert populated_bytes % ALIGN_BYTES == 0
        assert populated_bytes >= old
        if populated_bytes == old:
            return
        self.populated_bytes = populated_bytes
        self.free_bytes += populated_bytes - old
        self._add_free(old, populated_bytes - old)

    def allocate(self, size_bytes: int) -> int | None:
        """Offset of a new extent of `rounded(size_bytes)` bytes; None: no run is long enough."""
        need = rounded(size_bytes)
        found = self._find(need)
        if found is None:
            return None
        size = self._free[found]
        rest = size - need
        if rest and _bin(rest) == _bin(size):  # taken from the end, the run keeps its bin
            self._free[found] = rest
            self._start_of[found + rest] = found
        else:
            self._remove_free(found)
            if rest:
                self._insert_free(found, rest)
        self._taken[found + rest] = need
        self._start_of[found + size] = found + rest
        self.free_bytes -= need
        return found + rest

    def free(self, offset: int) -> int:
        """Give an extent back; returns its size."""
        size = self._taken.pop(offset)
        del self._start_of[offset + size]
        self.free_bytes += size
        self._add_free(offset, size)
        return size

    def fits(self, size_bytes: int) -> bool:
        """Whether `allocate` would succeed."""
        return self._find(rounded(size_bytes)) is not None

    def largest_free_bytes(self) -> int:
        """Size of the longest free run."""
        if not self._nonempty:
            return 0
        return max(self._free[o] for o in self._bins[self._nonempty.bit_length() - 1])

    def window(
        self,
        seed: int,
        size_bytes: int,
        movable: Callable[[int], bool],
        *,
        gaps_only: bool = False,
    ) -> list[int] | None:
        """Taken offsets around `seed` whose freeing makes a run of `rounded(size_bytes)`, or None.

        Grows from the taken extent at `seed` to the right, then to the left, over free runs and
        extents that `movable` allows. With `gaps_only` the free runs alone must add up to the size
        and the victims' own bytes come on top; it then names `GAP_VICTIMS` at most.
        """
        need = rounded(size_bytes)
        have, victims = 0 if gaps_only else self._taken[seed], [seed]
        left, right = seed, seed + self._taken[seed]
        while have < need and right in self._free:
            have, right = have + self._free[right], right + self._free[right]
        while have < need and (start := self._start_of.get(left)) in self._free:
            have, left = have + self._free[start], start
        most = GAP_VICTIMS if gaps_only else len(self._taken)
        while have < need and right < self.populated_bytes:
            size = self._size_at(right)
            if right in self._taken:
                if len(victims) >= most or not movable(right):
                    break
                victims.append(right)
            if not gaps_only or right in self._free:
                have += size
            right += size
        while have < need and left > 0:
            start = self._start_of[left]
            if start in self._taken:
                if len(victims) >= most or not movable(start):
                    break
                victims.append(start)
            if not gaps_only or start in self._free:
                have += left - start
            left = start
        return victims if have >= need else None

    def extents(self) -> list[tuple[int, int, bool]]:
        """All (offset, size, taken) in address order."""
        rows = [(o, s, False) for o, s in self._free.items()]
        rows += [(o, s, True) for o, s in self._taken.items()]
        return sorted(rows)

    def taken_size(self, offset: int) -> int:
        """Rounded size of the taken extent at `offset`."""
        return self._taken[offset]

    # ---- free runs

    def _size_at(self, offset: int) -> int:
        size = self._free.get(offset)
        return self._taken[offset] if size is None else size

    def _find(self, need: int) -> int | None:
        """A run of the lowest bin that fits; a size class is where a bin begins."""
        own = _bin(need)
        fitting = self._nonempty >> own
        if not fitting:
            return None
        lowest = own + (fitting & -fitting).bit_length() - 1
        return next(iter(self._bins[lowest]))

    def _add_free(self, offset: int, size: int) -> None:
        """Insert a free run and merge it with free neighbours."""
        if (after := self._free.get(offset + size)) is not None:
            self._remove_free(offset + size)
            del self._start_of[offset + size + after]
            size += after
        before = self._start_of.get(offset)
        if before is not None and before in self._free:
            del self._start_of[offset]
            size += self._remove_free(before)
            offset = before
        self._insert_free(offset, size)

    def _insert_free(self, offset: int, size: int) -> None:
        index = _bin(size)
        self._free[offset] = size
        self._start_of[offset + size] = offset
        self._bins.setdefault(index, {})[offset] = None
        self._nonempty |= 1 << index

    def _remove_free(self, offset: int) -> int:
        size = self._free.pop(offset)
        index = _bin(size)
        runs = self._bins[index]
        del runs[offset]
        if not runs:
            del self._bins[index]
            self._nonempty &= ~(1 << index)
        return size
