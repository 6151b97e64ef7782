"""Keeps each tenant of the `fs` backend within its limit: its own least valuable objects go first.

A tenant is a salt, known by its digest alone. What it takes is what the index has of it and what is
being written for it, so a restart loses nothing: the scan counts again. What is on its way off the
disk is the room's business. A tenant that was given less than it has shrinks with every store.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from kvkeep.backends.base import TenantLimits, TenantUsage
from kvkeep.backends.fs_index import Entry, Index

MOST_AT_ONCE = 64  # objects evicted for one store
MOST_COUNTED = 1_000  # tenants whose refusals have a count of their own
OTHERS = "others"


class Tenants:
    """Who may store how much. `evict` starts the removal of an object; used on the loop only."""

    def __init__(
        self,
        index: Index,
        limits: TenantLimits | None,
        *,
        evict: Callable[[Entry], None],
        is_busy: Callable[[Entry], bool],
        capacity_bytes: int,
    ) -> None:
        self._index = index
        self._limits = limits
        self._evict = evict
        self._is_busy = is_busy
        self._capacity_bytes = capacity_bytes
        self._writing_bytes: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self.refused: Counter[str] = Counter()  # stores, by digest
        self._evicted: Counter[str] = Counter()

    @asynccontextmanager
    async def writing(self, digest: str, size_bytes: int) -> AsyncIterator[bool]:
        """One store of a tenant; False: its limit leaves no room for this object, and that counts.

        Waits for the tenant's own stores where one of them can make room, for nobody else's.
        """
        if not await self._is_admitted(digest, size_bytes):
            _count(self.refused, digest)
            yield False
            return
        self._writing_bytes[digest] += size_bytes
        try:
            yield True
        finally:
            self._writing_bytes[digest] -= size_bytes
            if not self._writing_bytes[digest]:
                del self._writing_bytes[digest]
            for future in self._waiting.pop(digest, ()):
                if not future.done():
                    future.set_result(None)

    def seen(self) -> list[TenantUsage]:
        """Every tenant that has something here or was refused."""
        digests = {*self._index.tenants, *self._writing_bytes, *self.refused, *self._evicted}
        return [
            TenantUsage(
                digest, self._used_bytes(digest), self.refused[digest], self._evicted[digest]
            )
            for digest in sorted(digests)
        ]

    def _used_bytes(self, digest: str) -> int:
        tenant = self._index.tenants.get(digest)
        return self._writing_bytes[digest] + (tenant.bytes if tenant is not None else 0)

    async def _is_admitted(self, digest: str, size_bytes: int) -> bool:
        while True:
            most_bytes = None
            if self._limits is not None:
                most_bytes = self._limits.limit_bytes(digest, self._capacity_bytes)
            if most_bytes is None:
                return True
            if size_bytes > most_bytes:
                return False
            if self._make_room(digest, size_bytes, most_bytes):
                return True
            if not self._writing_bytes[digest]:
                return False
            # What is being written now can be evicted afterwards.
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(digest, []).append(future)
            await future

    def _make_room(self, digest: str, size_bytes: int, most_bytes: int) -> bool:
        """Evict the tenant's own until the object fits; False when what is left may not go."""
        evicted_bytes = 0
        for _ in range(MOST_AT_ONCE):
            if self._used_bytes(digest) + size_bytes <= most_bytes:
                return True
            tenant = self._index.tenants.get(digest)
            entry = tenant.least(self._is_busy) if tenant is not None else None
            if entry is None:
                return False
            evicted_bytes += entry.disk_bytes
            _count(self._evicted, digest)
            self._evict(entry)
        # Far above a limit that was lowered: every store takes away more than it adds.
        return evicted_bytes >= size_bytes


def _count(counts: Counter[str], digest: str) -> None:
    known = digest in counts or len(counts) < MOST_COUNTED
    counts[digest if known else OTHERS] += 1
