"""What one opened directory of the `fs` backend holds, and every way something leaves it.

The index, the room and the quarantine change here and only on the loop's thread; files are touched
in the pools' threads. Each name has one change at a time. Bytes count until they are off the disk.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from time import time_ns

from kvkeep.backends import fs_scan
from kvkeep.backends.base import TenantLimits
from kvkeep.backends.fs_files import (
    Aside,
    Files,
    OneFile,
    clear_way,
    list_quarantine,
    remove,
    remove_aside,
    set_aside,
)
from kvkeep.backends.fs_index import Entry, Index
from kvkeep.backends.fs_place import Place
from kvkeep.backends.fs_quota import Tenants
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

    def __init__(
        self,
        place: Place,
        *,
        files: Files,
        pools: Pools,
        log: logging.Logger,
        limits: TenantLimits | None = None,
    ) -> None:
        assert place.identity is not None
        self.place = place
        self.files = files
        self.pools = pools
        self.log = log
        self.index = Index()
        self.room = Room(place.identity.capacity_bytes, self._evict_one)
        self.turns = Turns()
        self.tenants = Tenants(
            self.index,
            limits,
            evict=self._evict_for_tenant,
            is_busy=self._is_busy,
            capacity_bytes=self.room.capacity_bytes,
        )
        self.quarantine: dict[str, int] = {}  # name -> bytes, oldest first
        self.quarantine_foreign = 0
        self.complete = asyncio.Event()  # the index knows everything that is on disk
        self.scanned = 0.0
        self.foreign = 0
        self.evicted = 0
        self.closing = False
        self.last_error = ""
        self.changed: set[Name] = set()  # while it is incomplete: what the scan must not add
        self.forgets: Counter[str] = Counter()  # by fingerprint label
        self._unremoved: dict[Name, int] = {}  # bytes on disk of what is in the index no more
        self._said = ""
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
        self._gone(name)

    def vanished(self, entry: Entry) -> None:
        """Its file is gone without us: a scrub set it aside, or somebody deleted it."""
        name = (entry.space.label, entry.key)
        if entry.present and not self.turns.busy(name):
            self._drop(entry)
            self._spawn(self._removals, self.count_quarantine())

    async def delete(self, name: Name, *, broken: bool) -> None:
        """Out of the index at once, then off the disk or into quarantine."""
        async with self.changing(name):
            entry = self.index.find(*name)
            if entry is not None:
                self.index.drop(entry)
                self._unremoved[name] = entry.disk_bytes
            if not self.complete.is_set():
                self.changed.add(name)
            if broken:
                await self._set_aside(name)
                return
            path = fs_scan.object_path(*name)
            try:
                await self.pools.writers.run(partial(remove, self.place, path))
            except OneFile:
                await self._set_aside(name)
            else:
                self._gone(name)

    async def clear_way(self, name: Name) -> bool:
        """Something that is no object stands where this one belongs; whether it could be moved."""
        path = fs_scan.object_path(*name)
        try:
            await self._recount(partial(clear_way, name=path))
        except OneFile as error:
            self.failed("store", error)
            return False
        old = self.index.find(*name)
        if old is not None:
            self._drop(old)
        self._gone(name)
        fields = {"place": str(self.place.root), "path": path}
        self.log.warning("l2_moved_out_of_the_way", extra={"fields": fields})
        return True

    async def _set_aside(self, name: Name) -> bool:
        """Into quarantine; False when this one cannot be moved: its bytes count on."""
        path = fs_scan.object_path(*name)
        try:
            await self._recount(partial(set_aside, name=path))
        except OneFile as error:
            self.failed("set aside", error)
            return False
        self._gone(name)
        return True

    def _gone(self, name: Name) -> None:
        """What was under the name before is off the disk, or counted in quarantine."""
        self.room.freed(self._unremoved.pop(name, 0))

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
        return 0 if entry is None else self._start_removal(entry)

    def _evict_for_tenant(self, entry: Entry) -> None:
        self.room.leaving(self._start_removal(entry))

    def _start_removal(self, entry: Entry) -> int:
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
        except OneFile:
            await self._evict_aside(name, entry.disk_bytes)
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

    async def _evict_aside(self, name: Name, size_bytes: int) -> None:
        """It cannot be unlinked, as a directory cannot; nobody waits for this one alone."""
        self._unremoved[name] = size_bytes
        try:
            is_gone = await self._set_aside(name)
        except (OSError, BackendError) as error:
            self.room.stuck(size_bytes, error)
            raise
        self.evicted += is_gone
        self.room.stayed(size_bytes)  # its bytes were freed with its name, if it went

    async def _remove_aside(self, aside: str, size_bytes: int) -> None:
        try:
            await self.pools.writers.run(partial(remove_aside, self.place, aside))
        except OneFile as error:
            self.failed("evict", error)
            self.room.stayed(size_bytes)  # counted, and not tried again
        except (OSError, BackendError) as error:
            self.failed("evict", error)
            self.room.stuck(size_bytes, error)  # counted, and not tried again
        else:
            self.room.left(size_bytes)
            self._leaving_aside.discard(aside)

    # ---- quarantine

    async def count_quarantine(self) -> None:
        """Take what is on disk into account."""
        await self._recount(lambda place: None)

    async def _recount(self, before: Callable[[Place], None]) -> None:
        """Do `before` and list the quarantine."""

        def work() -> Aside:
            before(self.place)
            return list_quarantine(self.place)

        await self.turns.take(_ASIDE)
        try:
            aside = await self.pools.writers.run(work)
            self.quarantine_foreign = aside.foreign
            listed = dict(aside.ours)
            for name in self._leaving_aside:
                listed.pop(name, None)
            change = sum(listed.values()) - sum(self.quarantine.values())
            self.quarantine = listed
            self.room.freed(-change)  # who waits for room may have it now
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
        """Work that nobody waits for went wrong. The same again is not said again."""
        is_read_only = isinstance(error, OSError) and error.errno == errno.EROFS
        text = os.strerror(errno.EROFS) if is_read_only else str(error)
        self.last_error = f"{what}: {text}"
        if self._said != self.last_error:
            self._said = self.last_error
            fields = {"place": str(self.place.root), "what": what, "error": text}
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
