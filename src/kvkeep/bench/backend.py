"""`kvkeep bench backend`: how fast an L2 moves objects, against plain files on the same disk.

The store is the server's: checksums, deadlines, counting, into and out of a shared mapping like the
arena. The reference writes and reads the same bytes as plain files, with O_DIRECT where the disk
allows it, with the same number of threads, out of and into plain memory; neither side syncs. The
two take turns within each round, in changing order, and each round's keys lead to other bytes than
the round before. Reported are medians. With `encrypted`, the store encrypts under a key of its own,
and the reference stays plain: the difference to a run without is the price.
"""

import asyncio
import contextlib
import errno
import mmap
import os
import secrets
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from xxhash import xxh3_128_digest

from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.checked import Store, Wanted
from kvkeep.backends.encrypted import BUFFER_BYTES, Sealer
from kvkeep.backends.fs import READERS, WRITERS
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.keyring import SECRET_BYTES, Key, Keyring
from kvkeep.backends.registry import BackendUrl, stores
from kvkeep.bench.session import BenchFailed
from kvkeep.types import ChunkHash, Fingerprint, IoOutcome, Namespace, ObjectKey

OBJECTS = 256
OBJECT_BYTES = 5_898_240  # a chunk of 256 tokens of SmolLM2-135M
ROUNDS = 5
LEAST_BYTES = 1 << 30
_FILL_BYTES = 1 << 24
_NO_DEADLINE_S = 600.0
_IN_FLIGHT = 2  # calls for each thread
_SPACE = Namespace(Fingerprint(bytes(32)), model="bench")

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much is moved, and how often."""

    objects: int = OBJECTS
    object_bytes: int = OBJECT_BYTES
    rounds: int = ROUNDS


@dataclass(frozen=True, slots=True)
class _Plan:
    objects: int
    object_bytes: int
    readers: int
    writers: int
    encrypted: bool

    @property
    def total_bytes(self) -> int:
        return self.objects * self.object_bytes

    @property
    def stride_bytes(self) -> int:
        return -(-self.object_bytes // PAGE_BYTES) * PAGE_BYTES

    def payloads(self, memory: memoryview) -> list[memoryview]:
        step = self.stride_bytes
        return [memory[start : start + step] for start in range(0, self.objects * step, step)]


def run(
    where: str, amounts: Amounts | None = None, *, encrypted: bool = False, progress: Say
) -> dict[str, Any]:
    """Measure the `fs` backend in a scratch directory below `where`, a directory or an fs URL.

    Returns the report of `bench backend --json`. Raises KVKeepError.
    """
    url = BackendUrl(where if "://" in where else f"fs://{quote(str(Path(where).absolute()))}")
    if url.scheme != "fs":
        raise BenchFailed(f"bench backend measures fs, not {url.scheme}: name a directory")
    amounts = amounts or Amounts()
    if min(amounts.objects, amounts.object_bytes, amounts.rounds) < 1:
        raise BenchFailed("objects, their bytes and rounds must each be at least 1")
    plan = _Plan(
        amounts.objects,
        amounts.object_bytes,
        url.number("readers", READERS),
        url.number("writers", WRITERS),
        encrypted,
    )
    with _scratch(Path(url.path), plan) as scratch:
        return asyncio.run(_measure(url, scratch, plan, rounds=amounts.rounds, say=progress))


@contextlib.contextmanager
def _scratch(parent: Path, plan: _Plan) -> Iterator[Path]:
    try:
        free_bytes = shutil.disk_usage(parent).free
    except OSError as error:
        raise BenchFailed(f"{parent} cannot be used: {error.strerror}") from error
    needed_bytes = 3 * plan.total_bytes
    if free_bytes < needed_bytes:
        raise BenchFailed(
            f"{parent} has {free_bytes} bytes free and the bench needs {needed_bytes}: "
            "name another directory, or fewer objects"
        )
    scratch = parent / f"kvkeep-bench-{secrets.token_hex(4)}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _store(url: BackendUrl, scratch: Path, plan: _Plan) -> Store:
    capacity_bytes = 2 * plan.objects * (plan.stride_bytes + PAGE_BYTES)
    query = urlsplit(url.public).query
    text = f"fs://{quote(str(scratch / 'l2'))}?{query or f'capacity={capacity_bytes}'}"
    settings = GuardSettings(get_timeout_s=_NO_DEADLINE_S, put_timeout_s=_NO_DEADLINE_S)
    sealer: Callable[[], Sealer] | None = None
    if plan.encrypted:
        buffer_bytes = max(BUFFER_BYTES, 2 * plan.writers * plan.stride_bytes)
        keyring = Keyring([Key("bench", secrets.token_bytes(SECRET_BYTES))])
        sealer = partial(Sealer, keyring, buffer_bytes=buffer_bytes)
    [store] = stores(text, settings=settings, log=lambda event, **fields: None, sealer=sealer)
    return store


class _Plain:
    """The reference: each object a file, written and read whole by a few threads."""

    def __init__(self, folder: Path, payloads: Sequence[memoryview]) -> None:
        self._folder = folder
        self._payloads = payloads
        self._direct = _direct_flag(folder)

    def put(self, threads: int) -> float:
        """Seconds to write all."""
        return _timed(self._write, len(self._payloads), threads)

    def get(self, threads: int) -> float:
        """Seconds to read all."""
        return _timed(self._read, len(self._payloads), threads)

    def clear(self) -> None:
        """Remove the files."""
        for number in range(len(self._payloads)):
            (self._folder / str(number)).unlink(missing_ok=True)

    def _write(self, number: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._direct
        fd = os.open(self._folder / str(number), flags, 0o600)
        try:
            done = os.pwritev(fd, [self._payloads[number]], 0)
        finally:
            os.close(fd)
        assert done == len(self._payloads[number]), "the disk is full"

    def _read(self, number: int) -> None:
        fd = os.open(self._folder / str(number), os.O_RDONLY | self._direct)
        try:
            done = os.preadv(fd, [self._payloads[number]], 0)
        finally:
            os.close(fd)
        assert done == len(self._payloads[number])


class _Kept:
    """The store, between a source and a target in one shared mapping."""

    def __init__(self, store: Store, plan: _Plan, source: memoryview, target: memoryview) -> None:
        self._store = store
        self._plan = plan
        self._source = plan.payloads(source)
        self._target = plan.payloads(target)
        self._right = [self._digest(payload) for payload in self._source]
        self._keys = [
            ObjectKey(ChunkHash(xxh3_128_digest(b"%d" % n) * 2), 1, 0, 0)
            for n in range(plan.objects)
        ]

    def turn(self) -> None:
        """From now on each key has the bytes of another object; the target holds nothing right."""
        self._source.append(self._source.pop(0))
        self._right.append(self._right.pop(0))
        for payload in self._target:
            payload[:PAGE_BYTES] = bytes(PAGE_BYTES)
            payload[-PAGE_BYTES:] = bytes(PAGE_BYTES)

    async def put(self) -> float:
        """Seconds to store all."""
        return await self._each(self._store.put, self._source, self._plan.writers)

    async def get(self) -> float:
        """Seconds to fetch and verify all."""
        return await self._each(self._store.get, self._target, self._plan.readers)

    async def clear(self) -> None:
        """Delete all."""
        await self._store.delete(_SPACE, self._keys)

    def equal(self) -> bool:
        """Whether the target holds what was stored, every byte."""
        found = (self._digest(payload) for payload in self._target)
        return all(map(bytes.__eq__, found, self._right))

    def _digest(self, payload: memoryview) -> bytes:
        return xxh3_128_digest(payload[: self._plan.object_bytes])

    async def _each(
        self,
        move: Callable[[Sequence[Wanted]], Any],
        payloads: Sequence[memoryview],
        threads: int,
    ) -> float:
        slots = asyncio.Semaphore(_IN_FLIGHT * threads)
        length = self._plan.object_bytes

        async def one(key: ObjectKey, payload: memoryview) -> None:
            async with slots:
                [outcome] = await move([Wanted(_SPACE, key, payload, length)])
            if outcome is not IoOutcome.OK:
                raise BenchFailed(f"an object ended as {outcome.name}: {self._store.status()}")

        started = time.perf_counter()
        await asyncio.gather(*map(one, self._keys, payloads))
        return time.perf_counter() - started


async def _measure(
    url: BackendUrl, scratch: Path, plan: _Plan, *, rounds: int, say: Say
) -> dict[str, Any]:
    say("preparing memory")
    size = plan.objects * plan.stride_bytes
    source, target = _shared(size), _shared(size)
    _fill(source)
    plain = memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    plain[:] = source
    target[:] = source  # every page is there before the first round
    folder = scratch / "plain"
    folder.mkdir()
    reference = _Plain(folder, plan.payloads(plain))
    store = _store(url, scratch, plan)
    await store.open()
    try:
        while store.usage().scanned < 1.0:
            await asyncio.sleep(0.01)
        kept = _Kept(store, plan, source, target)
        return await _rounds(kept, reference, plan, rounds=rounds, say=say)
    finally:
        await store.close()


async def _rounds(
    kept: _Kept, reference: _Plain, plan: _Plan, *, rounds: int, say: Say
) -> dict[str, Any]:
    times: dict[str, list[float]] = {"put": [], "get": [], "reference_put": [], "reference_get": []}
    verified = True
    for number in range(rounds + 1):  # the first one warms up
        say(f"round {number} of {rounds}")
        kept.turn()
        took: dict[str, float] = {}

        async def ours(took: dict[str, float] = took) -> None:
            took["put"] = await kept.put()
            took["get"] = await kept.get()

        async def plainly(took: dict[str, float] = took) -> None:
            took["reference_put"] = await asyncio.to_thread(reference.put, plan.writers)
            took["reference_get"] = await asyncio.to_thread(reference.get, plan.readers)

        for turn in (ours, plainly) if number % 2 else (plainly, ours):
            await turn()
        verified = kept.equal() and verified
        await kept.clear()
        reference.clear()
        for name, seconds in took.items() if number else ():
            times[name].append(seconds)
    return _report(plan, times, verified=verified)


def _report(plan: _Plan, times: dict[str, list[float]], *, verified: bool) -> dict[str, Any]:
    gbps = {
        name: plan.total_bytes / statistics.median(values) / 1e9 for name, values in times.items()
    }
    return ({"encrypted": True} if plan.encrypted else {}) | {
        "backend": "fs",
        "objects": plan.objects,
        "object_bytes": plan.object_bytes,
        "put_gbps": round(gbps["put"], 3),
        "get_gbps": round(gbps["get"], 3),
        "reference_put_gbps": round(gbps["reference_put"], 3),
        "reference_get_gbps": round(gbps["reference_get"], 3),
        "put_ratio": round(gbps["put"] / gbps["reference_put"], 3),
        "get_ratio": round(gbps["get"] / gbps["reference_get"], 3),
        "verified": verified,
    }


def _timed(work: Callable[[int], None], count: int, threads: int) -> float:
    """Seconds that the threads need for `work(0)` to `work(count - 1)`."""
    numbers = iter(range(count))
    lock = threading.Lock()
    errors: list[Exception] = []

    def serve() -> None:
        try:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                work(number)
        except Exception as error:
            errors.append(error)

    started = time.perf_counter()
    running = [threading.Thread(target=serve) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise BenchFailed(f"the reference failed: {errors[0]}") from errors[0]
    return time.perf_counter() - started


def _direct_flag(folder: Path) -> int:
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise BenchFailed(f"{folder} cannot be written: {error.strerror}") from error
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT


def _shared(size: int) -> memoryview:
    """A shared mapping, as the arena is."""
    fd = os.memfd_create("kvkeep-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        return memoryview(mmap.mmap(fd, size))
    finally:
        os.close(fd)


def _fill(memory: memoryview) -> None:
    for start in range(0, len(memory), _FILL_BYTES):
        part = memory[start : start + _FILL_BYTES]
        part[:] = os.urandom(len(part))
