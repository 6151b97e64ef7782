"""The naive model's memory: one entry per page, and a fake content that writers leave there."""

from dataclasses import dataclass
from itertools import count, groupby

from tests.core.build import PAGE

from kvkeep.types import GroupKind, RowSpec

Rows = tuple[RowSpec, ...]


@dataclass
class Extent:
    """Bytes that were handed out: where, under which generation, and what was written there."""

    slot: int
    offset: int
    generation: int
    pages: range
    content: int


def pages_of(size_bytes: int) -> int:
    """All sizes of these tests are below 128 KiB, where rounding is to whole pages."""
    assert size_bytes <= 32 * PAGE
    return -(-size_bytes // PAGE)


def usable(rows: Rows, held: list[bool], length: int) -> bool:
    """Whether every row has what it needs at `length`, by the words of the design."""
    for spec in rows:
        start = {
            GroupKind.FULL_ATTENTION: 0,
            GroupKind.SLIDING_WINDOW: max(0, length - spec.window_chunks),
            GroupKind.RECURRENT: max(0, length - 1),
        }[spec.kind]
        if not all(held[start:length]):
            return False
    return True


def longest(rows: Rows, held: list[bool]) -> int:
    return max(n for n in range(len(held) + 1) if usable(rows, held[:n], n))


class Memory:
    """The generation table, and per page whose it is and what was written last."""

    def __init__(self, generations: list[int]) -> None:
        self.generations = generations
        self.free: list[bool] = []
        self.content: list[int] = []
        self._contents = count(1)

    def grow(self, pages: int) -> None:
        more = pages - len(self.free)
        self.free += [True] * more
        self.content += [0] * more

    def take(self, handle: tuple[int, ...], size_bytes: int) -> Extent:
        """A grant: nobody else may have these pages; the writer fills them at once."""
        slot, offset, generation = handle
        first = offset // PAGE
        assert offset % PAGE == 0
        extent = Extent(
            slot,
            offset,
            generation,
            range(first, first + pages_of(size_bytes)),
            next(self._contents),
        )
        assert extent.pages.stop <= len(self.free), "past what is populated"
        assert all(self.free[p] for p in extent.pages), "handed out while somebody may use it"
        assert self.generations[slot] == generation
        for page in extent.pages:
            self.free[page] = False
            self.content[page] = extent.content
        return extent

    def release(self, extent: Extent) -> None:
        assert self.generations[extent.slot] > extent.generation, "freed under its old generation"
        for page in extent.pages:
            assert not self.free[page]
            self.free[page] = True

    def intact(self, extent: Extent) -> bool:
        return self.generations[extent.slot] == extent.generation and all(
            self.content[p] == extent.content for p in extent.pages
        )

    def longest_run(self, also: set[int]) -> int:
        """Pages of the longest run that is free or in `also`."""
        able = [is_free or page in also for page, is_free in enumerate(self.free)]
        return max((len(list(run)) for good, run in groupby(able) if good), default=0)
