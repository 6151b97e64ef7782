"""Decides where in the populated arena an extent lies.

A segregated-fit allocator over [0, populated): free runs sit in bins of 32 steps per doubling and
are merged at once. Sizes are rounded up to such a step (multiples of 4 KiB), so the waste inside an
extent is at most 1/32 of it plus 4 KiB. There is no other waste: when the mix of sizes shifts,
`window` names the neighbours whose eviction makes one run that is long enough, so every byte that
may move can be recovered for any size.

An extent is a number, its facts are columns: 32 bytes each. Number 0 is no extent.
"""

from collections.abc import Callable
from typing import NamedTuple

from kvkeep.core.columns import column

ALIGN_BYTES = 4096
GAP_VICTIMS = 16  # most extents that go for the gaps between them
_STEPS_LOG2 = 5  # 32 bins per doubling
_STEP_MASK = (1 << _STEPS_LOG2) - 1
_EXACT_PAGES = 2 << _STEPS_LOG2  # below this every bin holds one size
_LARGEST_LOOK = 64  # runs compared for the longest
_FIRST = 1  # the extent at offset 0: splits and merges keep the left number


def rounded(size_bytes: int) -> int:
    """`size_bytes` rounded up to its size class."""
    unit = max(ALIGN_BYTES, 1 << (size_bytes - 1).bit_length() >> (1 + _STEPS_LOG2))
    return -(-size_bytes // unit) * unit


def _bin(pages: int) -> int:
    """Index of the bin that holds free runs of this size (floor)."""
    top = pages.bit_length() - 1
    if top > _STEPS_LOG2:
        pages >>= top - _STEPS_LOG2
    return (top << _STEPS_LOG2) + (pages & _STEP_MASK)


class Search(NamedTuple):
    """How far a bounded search for a run came."""

    victims: list[int]  # owners; empty when nothing was found
    cursor: int  # where the next search goes on


class Arena:
    """Free and taken extents of the populated range, in address order.

    Every populated byte is in exactly one extent. `allocate` and `free` cost O(1); `window` walks
    neighbours only. A taken extent has an owner, a number of the caller's.
    """

    def __init__(self, most_taken: int) -> None:
        most = 2 * most_taken + 2  # a gap before and after every taken one; and number 0
        self.most_taken = most_taken
        self.populated_bytes = 0
        self.free_bytes = 0
        self.offset = column("Q", most)
        self._pages = column("I", most)
        self._owner = column("I", most)  # owner + 1; 0: a free run
        self._before = column("I", most)  # neighbours by address
        self._after = column("I", most)
        self._newer = column("I", most)  # neighbours in the bin of a free run
        self._older = column("I", most)
        self._heads: dict[int, int] = {}  # bin -> its newest run
        self._nonempty = 0  # bit b set: bin b has a free run
        self._made = 0  # numbers given out so far
        self._spare = 0  # numbers to give out again, linked through `_after`
        self._last = 0  # the extent that ends where the populated memory does

    def grow(self, populated_bytes: int) -> None:
        """Add [old, populated_bytes) as free memory."""
        old = self.populated_bytes
        assert populated_bytes % ALIGN_BYTES == 0
        assert populated_bytes >= old
        if populated_bytes == old:
            return
        self.populated_bytes = populated_bytes
        self.free_bytes += populated_bytes - old
        last, pages = self._last, (populated_bytes - old) // ALIGN_BYTES
        if last and not self._owner[last]:
            self._unbin(last)
            self._pages[last] += pages
        else:
            last = self._insert(last, old, pages)
        self._put_in_bin(last)

    def allocate(self, size_bytes: int, owner: int) -> int | None:
        """A new extent of `rounded(size_bytes)` bytes; None: no run is long enough."""
        need = rounded(size_bytes) // ALIGN_BYTES
        run = self._find(need)
        if not run:
            return None
        size = self._pages[run]
        rest = size - need
        taken = run
        if not rest:
            self._unbin(run)
        else:
            if _bin(rest) == _bin(size):  # taken from the end, the run keeps its bin
                self._pages[run] = rest
            else:
                self._unbin(run)
                self._pages[run] = rest
                self._put_in_bin(run)
            taken = self._insert(run, self.offset[run] + rest * ALIGN_BYTES, need)
        self._owner[taken] = owner + 1
        self.free_bytes -= need * ALIGN_BYTES
        return taken

    def free(self, extent: int) -> int:
        """Give a taken extent back; returns its size in bytes."""
        assert self._owner[extent], "freed twice"
        size_bytes = self._pages[extent] * ALIGN_BYTES
        self._owner[extent] = 0
        self.free_bytes += size_bytes
        after = self._after[extent]
        if after and not self._owner[after]:
            self._unbin(after)
            self._merge(extent, after)
        before = self._before[extent]
        if before and not self._owner[before]:
            self._unbin(before)
            self._merge(before, extent)
            extent = before
        self._put_in_bin(extent)
        return size_bytes

    def fits(self, size_bytes: int) -> bool:
        """Whether `allocate` would succeed."""
        return self._find(rounded(size_bytes) // ALIGN_BYTES) != 0

    def largest_free_bytes(self) -> int:
        """Size of the longest free run, or of one that is at most 1/32 shorter."""
        if not self._nonempty:
            return 0
        run = self._heads[self._nonempty.bit_length() - 1]
        longest = self._pages[run]
        looked = 1
        while longest >= _EXACT_PAGES and looked < _LARGEST_LOOK and (run := self._older[run]):
            longest = max(longest, self._pages[run])
            looked += 1
        return longest * ALIGN_BYTES

    def window(
        self,
        seed: int,
        size_bytes: int,
        movable: Callable[[int], bool],
        *,
        gaps_only: bool = False,
    ) -> list[int] | None:
        """Owners around `seed` whose leaving makes a run of `rounded(size_bytes)`, or None.

        Grows from the taken extent `seed` to the right, then to the left, over free runs and
        extents whose owner is `movable`. With `gaps_only` the free runs alone must add up to the
        size and the victims' own bytes come on top; it then names `GAP_VICTIMS` at most.
        """
        owner, pages = self._owner, self._pages
        need = rounded(size_bytes) // ALIGN_BYTES
        have, victims = 0 if gaps_only else pages[seed], [owner[seed] - 1]
        right, left = self._after[seed], self._before[seed]
        if have < need and right and not owner[right]:
            have, right = have + pages[right], self._after[right]
        if have < need and left and not owner[left]:
            have, left = have + pages[left], self._before[left]
        most = GAP_VICTIMS if gaps_only else self.most_taken
        for at, onward in ((right, self._after), (left, self._before)):
            while have < need and at:
                if owner[at]:
                    if len(victims) >= most or not movable(owner[at] - 1):
                        break
                    victims.append(owner[at] - 1)
                if not gaps_only or not owner[at]:
                    have += pages[at]
                at = onward[at]
        return victims if have >= need else None

    def search(
        self, size_bytes: int, movable: Callable[[int], bool], *, cursor: int, most: int
    ) -> Search:
        """Owners whose leaving makes a run of `rounded(size_bytes)`, anywhere from `cursor` on.

        Looks at about `most` extents in address order; called again with the cursor it returned, it
        sooner or later sees every run.
        """
        owner, pages = self._owner, self._pages
        need = rounded(size_bytes) // ALIGN_BYTES
        at = cursor if pages[cursor] else _FIRST  # one that was merged away has no pages
        begin, have = at, 0  # of the run that ends here
        left = most + need  # a run of `need` pages has no more extents than that
        while at and left:
            left -= 1
            if owner[at] and not movable(owner[at] - 1):
                begin, have = self._after[at], 0
            else:
                have += pages[at]
                while have - pages[begin] >= need:
                    have, begin = have - pages[begin], self._after[begin]
                if have >= need:
                    return Search(self._owners(begin, at), self._after[at])
            at = self._after[at]
        return Search([], begin if at else 0)

    def extents(self) -> list[tuple[int, int, bool]]:
        """All (offset, size, taken) in address order."""
        rows = []
        at = _FIRST if self._last else 0
        while at:
            taken = self._owner[at] != 0
            rows.append((self.offset[at], self._pages[at] * ALIGN_BYTES, taken))
            at = self._after[at]
        return rows

    def size_bytes(self, extent: int) -> int:
        """Rounded size of an extent."""
        return self._pages[extent] * ALIGN_BYTES

    # ---- the list by address

    def _owners(self, first: int, last: int) -> list[int]:
        found = []
        at = first
        while True:
            if self._owner[at]:
                found.append(self._owner[at] - 1)
            if at == last:
                return found
            at = self._after[at]

    def _insert(self, before: int, offset: int, pages: int) -> int:
        """A new extent behind `before` (0: it is the first); free, and in no bin yet."""
        if self._spare:
            extent = self._spare
            self._spare = self._after[extent]
        else:
            self._made += 1
            extent = self._made
        after = self._after[before] if before else 0
        self.offset[extent], self._pages[extent] = offset, pages
        self._before[extent], self._after[extent] = before, after
        if before:
            self._after[before] = extent
        if after:
            self._before[after] = extent
        else:
            self._last = extent
        return extent

    def _merge(self, extent: int, after: int) -> None:
        """`extent` takes in the one behind it, whose number becomes spare."""
        self._pages[extent] += self._pages[after]
        behind = self._after[after]
        self._after[extent] = behind
        if behind:
            self._before[behind] = extent
        else:
            self._last = extent
        self._pages[after] = 0
        self._after[after], self._spare = self._spare, after

    # ---- the bins

    def _find(self, need: int) -> int:
        """A run of the lowest bin that fits, or 0; a size class is where a bin begins."""
        own = _bin(need)
        fitting = self._nonempty >> own
        if not fitting:
            return 0
        return self._heads[own + (fitting & -fitting).bit_length() - 1]

    def _put_in_bin(self, run: int) -> None:
        index = _bin(self._pages[run])
        head = self._heads.get(index, 0)
        self._newer[run], self._older[run] = 0, head
        if head:
            self._newer[head] = run
        self._heads[index] = run
        self._nonempty |= 1 << index

    def _unbin(self, run: int) -> None:
        newer, older = self._newer[run], self._older[run]
        if older:
            self._newer[older] = newer
        if newer:
            self._older[newer] = older
            return
        index = _bin(self._pages[run])
        if older:
            self._heads[index] = older
        else:
            del self._heads[index]
            self._nonempty &= ~(1 << index)
