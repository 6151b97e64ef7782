"""What the `fs` backend holds, in memory: sizes, values, whose it is, and who is worth least.

No I/O. The value of an object is the time of its last use, a bonus for reuse, and a small penalty
for depth, in wall nanoseconds: it is kept as the file's mtime, so that it survives a restart. Who
is worth least can be asked of everything and of one tenant. Used on the loop's thread only.
"""

import heapq
from collections.abc import Callable, Iterator
from math import log2

from kvkeep.backends.base import HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.header import LABEL_DIGITS
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


def tenant_of(label: str) -> str:
    """The digest of the label's salt; empty: without one."""
    return label[LABEL_DIGITS + 1 :]


class Space:
    """The objects under one label."""

    __slots__ = ("bytes", "entries", "label", "linked", "tenant")

    def __init__(self, label: str, tenant: "Tenant") -> None:
        self.label = label
        self.tenant = tenant
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


class Tenant:
    """All objects under one salt, whatever their fingerprint, in a lazy heap by value."""

    __slots__ = ("bytes", "digest", "heap", "objects", "top_ns")

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.bytes = 0  # on disk
        self.objects = 0
        self.heap: list[tuple[int, int, Entry]] = []
        self.top_ns: int | None = None  # its place among the tenants; None: it has none

    def least(self, is_busy: Callable[[Entry], bool]) -> Entry | None:
        """The object worth least that nobody is busy with; it stays where it is."""
        busy = []
        found = None
        while self.heap and found is None:
            value, number, entry = heapq.heappop(self.heap)
            entry.queued = False
            if not entry.present:
                continue
            if is_busy(entry):
                busy.append((number, entry))
            elif entry.value_ns != value:  # used since it was pushed: it has a place further back
                self.push(number, entry)
            else:
                found = entry
                self.push(number, entry)
        for number, entry in busy:
            self.push(number, entry)
        return found

    def push(self, number: int, entry: Entry) -> None:
        """A place in the heap, unless it has one; `number` decides between equals."""
        if entry.queued:
            return
        entry.queued = True
        heapq.heappush(self.heap, (entry.value_ns, number, entry))
        if len(self.heap) > 2 * self.objects + _SLACK:
            self.heap = [item for item in self.heap if item[2].present]
            heapq.heapify(self.heap)


class Index:
    """Objects by label and key. Tenants are in a heap of their own, each by its least object."""

    def __init__(self) -> None:
        self._spaces: dict[str, Space] = {}
        self._tops: list[tuple[int, int, Tenant]] = []  # by least value, or below it
        self._pushes = 0
        self.tenants: dict[str, Tenant] = {}  # those with an object
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
        space = self._spaces.get(label)
        if space is None:
            digest = tenant_of(label)
            tenant = self.tenants.setdefault(digest, Tenant(digest))
            space = self._spaces[label] = Space(label, tenant)
        tenant = space.tenant
        assert key not in space.entries
        entry = Entry(space, key, size, value_ns, uses)
        space.entries[key] = entry
        space.bytes += entry.disk_bytes
        tenant.bytes += entry.disk_bytes
        tenant.objects += 1
        self.objects += 1
        self._pushes += 1
        tenant.push(self._pushes, entry)
        self._rank(tenant, entry.value_ns)
        return entry

    def drop(self, entry: Entry) -> None:
        """Out of the index; once for each entry."""
        assert entry.present
        entry.linked = False
        space = entry.space
        space.bytes -= entry.disk_bytes
        del space.entries[entry.key]
        if not space.entries:
            del self._spaces[space.label]
            space.linked = False
        self._less(space.tenant, 1, entry.disk_bytes)

    def forget(self, first: str) -> list[Space]:
        """Take out all labels that are `first` or begin with it and a dash; returns them."""
        gone = [s for s in self if s.label == first or s.label.startswith(f"{first}-")]
        for space in gone:
            del self._spaces[space.label]
            space.linked = False
            self._less(space.tenant, len(space.entries), space.bytes)
        return gone

    def _less(self, tenant: Tenant, objects: int, size_bytes: int) -> None:
        self.objects -= objects
        tenant.objects -= objects
        tenant.bytes -= size_bytes
        if not tenant.objects:
            del self.tenants[tenant.digest]
            tenant.top_ns = None
            tenant.heap.clear()

    def use(self, entry: Entry, now_ns: int, depth: int) -> int:
        """It was used; returns its new value."""
        entry.uses += 1
        entry.value_ns = max(entry.value_ns, value_ns(now_ns, entry.uses, depth))
        return entry.value_ns

    def least(self, is_busy: Callable[[Entry], bool]) -> Entry | None:
        """The object worth least that nobody is busy with; it stays in the index."""
        looked_at: list[tuple[Tenant, int]] = []
        found = None
        while self._tops and found is None:
            value, _, tenant = heapq.heappop(self._tops)
            if tenant.top_ns != value:
                continue  # it is gone, or has another place by now
            tenant.top_ns = None
            entry = tenant.least(is_busy)
            if entry is None:  # somebody is busy with all of it
                looked_at.append((tenant, value))
            elif self._tops and entry.value_ns > self._tops[0][0]:
                self._rank(tenant, entry.value_ns)  # others may have less
            else:
                found = entry
                looked_at.append((tenant, value))
        for tenant, value in looked_at:
            self._rank(tenant, value)
        return found

    def _rank(self, tenant: Tenant, value_ns: int) -> None:
        """Give a tenant a place by its least object, unless it has one that is as low."""
        if tenant.top_ns is None or value_ns < tenant.top_ns:
            tenant.top_ns = value_ns
            self._pushes += 1
            heapq.heappush(self._tops, (value_ns, self._pushes, tenant))
            if len(self._tops) > 2 * len(self.tenants) + _SLACK:
                tops = [(t.top_ns, n, t) for n, t in enumerate(self.tenants.values())]
                self._tops = [(top, n, t) for top, n, t in tops if top is not None]
                heapq.heapify(self._tops)
