"""What the `fs` backend holds, in memory: sizes, values, and who is worth least.

No I/O. The value of an object is the time of its last use, a bonus for reuse, and a small penalty
for depth, in wall nanoseconds: it is kept as the file's mtime, so that it survives a restart. Used
and emptied on the loop's thread only.
"""

import heapq
from collections.abc import Callable, Iterator
from math import log2

from kvkeep.backends.base import HEADER_BYTES, PAGE_BYTES
from kvkeep.types import ObjectKey

NS = 1_000_000_000
REUSE_BONUS_S = 900  # for each doubling of the number of uses
DEPTH_PENALTY_S = 1  # for each chunk before it: written one after the other, evicted last to first
MOST_USES = 1 << 16
_SLACK = 1_024  # heap entries beyond twice the objects before the heap is rebuilt


def disk_bytes(payload_bytes: int) -> int:
    """What a file with that payload takes: whole pages."""
    return -(-(HEADER_BYTES + payload_bytes) // PAGE_BYTES) * PAGE_BYTES


def value_ns(now_ns: int, uses: int, depth: int) -> int:
    """What an object used now is worth."""
    bonus = REUSE_BONUS_S * log2(min(max(uses, 1), MOST_USES))
    return now_ns + int(bonus * NS) - DEPTH_PENALTY_S * NS * depth


class Space:
    """The objects under one label."""

    __slots__ = ("bytes", "entries", "label", "linked")

    def __init__(self, label: str) -> None:
        self.label = label
        self.entries: dict[ObjectKey, Entry] = {}
        self.bytes = 0
        self.linked = True  # False once forgotten


class Entry:
    """One object."""

    __slots__ = ("busy", "key", "linked", "queued", "size", "space", "uses", "value_ns")

    def __init__(self, space: Space, key: ObjectKey, size: int, value_ns: int, uses: int) -> None:
        self.space = space
        self.key = key
        self.size = size  # payload bytes
        self.value_ns = value_ns
        self.uses = uses
        self.busy = 0  # reads under way: not evicted
        self.linked = True  # False once it is out of the index
        self.queued = False

    @property
    def disk_bytes(self) -> int:
        """Bytes of its file."""
        return disk_bytes(self.size)

    @property
    def present(self) -> bool:
        """Whether the index still has it."""
        return self.linked and self.space.linked


class Index:
    """Objects by label and key, and a lazy heap of them by value."""

    def __init__(self) -> None:
        self._spaces: dict[str, Space] = {}
        self._heap: list[tuple[int, int, Entry]] = []
        self._pushes = 0
        self.objects = 0

    def __iter__(self) -> Iterator[Space]:
        return iter(list(self._spaces.values()))

    def space(self, label: str) -> Space | None:
        """All objects under a label."""
        return self._spaces.get(label)

    def find(self, label: str, key: ObjectKey) -> Entry | None:
        """The object, if it is there."""
        space = self._spaces.get(label)
        return None if space is None else space.entries.get(key)

    def add(self, label: str, key: ObjectKey, size: int, value_ns: int, *, uses: int = 1) -> Entry:
        """A new object; there must be none under this name."""
        space = self._spaces.setdefault(label, Space(label))
        assert key not in space.entries
        entry = Entry(space, key, size, value_ns, uses)
        space.entries[key] = entry
        space.bytes += entry.disk_bytes
        self.objects += 1
        self._push(entry)
        return entry

    def drop(self, entry: Entry) -> None:
        """Out of the index; once for each entry."""
        assert entry.present
        entry.linked = False
        entry.space.bytes -= entry.disk_bytes
        del entry.space.entries[entry.key]
        if not entry.space.entries:
            del self._spaces[entry.space.label]
            entry.space.linked = False
        self.objects -= 1

    def forget(self, first: str) -> list[Space]:
        """Take out all labels that are `first` or begin with it and a dash; returns them."""
        gone = [s for s in self if s.label == first or s.label.startswith(f"{first}-")]
        for space in gone:
            del self._spaces[space.label]
            space.linked = False
            self.objects -= len(space.entries)
        return gone

    def use(self, entry: Entry, now_ns: int, depth: int) -> int:
        """It was used; returns its new value."""
        entry.uses += 1
        entry.value_ns = max(entry.value_ns, value_ns(now_ns, entry.uses, depth))
        return entry.value_ns

    def least(self, is_busy: Callable[[Entry], bool]) -> Entry | None:
        """The object worth least that nobody is busy with; it stays in the index."""
        busy = []
        found = None
        while self._heap and found is None:
            value, _, entry = heapq.heappop(self._heap)
            entry.queued = False
            if not entry.present:
                continue
            if is_busy(entry):
                busy.append(entry)
            elif entry.value_ns != value:  # used since it was pushed: it has a place further back
                self._push(entry)
            else:
                found = entry
        for entry in busy:
            self._push(entry)
        if found is not None:
            self._push(found)
        return found

    def _push(self, entry: Entry) -> None:
        if entry.queued:
            return
        entry.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (entry.value_ns, self._pushes, entry))
        if len(self._heap) > 2 * self.objects + _SLACK:
            self._heap = [item for item in self._heap if item[2].present]
            heapq.heapify(self._heap)
