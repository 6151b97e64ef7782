"""What a backend was asked and how it answered: operations, bytes and seconds.

Counts are per object and outcome as the backend sees it; what the checks later find wrong in the
bytes is the store's to count. Time is per call, in a few fixed buckets. All of it is read as plain
dicts, by `/metrics` and by `kvkeep status`.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvkeep.backends.base import ABSENT, Backend, Item, Usage
from kvkeep.backends.guarded import Late, Unavailable
from kvkeep.errors import BackendError
from kvkeep.types import IoOutcome, Namespace, ObjectKey

BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # and above the last


@dataclass(slots=True)
class Seconds:
    """A histogram of how long calls took."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One more call."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def as_dict(self) -> dict[str, Any]:
        """Calls up to each bound (cumulative, as Prometheus has it), their number and sum."""
        up_to, running = {}, 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            running += count
            up_to[bound] = running
        return {"buckets": up_to, "count": running, "sum_s": self.total_s}


class Meter:
    """The counts of one backend."""

    def __init__(self) -> None:
        self.objects: Counter[tuple[str, str]] = Counter()  # (operation, outcome)
        self.moved_bytes: Counter[str] = Counter()
        self.seconds: dict[str, Seconds] = {}

    def add(self, operation: str, outcome: str, count: int = 1) -> None:
        """So many objects of an operation ended like this."""
        if count:
            self.objects[operation, outcome] += count

    def took(self, operation: str, seconds: float) -> None:
        """One call ended after so long."""
        self.seconds.setdefault(operation, Seconds()).add(seconds)

    @contextmanager
    def failures(self, operation: str, objects: int) -> Iterator[None]:
        """When the call raises, all its objects have that outcome."""
        try:
            yield
        except Unavailable:
            self.add(operation, "refused", objects)
            raise
        except Late:
            self.add(operation, "timeout", objects)
            raise
        except (OSError, BackendError):
            self.add(operation, "error", objects)
            raise

    @contextmanager
    def call(self, operation: str, objects: int) -> Iterator[None]:
        """One call from begin to end: its time, and its failure."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            with self.failures(operation, objects):
                yield
        finally:
            self.took(operation, loop.time() - started_s)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """{operation: {"outcomes": {outcome: objects}, "bytes": n, "seconds": {...}}}."""
        result: dict[str, dict[str, Any]] = {}
        for operation in sorted({operation for operation, _ in self.objects} | set(self.seconds)):
            outcomes = {
                outcome: count
                for (of, outcome), count in sorted(self.objects.items())
                if of == operation
            }
            result[operation] = {
                "outcomes": outcomes,
                "bytes": self.moved_bytes[operation],
                "seconds": self.seconds.get(operation, Seconds()).as_dict(),
            }
        return result


class Measured:
    """A backend that counts what passes through to another."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = inner.name
        self.url = inner.url
        self.meter = Meter()

    async def open(self) -> None:
        """Not measured."""
        await self._inner.open()

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        """Count found and missing."""
        with self.meter.failures("contains", len(keys)):
            answer = self._inner.contains(space, keys)
        if isinstance(answer, Awaitable):
            return self._later(answer, len(keys))
        self.meter.took("contains", 0.0)  # from memory, and on the loop: nothing to wait for
        self._found(answer)
        return answer

    async def _later(self, answer: Awaitable[Sequence[bool]], asked: int) -> Sequence[bool]:
        with self.meter.call("contains", asked):
            found = await answer
        self._found(found)
        return found

    def _found(self, answer: Sequence[bool]) -> None:
        found = sum(answer)
        self.meter.add("contains", "found", found)
        self.meter.add("contains", "missing", len(answer) - found)

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        """Count ok, missing, and objects of another length than asked."""
        with self.meter.call("get", len(items)):
            sizes = await self._inner.get(items)
        for item, size in zip(items, sizes, strict=False):
            if size == item.length:
                self.meter.add("get", "ok")
                self.meter.moved_bytes["get"] += size
            else:
                self.meter.add("get", "missing" if size == ABSENT else "other_length")
        return sizes

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        """Count each outcome."""
        with self.meter.call("put", len(items)):
            outcomes = await self._inner.put(items)
        for item, outcome in zip(items, outcomes, strict=False):
            self.meter.add("put", outcome.name.lower())
            if outcome is IoOutcome.OK:
                self.meter.moved_bytes["put"] += item.length
        return outcomes

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        """Count, broken ones apart."""
        operation = "delete_broken" if broken else "delete"
        with self.meter.call(operation, len(keys)):
            await self._inner.delete(space, keys, broken=broken)
        self.meter.add(operation, "ok", len(keys))

    async def forget(self, space: Namespace) -> None:
        """Count."""
        with self.meter.call("forget", 1):
            await self._inner.forget(space)
        self.meter.add("forget", "ok")

    def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        """Not measured."""
        return self._inner.names()

    async def probe(self) -> None:
        """Count."""
        with self.meter.call("probe", 1):
            await self._inner.probe()
        self.meter.add("probe", "ok")

    def usage(self) -> Usage:
        """Not measured."""
        return self._inner.usage()

    async def close(self) -> None:
        """Not measured."""
        await self._inner.close()
