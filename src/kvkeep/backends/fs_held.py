"""What one opened directory of the `fs` backend holds, and every way something leaves it.

The index, the room and the quarantine change here and only on the loop's thread; files are touched
in the pools' threads. Each name has one change at a time. Bytes count until they are off the disk.
"""

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from time import time_ns

from kvkeep.backends import fs_scan
from kvkeep.backends.fs_files import Files, list_quarantine, remove, set_aside
from kvkeep.backends.fs_index import Entry, Index
from kvkeep.backends.fs_place import Place
from kvkeep.backends.fs_room import Room, Turns
from kvkeep.backends.header import LABEL_DIGITS
from kvkeep.backends.threads import Pool
from kvkeep.errors import BackendError
from kvkeep.types import ObjectKey

Name = tuple[str, ObjectKey]  # label and key

_ASIDE = "quarantine"  # its turn: one listing at a time


@dataclass(frozen=True, slots=True)
class Pools:
    """Threads by purpose: stores never hold up loads, long work holds up neither."""

    readers: Pool
    writers: Pool
    chores: Pool

    async def close(self, wait_s: float) -> None:
        """End them; a stuck thread is left behind."""
        await asyncio.gather(*(p.close(wait_s) for p in (self.readers, self.writers, self.chores)))


class Held:
    """The objects of one opened place."""

    def __init__(self, place: Place, *, files: Files, pools: Pools, log: logging.Logger) -> None:
        assert place.identity is not None
        self.place = place
        self.files = files
        self.pools = pools
        self.log = log
        self.index = Index()
        self.room = Room(place.identity.capacity_bytes, self._evict_one)
        self.turns = Turns()
        self.quarantine: dict[str, int] = {}  # name -> bytes, oldest first
        self.complete = asyncio.Event()  # the index knows everything that is on disk
        self.scanned = 0.0
        self.foreign = 0
        self.evicted = 0
        self.closing = False
        self.last_error = ""
        self.changed: set[Name] = set()  # while it is incomplete: what the scan must not add
        self.forgets: Counter[str] = Counter()  # by fingerprint label
        self._forgetting: dict[str, asyncio.Future[None]] = {}
        self._leaving_aside: set[str] = set()
        self._removals: set[asyncio.Task[None]] = set()
        self._deletions: set[asyncio.Task[None]] = set()

    # ---- one name

    @contextlib.asynccontextmanager
    async def changing(self, name: Name) -> AsyncIterator[None]:
        """The only change of this name; not while its fingerprint is being forgotten."""
        await self.turns.take(name)
        try:
            while (forgetting := self._forgetting.get(first_part(name[0]))) is not None:
                await asyncio.shield(forgetting)
            yield
        finally:
            self.turns.leave(name)

    def is_forgetting(self, label: str) -> bool:
        """Whether the label is being thrown away just now."""
        return first_part(label) in self._forgetting

    def stored(self, name: Name, size: int, value: int) -> None:
        """A reserved write is under its name now, in place of what was there."""
        old = self.index.find(*name)
        if old is not None:
            self._drop(old)
        self.index.add(*name, size, value, uses=1 if old is None else old.uses)
        self.room.written()

    def vanished(self, entry: Entry) -> None:
        """Its file is gone without us: a scrub set it aside, or somebody deleted it."""
        name = (entry.space.label, entry.key)
        if entry.present and not self.turns.busy(name):
            self._drop(entry)
            self._spawn(self._removals, self._recount(lambda place: None, 0))

    async def delete(self, name: Name, *, broken: bool) -> None:
        """Out of the index at once, then off the disk or into quarantine."""
        async with self.changing(name):
            entry = self.index.find(*name)
            size_bytes = 0 if entry is None else entry.disk_bytes
            if entry is not None:
                self.index.drop(entry)
            if not self.complete.is_set():
                self.changed.add(name)
            path = fs_scan.object_path(*name)
            if broken:
                await self._recount(partial(set_aside, name=path), size_bytes)
            else:
                await self.pools.writers.run(partial(remove, self.place, path))
                self.room.freed(size_bytes)

    def _drop(self, entry: Entry) -> None:
        self.index.drop(entry)
        self.room.freed(entry.disk_bytes)

    # ---- eviction

    async def make_space(self, size_bytes: int) -> None:
        """The disk is full before we are: evict that much more, and wait until it is gone."""
        self.room.make_room(size_bytes)
        if self._removals:
            await asyncio.wait(self._removals)

    def _evict_one(self) -> int:
        while self.quarantine:
            aside, size_bytes = next(iter(self.quarantine.items()))
            del self.quarantine[aside]
            self._leaving_aside.add(aside)
            self._spawn(self._removals, self._remove_aside(aside, size_bytes))
            if size_bytes:
                return size_bytes
        entry = self.index.least(self._is_busy)
        if entry is None:
            return 0
        name = (entry.space.label, entry.key)
        self.index.drop(entry)
        self.turns.take_now(name)
        self._spawn(self._removals, self._remove_evicted(name, entry))
        return entry.disk_bytes

    def _is_busy(self, entry: Entry) -> bool:
        return entry.busy > 0 or self.turns.busy((entry.space.label, entry.key))

    async def _remove_evicted(self, name: Name, entry: Entry) -> None:
        try:
            await self.pools.writers.run(
                partial(remove, self.place, fs_scan.object_path(entry.space.label, entry.key))
            )
        except (OSError, BackendError) as error:
            self.failed("evict", error)
            # As if used now: one file that cannot be removed must not fail every store.
            self.index.add(*name, entry.size, time_ns(), uses=entry.uses)
            self.room.stuck(entry.disk_bytes, error)
        else:
            self.evicted += 1
            self.room.left(entry.disk_bytes)
        finally:
            self.turns.leave(name)

    async def _remove_aside(self, aside: str, size_bytes: int) -> None:
        try:
            await self.pools.writers.run(partial(remove, self.place, aside))
        except (OSError, BackendError) as error:
            self.failed("evict", error)
            self.room.stuck(size_bytes, error)  # counted, and not tried again
        else:
            self.room.left(size_bytes)
            self._leaving_aside.discard(aside)

    # ---- quarantine

    async def count_quarantine(self) -> None:
        """Take what is on disk into account."""
        await self._recount(lambda place: None, 0)

    async def _recount(self, before: Callable[[Place], None], freed_bytes: int) -> None:
        """Do `before` and list the quarantine; `freed_bytes` are no object's any more."""

        def work() -> list[tuple[str, int]]:
            before(self.place)
            return list_quarantine(self.place)

        await self.turns.take(_ASIDE)
        try:
            listed = dict(await self.pools.writers.run(work))
            for name in self._leaving_aside:
                listed.pop(name, None)
            change = sum(listed.values()) - sum(self.quarantine.values())
            self.quarantine = listed
            self.room.freed(freed_bytes - change)
        finally:
            self.turns.leave(_ASIDE)

    # ---- a whole fingerprint

    async def forget(self, first: str) -> None:
        """Nobody finds these labels any more; their files are deleted in the background."""
        while (before := self._forgetting.get(first)) is not None:
            await asyncio.shield(before)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forgetting[first] = done
        self.forgets[first] += 1
        size_bytes = sum(space.bytes for space in self.index.forget(first))
        self.room.leaving(size_bytes)
        try:
            work = partial(fs_scan.throw_away, self.place, first, partial(secrets.token_hex, 8))
            trash = await self.pools.writers.run(work)
        except (OSError, BackendError) as error:
            self.room.stuck(size_bytes, error)
            raise
        finally:
            del self._forgetting[first]
            done.set_result(None)
        self._spawn(self._deletions, self.empty_trash(trash, size_bytes))

    async def empty_trash(self, names: Sequence[str], size_bytes: int) -> None:
        """Delete these directories; `size_bytes` of them are counted as leaving."""
        loop = asyncio.get_running_loop()
        owed = [size_bytes]

        def freed(some_bytes: int) -> None:
            some_bytes = min(some_bytes, owed[0])
            owed[0] -= some_bytes
            self.room.left(some_bytes)

        def work() -> None:
            for name in names:
                for some_bytes in fs_scan.delete_tree(self.place, name):
                    if self.closing:
                        return
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(freed, some_bytes)

        try:
            await self.pools.chores.run(work)
        except (OSError, BackendError) as error:
            self.failed("delete trash", error)
            self.room.stuck(owed[0], error)
        else:
            self.room.left(owed[0])
        owed[0] = 0

    async def deletions(self) -> None:
        """Wait for the trash that is being deleted."""
        while self._deletions:
            await asyncio.wait(self._deletions)

    # ---- its end

    def failed(self, what: str, error: Exception) -> None:
        """Work that nobody waits for went wrong."""
        self.last_error = f"{what}: {error}"
        fields = {"place": str(self.place.root), "what": what, "error": str(error)}
        self.log.warning("l2_background_failed", extra={"fields": fields})

    async def close(self) -> None:
        """Stop what runs in the background; the pools are closed."""
        self.closing = True
        tasks = self._removals | self._deletions
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.place.release()

    def _spawn(self, among: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        among.add(task)
        task.add_done_callback(partial(self._ended, among))

    def _ended(self, among: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        among.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, OSError | BackendError):
                raise error
            self.failed("background", error)


def first_part(label: str) -> str:
    """The fingerprint's part of a label."""
    return label[:LABEL_DIGITS]
