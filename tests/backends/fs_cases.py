"""What the tests of the `fs` backend share: an open backend or store, and its files."""

import asyncio
import mmap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from hashlib import shake_128
from pathlib import Path

from kvkeep.backends.base import ABSENT, HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.checked import Store, Wanted
from kvkeep.backends.fs import FsBackend, FsSettings
from kvkeep.backends.fs_scan import object_path
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.header import label
from kvkeep.backends.registry import compose
from kvkeep.testing.backend_contract import SPACE, filled, found, is_filled, item, key, ready, store
from kvkeep.types import Namespace, ObjectKey

CAPACITY_BYTES = 64 << 20
LENGTH = 3 * PAGE_BYTES  # with its header page: four pages on disk
DISK_BYTES = HEADER_BYTES + LENGTH


def settings(root: Path, capacity_bytes: int | None = CAPACITY_BYTES) -> FsSettings:
    return FsSettings(root, capacity_bytes=capacity_bytes)


@asynccontextmanager
async def opened(
    root: Path,
    capacity_bytes: int | None = CAPACITY_BYTES,
    *,
    clock: Callable[[], int] = time.time_ns,
) -> AsyncIterator[FsBackend]:
    """A backend that knows what it holds."""
    backend = FsBackend(settings(root, capacity_bytes), clock=clock)
    await backend.open()
    try:
        await ready(backend)
        yield backend
    finally:
        await backend.close()


async def put(backend: FsBackend, *numbers: int) -> None:
    """Store these objects, one after the other."""
    for number in numbers:
        await store(backend, filled(SPACE, key(number), LENGTH, seed=number))


async def has(backend: FsBackend, number: int) -> bool:
    """Whether the object is there; if it is, it is right."""
    one = item(SPACE, key(number), LENGTH)
    [size] = await backend.get([one])
    assert size in (LENGTH, ABSENT)
    assert size == ABSENT or is_filled(one, seed=number)
    assert (size == LENGTH) == (await found(backend, SPACE, [key(number)]))[0]
    return size == LENGTH


async def _inline(job: object) -> list[bytes]:
    assert callable(job)
    found: list[bytes] = job()
    return found


@asynccontextmanager
async def stored(root: Path, capacity_bytes: int = CAPACITY_BYTES) -> AsyncIterator[Store]:
    """The same as the server has it."""
    store = compose(
        FsBackend(settings(root, capacity_bytes)),
        settings=GuardSettings(get_timeout_s=60, put_timeout_s=60),
        log=lambda event, **fields: None,
        offload=_inline,
    )
    await store.open()
    try:
        while store.usage().scanned < 1.0:
            await asyncio.sleep(0.002)
        yield store
    finally:
        await store.close()


def wanted(number: int, length: int, *, space: Namespace = SPACE, fill: bool = False) -> Wanted:
    """Memory for an object; with `fill`, its content."""
    payload = memoryview(mmap.mmap(-1, -(-length // PAGE_BYTES) * PAGE_BYTES))
    payload[:] = b"\xa5" * len(payload)
    if fill:
        payload[:length] = content(number, length)
    return Wanted(space, key(number), payload, length)


def content(number: int, length: int) -> bytes:
    """What an object of this number holds."""
    return shake_128(number.to_bytes(4, "little")).digest(length)


def path_of(root: Path, name: ObjectKey, space: Namespace = SPACE) -> Path:
    """The object's file."""
    return root / object_path(label(space), name)


def disk_usage(root: Path) -> int:
    """Bytes of all files below the root in whole pages, whatever they are."""
    total = 0
    for path in root.rglob("*"):
        try:
            data = path.lstat()
        except FileNotFoundError:
            continue
        if path.is_file() and path.parent != root:
            total += -(-data.st_size // PAGE_BYTES) * PAGE_BYTES
    return total
