"""The allocator against a list with one entry per page."""

from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvkeep.core.arena import ALIGN_BYTES, Arena, rounded

FREE = -1
SIZES = st.one_of(
    st.integers(1, 6 * ALIGN_BYTES),
    st.integers(1, 60 * ALIGN_BYTES),
    st.sampled_from([k * ALIGN_BYTES + d for k in (1, 2, 31, 32, 33, 63, 64, 65) for d in (-1, 0)]),
)


class ArenaMachine(RuleBasedStateMachine):
    """`pages[i]` is the offset of the extent that has page i, or FREE."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(480)
        self.extents: dict[int, int] = {}  # by offset
        self.owners: dict[int, int] = {}  # by offset
        self.next_owner = 0
        self.cursor = 0
        self.pages: list[int] = []
        self.fixed: set[int] = set()  # extents that may not move

    def taken(self) -> list[int]:
        return sorted({page for page in self.pages if page != FREE})

    def pick(self, index: int) -> int:
        return self.taken()[index % len(self.taken())]

    def runs(self, movable: bool = False) -> list[int]:
        """Lengths in bytes of the runs of free (and movable) pages."""
        usable = [p == FREE or (movable and p not in self.fixed) for p in self.pages]
        return [len(list(run)) * ALIGN_BYTES for is_free, run in groupby(usable) if is_free]

    @rule(pages=st.integers(0, 80))
    def grow(self, pages: int) -> None:
        if len(self.pages) < 400:
            self.pages += [FREE] * pages
            self.arena.grow(len(self.pages) * ALIGN_BYTES)

    @rule(size=SIZES, fixed=st.booleans())
    def allocate(self, size: int, fixed: bool) -> None:
        fits = max(self.runs(), default=0) >= rounded(size)
        assert self.arena.fits(size) == fits
        offset = self.take(size)
        assert (offset is not None) == fits
        if offset is None:
            return
        assert offset % ALIGN_BYTES == 0
        first, count = offset // ALIGN_BYTES, rounded(size) // ALIGN_BYTES
        assert self.pages[first : first + count] == [FREE] * count
        self.pages[first : first + count] = [offset] * count
        assert self.arena.size_bytes(self.extents[offset]) == rounded(size)
        if fixed:
            self.fixed.add(offset)

    @precondition(lambda self: self.taken())
    @rule(index=st.integers(0, 999))
    def free(self, index: int) -> None:
        offset = self.pick(index)
        size = self.give(offset)
        assert size == self.pages.count(offset) * ALIGN_BYTES
        self.pages = [FREE if page == offset else page for page in self.pages]
        self.fixed.discard(offset)

    @precondition(lambda self: self.taken())
    @rule(index=st.integers(0, 999), size=SIZES)
    def window(self, index: int, size: int) -> None:
        seed = self.pick(index)
        self.fixed.discard(seed)
        found = self.arena.window(self.extents[seed], size, self.movable)
        assert (found is not None) == (self.reach(seed) >= rounded(size))
        if found is None:
            return
        assert self.owners[seed] in found
        self.they_make_room(found, size)

    @rule(size=SIZES)
    def search(self, size: int) -> None:
        """Two searches see everything, wherever the first of them begins."""
        first, self.cursor = self.arena.search(size, self.movable, cursor=self.cursor, most=999)
        if not first:
            first, self.cursor = self.arena.search(size, self.movable, cursor=self.cursor, most=999)
        needs = max(self.runs(), default=0) < rounded(size) and self.taken()
        assert not needs or bool(first) == (
            max(self.runs(movable=True), default=0) >= rounded(size)
        )
        if first and needs:
            self.none_is_too_many(first, size)
            self.they_make_room(first, size)

    @precondition(lambda self: self.taken())
    @rule(size=SIZES, most=st.integers(1, 4))
    def search_in_parts(self, size: int, most: int) -> None:
        """A search that looks at a few extents at a time finds what there is as well."""
        could = (
            max(self.runs(movable=True), default=0) >= rounded(size) > max(self.runs(), default=0)
        )
        found: list[int] = []
        for _ in range(2 * len(self.pages)):
            found, self.cursor = self.arena.search(
                size, self.movable, cursor=self.cursor, most=most
            )
            if found:
                break
        assert found or not could
        if could:
            self.they_make_room(found, size)

    def none_is_too_many(self, owners: list[int], size: int) -> None:
        """Without the first or the last of them the run is too short."""
        for some in (owners[1:], owners[:-1]):
            gone = {offset for offset, owner in self.owners.items() if owner in some}
            is_free = [page == FREE or page in gone for page in self.pages]
            runs = [len(list(run)) * ALIGN_BYTES for free, run in groupby(is_free) if free]
            assert max(runs, default=0) < rounded(size)

    def they_make_room(self, owners: list[int], size: int) -> None:
        """These are distinct and may go, and without them there is a run."""
        victims = {offset for offset, owner in self.owners.items() if owner in owners}
        assert len(victims) == len(owners)
        assert not victims & self.fixed
        for victim in victims:
            self.give(victim)
        self.pages = [FREE if page in victims else page for page in self.pages]
        assert max(self.runs()) >= rounded(size)
        assert self.take(size) is not None
        self.rebuild()

    def movable(self, owner: int) -> bool:
        return next(o for o, n in self.owners.items() if n == owner) not in self.fixed

    def take(self, size: int) -> int | None:
        """The offset of a new extent."""
        self.next_owner += 1
        extent = self.arena.allocate(size, self.next_owner)
        if extent is None:
            return None
        offset = self.arena.offset[extent]
        self.extents[offset], self.owners[offset] = extent, self.next_owner
        return offset

    def give(self, offset: int) -> int:
        del self.owners[offset]
        return self.arena.free(self.extents.pop(offset))

    def reach(self, seed: int) -> int:
        """Bytes of the longest run around `seed` that only has free and movable pages."""
        first = left = right = seed // ALIGN_BYTES
        while left > 0 and (self.pages[left - 1] == FREE or self.pages[left - 1] not in self.fixed):
            left -= 1
        while right < len(self.pages) and self.pages[right] not in self.fixed:
            right += 1
        assert left <= first < right
        return (right - left) * ALIGN_BYTES

    def rebuild(self) -> None:
        """Take the page list from the arena; `everything_adds_up` checks that it makes sense."""
        self.pages = []
        for offset, size, taken in self.arena.extents():
            self.pages += [offset if taken else FREE] * (size // ALIGN_BYTES)

    @invariant()
    def everything_adds_up(self) -> None:
        extents = self.arena.extents()
        pages: list[int] = []
        for offset, size, taken in extents:
            assert offset == len(pages) * ALIGN_BYTES
            pages += [offset if taken else FREE] * (size // ALIGN_BYTES)
        assert pages == self.pages
        assert self.arena.populated_bytes == len(pages) * ALIGN_BYTES
        assert self.arena.free_bytes == pages.count(FREE) * ALIGN_BYTES
        assert self.arena.largest_free_bytes() == max(self.runs(), default=0)
        free_runs = [size for _, size, taken in extents if not taken]
        assert free_runs == self.runs(), "neighbouring free runs are one"

    def teardown(self) -> None:
        for offset in self.taken():
            self.give(offset)
        whole = [(0, len(self.pages) * ALIGN_BYTES, False)] if self.pages else []
        assert self.arena.extents() == whole


TestArena = ArenaMachine.TestCase


@given(st.integers(1, 1 << 36))
@settings(max_examples=500)
def test_waste_is_bounded(size: int) -> None:
    assert size <= rounded(size) <= size + size // 32 + ALIGN_BYTES
    assert rounded(size) % ALIGN_BYTES == 0
    assert rounded(rounded(size)) == rounded(size)


@given(st.integers(1, 1 << 36), st.integers(1, 1 << 30))
def test_a_larger_object_is_never_rounded_to_less(size: int, more: int) -> None:
    assert rounded(size) <= rounded(size + more)


def test_an_empty_arena_has_no_room() -> None:
    arena = Arena(8)
    assert arena.allocate(1, 0) is None
    assert arena.largest_free_bytes() == 0


def test_every_free_run_of_a_bin_fits_its_size_class() -> None:
    """Runs of 64 and 65 pages share a bin; a request of 64 may get either, one of 65 neither."""
    arena = Arena(8)
    arena.grow(65 * ALIGN_BYTES)
    assert not arena.fits(65 * ALIGN_BYTES)  # its class is 66 pages
    assert arena.allocate(64 * ALIGN_BYTES, 0) is not None
    assert arena.free_bytes == ALIGN_BYTES


def test_growth_joins_the_last_free_run() -> None:
    arena = Arena(8)
    arena.grow(4 * ALIGN_BYTES)
    arena.grow(8 * ALIGN_BYTES)
    assert arena.extents() == [(0, 8 * ALIGN_BYTES, False)]
    assert arena.allocate(8 * ALIGN_BYTES, 0) is not None
    assert arena.free_bytes == 0


def taken(arena: Arena, pages: int) -> int:
    extent = arena.allocate(pages * ALIGN_BYTES, owner=0)
    assert extent is not None
    return extent


def test_the_longest_of_many_runs_is_named_to_within_its_bin() -> None:
    """It is not looked for among all runs of its bin: there may be a million."""
    arena = Arena(300)
    arena.grow(100 * 66 * ALIGN_BYTES)
    rows = [[taken(arena, pages) for pages in (64, 1, 1)] for _ in range(100)]
    for number, (large, small, _) in enumerate(rows):
        arena.free(large)
        if number == 0:
            arena.free(small)  # 65 pages, the oldest of a hundred
    assert arena.largest_free_bytes() == 64 * ALIGN_BYTES
