"""What the server uses of an L2: objects go in with a checksum, and come out right or not at all.

A `Store` writes the header page, and when reading compares it with what was asked and the payload
with its checksum. Anything else than exactly the stored object is a named outcome, is counted, and
is deleted as broken, so that the next store writes it anew. Checksums of large payloads are
computed off the event loop.
"""

import asyncio
import mmap
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from kvkeep.backends import header as pages
from kvkeep.backends.base import ABSENT, HEADER_BYTES, PAGE_BYTES, Item, Usage
from kvkeep.backends.breaker import State
from kvkeep.backends.guarded import Guarded, Health, Late, Log, Unavailable
from kvkeep.backends.header import Header, HeaderProblem, Verdict
from kvkeep.backends.measured import Measured
from kvkeep.errors import BackendError
from kvkeep.types import IoOutcome, Namespace, ObjectKey

INLINE_BYTES = 256 << 10  # hashing this much takes the loop some tens of microseconds
DELETE_WAIT_S = 0.5  # a reader does not wait longer than this for the removal of a broken object
PAGES_AT_ONCE = 64
SAID_A_MINUTE = 10  # lines about broken objects

T = TypeVar("T")
Digest = Callable[[], list[bytes]]
Offload = Callable[[Digest], Awaitable[list[bytes]]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object to move. `payload` starts at a page and has whole pages; it stays the caller's."""

    space: Namespace
    key: ObjectKey
    payload: memoryview
    length: int  # exact bytes of the object
    depth: int = 0


class HeaderPages:
    """Page-aligned memory for headers, used again and again."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """One page, with no header in it."""
        if not self._free:
            block = memoryview(mmap.mmap(-1, PAGES_AT_ONCE * HEADER_BYTES))
            starts = range(0, len(block), HEADER_BYTES)
            self._free.extend(block[start : start + HEADER_BYTES] for start in starts)
        page = self._free.pop()
        page[: len(pages.MAGIC)] = bytes(len(pages.MAGIC))  # an earlier header must not be found
        return page

    def give_back(self, items: Iterable[Item]) -> None:
        """The pages of these items; nobody touches them any more."""
        self._free.extend(item.header for item in items)


class Store:
    """One L2, verified. `offload` runs a checksum elsewhere; the default is the loop's threads."""

    def __init__(
        self,
        backend: Measured,
        *,
        guard: Guarded,
        offload: Offload | None = None,
        wall: Callable[[], float] = time.time,
        log: Log | None = None,
    ) -> None:
        self._log = log
        self._said_s: deque[float] = deque(maxlen=SAID_A_MINUTE)
        self._backend = backend
        self._guard = guard
        self._offload = offload or _in_thread
        self._wall = wall
        self._pages = HeaderPages()
        self._broken: Counter[str] = Counter()
        self._last_error = ""
        self._removals: set[asyncio.Task[None]] = set()
        self.name = backend.name
        self.url = backend.url

    async def open(self) -> None:
        """Raises BackendError, naming the place and the fix."""
        try:
            await self._backend.open()
        except OSError as error:
            raise self._named(error) from error

    async def close(self) -> None:
        """End; what hangs is left behind."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=DELETE_WAIT_S)
        try:
            await self._backend.close()
        except (OSError, BackendError) as error:
            self._last_error = str(error)

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        """Which objects are there; all False when L2 cannot say. Never raises."""
        try:
            answer = self._backend.contains(space, keys)
        except (OSError, BackendError) as error:
            self._last_error = str(error)
            return [False] * len(keys)
        return self._later(answer, len(keys)) if isinstance(answer, Awaitable) else answer

    async def _later(self, answer: Awaitable[Sequence[bool]], asked: int) -> Sequence[bool]:
        try:
            return await answer
        except (OSError, BackendError) as error:
            self._last_error = str(error)
            return [False] * asked

    async def get(self, wanted: Sequence[Wanted]) -> Sequence[IoOutcome]:
        """Fill the payloads. Only an OK's memory holds the object; other memory may be written.

        Raises Late, and then no payload may be used again before `settled` is done.
        """
        items = [self._item(one) for one in wanted]
        sizes = await self._called(self._backend.get(items), items)
        if isinstance(sizes, IoOutcome):
            return [sizes] * len(items)
        verdicts = [_verdict(item, size) for item, size in zip(items, sizes, strict=True)]
        self._pages.give_back(items)
        await self._check_payloads(items, verdicts)
        await self._remove_broken(items, verdicts)
        return [found.outcome for found in verdicts]

    async def put(self, wanted: Sequence[Wanted]) -> Sequence[IoOutcome]:
        """Store the payloads, replacing what is there. The memory must not change meanwhile.

        Raises Late, and then no payload may be used again before `settled` is done.
        """
        if self.health().state is not State.CLOSED:
            self._backend.meter.add("put", "refused", len(wanted))
            return [IoOutcome.REFUSED] * len(wanted)  # without hashing it all for nothing
        digests = await self._digests([one.payload[: one.length] for one in wanted])
        items = [self._item(one) for one in wanted]
        for item, digest in zip(items, digests, strict=True):
            self._fill(item, digest)
        outcomes = await self._called(self._backend.put(items), items)
        if isinstance(outcomes, IoOutcome):
            return [outcomes] * len(items)
        self._pages.give_back(items)
        return outcomes

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        """Nobody finds these any more. Raises BackendError."""
        try:
            await self._backend.delete(space, keys, broken=broken)
        except OSError as error:
            raise self._named(error) from error

    async def forget(self, space: Namespace) -> None:
        """Nobody finds anything of this fingerprint any more. Raises BackendError."""
        try:
            await self._backend.forget(space)
        except OSError as error:
            raise self._named(error) from error

    def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        """Every object, for a scrub. Raises OSError or BackendError on the way."""
        return self._backend.names()

    def usage(self) -> Usage:
        """What it holds now; immediate."""
        return self._backend.usage()

    def health(self) -> Health:
        """How it is doing; immediate."""
        return self._guard.health()

    def status(self) -> dict[str, Any]:
        """For `kvkeep status`, readiness and metrics."""
        health, usage = self.health(), self.usage()
        return {
            "name": self.name,
            "url": self.url,
            "state": health.state.value,
            "why": health.why,
            "stuck": health.stuck,
            "failures_in_row": health.failures_in_row,
            "retry_in_s": round(health.retry_in_s, 3),
            "objects": usage.objects,
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "scanned": usage.scanned,
            "evicted": usage.evicted_objects,
            "quarantined": usage.quarantined_objects,
            "corrupt": {str(problem): count for problem, count in sorted(self._broken.items())},
            "operations": self._backend.meter.as_dict(),
            "read_only": usage.read_only,
            "last_error": self._last_error or usage.last_error,
        }

    # ---- parts of get and put

    def _item(self, wanted: Wanted) -> Item:
        assert 0 < wanted.length <= len(wanted.payload)
        assert len(wanted.payload) % PAGE_BYTES == 0
        return Item(
            space=wanted.space,
            key=wanted.key,
            header=self._pages.take(),
            payload=wanted.payload,
            length=wanted.length,
            depth=wanted.depth,
        )

    def _fill(self, item: Item, digest: bytes) -> None:
        header = Header(
            fingerprint=item.space.fingerprint,
            salt_digest=pages.salt_digest(item.space.salt),
            key=item.key,
            length=item.length,
            checksum=digest,
            depth=item.depth,
            model=item.space.model,
            created_s=self._wall(),
        )
        pages.encode(item.header, header)

    async def _called(
        self, call: Awaitable[Sequence[T]], items: Sequence[Item]
    ) -> Sequence[T] | IoOutcome:
        """The answer for each item, or one outcome for all; header pages are back unless answered.

        Cancelled, it gives none back: the I/O may still run, and only it knows for how long.
        """
        try:
            answer = await call
        except Late as late:
            self._last_error = str(late)
            late.settled.add_done_callback(lambda _: self._pages.give_back(items))
            raise
        except Unavailable:
            self._pages.give_back(items)
            return IoOutcome.REFUSED
        except (OSError, BackendError) as error:
            self._last_error = str(error)
            self._pages.give_back(items)
            return IoOutcome.ERROR
        if len(answer) != len(items):
            self._last_error = f"{self.name} gave {len(answer)} answers for {len(items)} objects"
            self._pages.give_back(items)
            return IoOutcome.ERROR
        return answer

    async def _check_payloads(self, items: Sequence[Item], verdicts: list[Verdict]) -> None:
        """Where the header is right, the payload must have its checksum."""
        sound = [n for n, found in enumerate(verdicts) if found.header is not None]
        digests = await self._digests([items[n].payload[: items[n].length] for n in sound])
        for n, digest in zip(sound, digests, strict=True):
            header = verdicts[n].header
            if header is None or digest != header.checksum:
                problem = HeaderProblem.PAYLOAD_CHECKSUM
                verdicts[n] = Verdict(problem.outcome, problem)

    async def _remove_broken(self, items: Sequence[Item], verdicts: Sequence[Verdict]) -> None:
        """Count what is broken and take it away, so that the next store is not told it is there."""
        broken: dict[Namespace, list[ObjectKey]] = {}
        for item, found in zip(items, verdicts, strict=True):
            if found.problem is not None:
                self._broken[found.problem] += 1
                self._say_broken(item, found.problem)
                broken.setdefault(item.space, []).append(item.key)
        started = [asyncio.create_task(self._remove(space, keys)) for space, keys in broken.items()]
        if started:
            self._removals.update(started)
            await asyncio.wait(started, timeout=DELETE_WAIT_S)

    def _say_broken(self, item: Item, problem: HeaderProblem) -> None:
        """One line for each, but not a flood: the counter has them all."""
        now_s = self._wall()
        many = len(self._said_s) == SAID_A_MINUTE and now_s - self._said_s[0] < 60.0
        if self._log is not None and not many:
            self._said_s.append(now_s)
            name = f"{pages.label(item.space)}/{pages.file_stem(item.key)}"
            self._log("l2_corrupt", level="warning", backend=self.name, object=name, why=problem)

    async def _remove(self, space: Namespace, keys: Sequence[ObjectKey]) -> None:
        try:
            await self._backend.delete(space, keys, broken=True)
        except (OSError, BackendError) as error:
            self._last_error = str(error)
        finally:
            self._removals.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _digests(self, payloads: Sequence[memoryview]) -> list[bytes]:
        if sum(map(len, payloads)) <= INLINE_BYTES:
            return _hash_all(payloads)
        results = await asyncio.gather(
            *(self._offload(partial(_hash_all, part)) for part in _parts(payloads))
        )
        return [digest for part in results for digest in part]

    def _named(self, error: OSError) -> BackendError:
        self._last_error = str(error)
        return BackendError(f"{self.name} ({self.url}): {error}")


def _verdict(item: Item, size: int) -> Verdict:
    if size == ABSENT:
        return Verdict(IoOutcome.MISSING)
    return pages.verdict(item.header, item.space, item.key, length=item.length, size=size)


def _hash_all(payloads: Sequence[memoryview]) -> list[bytes]:
    return [pages.checksum(payload) for payload in payloads]


def _parts(payloads: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """The payloads in order, in parts that are worth a job of their own."""
    part: list[memoryview] = []
    size_bytes = 0
    for payload in payloads:
        part.append(payload)
        size_bytes += len(payload)
        if size_bytes >= INLINE_BYTES:
            yield part
            part, size_bytes = [], 0
    if part:
        yield part


async def _in_thread(job: Digest) -> list[bytes]:
    return await asyncio.get_running_loop().run_in_executor(None, job)
