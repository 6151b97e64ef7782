"""The `fs` backend: objects as files below one directory of a local or mounted file system.

    fs:///var/lib/kvkeep?capacity=100GiB&direct=auto&readers=8&writers=4&name=disk

An index in memory answers lookups; it is rebuilt by a scan at start. Room is reserved, and what is
worth least is evicted, before a write begins. All file I/O runs in daemon threads of its own, so a
disk that hangs holds up nothing but itself.
"""

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from time import time_ns
from typing import TypeVar

from kvkeep.backends import fs_files, fs_open, fs_scan, header
from kvkeep.backends.base import ABSENT, PAGE_BYTES, Item, TenantLimits, TenantUsage, Usage
from kvkeep.backends.fs_files import Direct, Files, OneFile
from kvkeep.backends.fs_held import Held, Name, Pools, first_part
from kvkeep.backends.fs_identity import LEAST_CAPACITY_BYTES
from kvkeep.backends.fs_index import disk_bytes, tenant_of, value_ns
from kvkeep.backends.fs_place import Place
from kvkeep.backends.fs_rebuild import rebuild
from kvkeep.backends.fs_trouble import Trouble
from kvkeep.backends.registry import BackendUrl
from kvkeep.backends.threads import Pool
from kvkeep.errors import BackendError
from kvkeep.types import IoOutcome, Namespace, ObjectKey

READERS = 8
WRITERS = 4
MOST_THREADS = 256
CLOSE_WAIT_S = 1.0
LOGGER = "kvkeep.server.fs"  # below the server's logger: its handlers write these lines
_NAMES_AT_ONCE = 256
_LABELS_KEPT = 1_024
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FsSettings:
    """Where and how; without `capacity_bytes`, what the directory was given at its first start."""

    root: Path
    name: str = "fs"
    url: str = ""
    capacity_bytes: int | None = None
    direct: Direct = Direct.AUTO
    readers: int = READERS
    writers: int = WRITERS


def from_url(url: BackendUrl) -> "FsBackend":
    """Make a backend from `fs:///absolute/path?option=value`. Raises ConfigError."""
    if url.host or not url.path.startswith("/") or url.path == "/":
        raise url.problem("name a directory by its absolute path, as in fs:///var/lib/kvkeep")
    capacity_bytes = url.size("capacity")
    if capacity_bytes is not None and capacity_bytes < LEAST_CAPACITY_BYTES:
        raise url.problem("capacity must be at least 1MiB")
    choices = {choice.value: choice for choice in Direct}
    return FsBackend(
        FsSettings(
            Path(os.path.normpath(url.path)),
            url.name,
            url.public,
            capacity_bytes,
            url.choice("direct", choices, Direct.AUTO),
            url.number("readers", READERS, least=1, most=MOST_THREADS),
            url.number("writers", WRITERS, least=1, most=MOST_THREADS),
        )
    )


class FsBackend:
    """See `base.Backend`. `clock` gives wall nanoseconds."""

    def __init__(self, settings: FsSettings, *, clock: Callable[[], int] = time_ns) -> None:
        self._settings = settings
        self._clock = clock
        self.name = settings.name
        self.url = settings.url or f"fs://{settings.root}"
        self._log = logging.getLogger(LOGGER)
        self._files = Files(settings.direct)
        self._said_buffered = not self._files.direct
        self._labels = lru_cache(_LABELS_KEPT)(header.label)
        self._pools: Pools | None = None
        self._held: Held | None = None
        self._scan: asyncio.Task[None] | None = None
        self._slots = asyncio.Semaphore(2 * settings.writers)
        self._trouble = Trouble(settings.root, self._log, clock)
        self._limits: TenantLimits | None = None

    def limit_tenants(self, limits: TenantLimits) -> None:
        """See `base.Tenanted`."""
        self._limits = limits

    def tenants(self) -> Sequence[TenantUsage]:
        """See `base.Tenanted`."""
        return self._held.tenants.seen() if self._held is not None else []

    def refused_puts(self) -> Mapping[str, int]:
        """See `base.Tenanted`."""
        return self._held.tenants.refused if self._held is not None else {}

    @property
    def last_error(self) -> str:
        """What went wrong last in work that nobody waited for, such as an eviction."""
        return self._trouble.text or (self._held.last_error if self._held is not None else "")

    async def open(self) -> None:
        settings = self._settings
        self._pools = Pools(
            Pool(f"{self.name}-read", settings.readers),
            Pool(f"{self.name}-write", settings.writers),
            Pool(f"{self.name}-chores", 1),
        )
        try:
            await self._take_into_use(None)
        except BackendError:
            await self._pools.close(CLOSE_WAIT_S)
            raise

    async def close(self) -> None:
        if self._pools is None or self._held is None:
            return
        self._held.closing = True
        await self._stop_scan()
        await self._pools.close(CLOSE_WAIT_S)
        await self._held.close()

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        held, label = self._open_held(), self._labels(space)
        known = held.index.space(label)
        found = [False] * len(keys) if known is None else [key in known.entries for key in keys]
        if all(found) or held.complete.is_set() or held.is_forgetting(label):
            return found
        return self._look(held, label, keys, found)

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        held = self._open_held()
        return await _all_settled([self._get(held, item) for item in items])

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        held = self._open_held()
        # Refusals, not failures: reading goes on, and is not cut off by the breaker.
        if held.place.read_only and self._trouble.may_look():
            await self.probe()  # takes it into use anew if it has become writable
            held = self._open_held()
        if not held.complete.is_set() or self._is_read_only(held):
            return [IoOutcome.REFUSED] * len(items)
        try:
            outcomes = await _all_settled([self._put(held, item) for item in items])
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            self._trouble.is_read_only(error)
            return [IoOutcome.REFUSED] * len(items)
        if IoOutcome.OK in outcomes:
            self._trouble.is_writable()
        return outcomes

    def _is_read_only(self, held: Held) -> bool:
        """Opened so, or turned so a moment ago; that is tried again."""
        return held.place.read_only or self._trouble.read_only

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        held, label = self._open_held(), self._labels(space)
        await _all_settled([held.delete((label, key), broken=broken) for key in keys])

    async def forget(self, space: Namespace) -> None:
        await self._open_held().forget(header.fingerprint_label(space))

    async def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        held = self._open_held()
        await held.complete.wait()
        for space in held.index:
            for number, entry in enumerate(list(space.entries.values())):
                if number % _NAMES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if entry.present:
                    yield space.label, entry.key, entry.size

    async def probe(self) -> None:
        held, pools = self._open_held(), self._open_pools()
        if not await pools.readers.run(partial(_is_usable, held.place)):
            root = self._settings.root
            await pools.readers.run(partial(fs_open.refuse_another, root, held.place))
            await self._stop_scan()
            await held.close()
            held = await self._take_into_use(held.place)
        if not held.place.read_only:
            await pools.writers.run(
                partial(fs_files.probe, held.place, memoryview(bytes(PAGE_BYTES)))
            )

    def usage(self) -> Usage:
        held = self._held
        if held is None:
            return Usage(scanned=0.0)
        return Usage(
            objects=held.index.objects,
            used_bytes=held.room.used_bytes,
            capacity_bytes=held.room.capacity_bytes,
            evicted_objects=held.evicted,
            quarantined_objects=len(held.quarantine),
            scanned=held.scanned,
            read_only=self._is_read_only(held),
            last_error=self._trouble.text or held.last_error,
        )

    # ---- one object

    async def _get(self, held: Held, item: Item) -> int:
        name = (self._labels(item.space), item.key)
        entry = held.index.find(*name)
        if entry is None and (
            held.complete.is_set() or held.is_forgetting(name[0]) or name in held.changed
        ):
            return ABSENT
        now_ns = self._clock()
        if entry is None:
            value = value_ns(now_ns, 1, item.depth)
        else:
            value = held.index.use(entry, now_ns, item.depth)
            entry.busy += 1
        try:
            work = partial(
                self._files.read,
                held.place,
                fs_scan.object_path(*name),
                (item.header, item.payload),
                item.length,
                value_ns=value,
            )
            size = await held.pools.readers.run(work)
        finally:
            if entry is not None:
                entry.busy -= 1
        self._say_if_buffered()
        if size == ABSENT and entry is not None:
            held.vanished(entry)
        return size

    async def _put(self, held: Held, item: Item) -> IoOutcome:
        name = (self._labels(item.space), item.key)
        size_bytes = disk_bytes(item.length)
        if size_bytes > held.room.capacity_bytes:
            self._trouble.is_too_large(item.length, held.room.capacity_bytes)
            return IoOutcome.FULL
        async with held.tenants.writing(tenant_of(name[0]), size_bytes) as admitted:
            return await self._replace(held, name, item) if admitted else IoOutcome.FULL

    async def _replace(self, held: Held, name: Name, item: Item) -> IoOutcome:
        """Write it in place of what is there."""
        size_bytes = disk_bytes(item.length)
        async with self._slots, held.changing(name):
            forgets = held.forgets[first_part(name[0])]
            if not await held.room.reserve(size_bytes):
                return IoOutcome.FULL
            old = held.index.find(*name)
            value = value_ns(self._clock(), 1 if old is None else old.uses, item.depth)
            outcome = IoOutcome.ERROR
            try:
                outcome = await self._write(held, name, item, value)
                if held.forgets[first_part(name[0])] != forgets:  # it must not come back
                    path = fs_scan.object_path(*name)
                    await held.pools.writers.run(partial(fs_files.remove, held.place, path))
                    outcome = IoOutcome.REFUSED
            finally:
                if outcome is not IoOutcome.OK:
                    held.room.unwritten(size_bytes)
            if outcome is IoOutcome.OK:
                held.stored(name, item.length, value)
        self._say_if_buffered()
        return outcome

    async def _write(self, held: Held, name: Name, item: Item, value: int) -> IoOutcome:
        """OK, or FULL when the disk has no room though we counted some, also after evicting."""
        work = partial(
            self._files.write,
            held.place,
            fs_scan.object_path(*name),
            (item.header, item.payload),
            item.length,
            value_ns=value,
        )
        for is_last in (False, True):
            try:
                await held.pools.writers.run(work)
            except OneFile as error:
                held.failed("store", error)
                if is_last or not await held.clear_way(name):
                    break
            except OSError as error:
                if error.errno not in _DISK_FULL:
                    raise
                size_bytes = disk_bytes(item.length)
                used_bytes = held.room.used_bytes - size_bytes
                self._trouble.is_full(used_bytes, held.room.capacity_bytes)
                if not is_last:
                    await held.make_space(size_bytes)
            else:
                self._trouble.has_room()
                return IoOutcome.OK
        return IoOutcome.FULL

    async def _look(
        self, held: Held, label: str, keys: Sequence[ObjectKey], found: list[bool]
    ) -> Sequence[bool]:
        """The scan is not done: ask the disk for what it has not seen."""
        forgets = held.forgets[first_part(label)]
        unknown = [
            number
            for number, key in enumerate(keys)
            if not found[number] and (label, key) not in held.changed
        ]
        paths = [fs_scan.object_path(label, keys[number]) for number in unknown]
        there = await held.pools.readers.run(partial(fs_files.present, held.place, paths))
        if held.forgets[first_part(label)] != forgets:
            return [False] * len(keys)
        for number, is_there in zip(unknown, there, strict=True):
            found[number] = is_there and (label, keys[number]) not in held.changed
        return found

    # ---- the place

    async def _take_into_use(self, before: Place | None) -> Held:
        settings, pools = self._settings, self._open_pools()
        work = partial(
            fs_open.open_place, settings.root, capacity_bytes=settings.capacity_bytes, before=before
        )
        place = await pools.writers.run(work)
        held = Held(place, files=self._files, pools=pools, log=self._log, limits=self._limits)
        self._held = held
        self._scan = asyncio.create_task(rebuild(held))
        fields = {
            "place": str(place.root),
            "capacity_bytes": held.room.capacity_bytes,
            "read_only": place.read_only,
        }
        self._log.info("l2_opened", extra={"fields": fields})
        disk_size_bytes = await pools.writers.run(partial(fs_open.disk_size_bytes, place))
        if before is None and held.room.capacity_bytes > disk_size_bytes:
            self._trouble.is_above_disk(held.room.capacity_bytes, disk_size_bytes)
        return held

    async def _stop_scan(self) -> None:
        if self._scan is not None:
            self._scan.cancel()
            await asyncio.gather(self._scan, return_exceptions=True)

    def _say_if_buffered(self) -> None:
        if not self._files.direct and not self._said_buffered:
            self._said_buffered = True
            why = "this file system refuses O_DIRECT; I/O goes through the page cache"
            fields = {"place": str(self._settings.root), "why": why}
            self._log.warning("l2_buffered", extra={"fields": fields})

    def _open_held(self) -> Held:
        if self._held is None:
            raise BackendError(f"{self._settings.root} is not open")
        return self._held

    def _open_pools(self) -> Pools:
        if self._pools is None:
            raise BackendError(f"{self._settings.root} is not open")
        return self._pools


def _is_usable(place: Place) -> bool:
    """False when the root must be opened anew: it is another one, or can be written by now."""
    try:
        place.check()
    except BackendError:
        return False
    return not (place.read_only and os.access(place.root, os.W_OK))


async def _all_settled(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results in order; when one failed, raise its error only after all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
