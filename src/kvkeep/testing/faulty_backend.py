"""An L2 in memory that fails on demand, on any event loop.

Every call asks a plan for its fault. Without one the backend keeps its contract, so what a test
sees beside the faults is sound. A fault on `get` changes what this one read sees, a fault on `put`
what is stored. A call that is slow touches the caller's memory only at its end: memory that was
taken away too early is noticed. Nothing but the loop is used, so a simulation may run it.
"""

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Protocol

from kvkeep.backends.base import ABSENT, Item, Usage
from kvkeep.backends.header import fingerprint_label, label
from kvkeep.errors import BackendError
from kvkeep.types import IoOutcome, Namespace, ObjectKey

Name = tuple[str, ObjectKey]


class Kind(Enum):
    """What goes wrong with one call."""

    ERROR = "error"  # OSError
    DENIED = "denied"  # OSError: the permission is lost
    REFUSE = "refuse"  # BackendError; a put answers REFUSED
    FULL = "full"  # puts only
    MISSING = "missing"  # get: gone though listed; put: lost though answered
    SHORT = "short"  # cut
    LONG = "long"  # grown
    FLIPPED = "flipped"  # one bit of the payload
    OTHER_KEY = "other_key"  # another object's header and bytes
    NEVER = "never"  # does not return before `unstick`
    SLOW = "slow"  # returns after `delay_s`, which may be past any deadline
    AFTER_CLOSE = "after_close"  # does not return before `close` or `unstick`, then does its work


HANGS = frozenset((Kind.NEVER, Kind.AFTER_CLOSE))


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong."""

    kind: Kind
    delay_s: float = 0.0
    place: int = 0  # which bit, or by how many bytes; taken modulo what there is


class Plan(Protocol):
    """Decides which call fails. Operations are named as the backend's methods."""

    def next(self, operation: str) -> Fault | None:
        """The fault of the call that begins now."""


class NoFaults:
    """Everything works."""

    def next(self, operation: str) -> Fault | None:
        """None."""
        return None


class Nth:
    """The call number `n` (from 1) fails, or it and every later one."""

    def __init__(
        self, n: int, fault: Fault, *, operation: str | None = None, for_ever: bool = False
    ) -> None:
        self._n = n
        self._fault = fault
        self._operation = operation
        self._for_ever = for_ever
        self.seen = 0

    def next(self, operation: str) -> Fault | None:
        """The fault, when it is this call's turn."""
        if self._operation not in (None, operation):
            return None
        self.seen += 1
        hit = self.seen >= self._n if self._for_ever else self.seen == self._n
        return self._fault if hit else None


class Switched:
    """Fails while `fault` is set: for everything, or for the one operation."""

    def __init__(self, fault: Fault | None = None, *, operation: str | None = None) -> None:
        self.fault = fault
        self.operation = operation

    def next(self, operation: str) -> Fault | None:
        """The fault that is set now."""
        return self.fault if self.operation in (None, operation) else None


class Chance:
    """Each call fails with a chance, with one of some faults; the seed is the caller's."""

    def __init__(self, random: Random, share: float, faults: Sequence[Fault]) -> None:
        self._random = random
        self._share = share
        self._faults = faults

    def next(self, operation: str) -> Fault | None:
        """A fault or none."""
        if self._random.random() >= self._share:
            return None
        return self._random.choice(self._faults)


class FaultyBackend:
    """The backend. `objects` is what is stored: a test may look at it and change it."""

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        name: str = "faulty",
        capacity_bytes: int | None = None,
        later: bool = False,
    ) -> None:
        self.plan = plan or NoFaults()
        self.name = name
        self.url = f"{name}://"
        self.objects: dict[Name, tuple[bytes, bytes]] = {}
        self.broken: list[tuple[Name, tuple[bytes, bytes]]] = []  # deleted as broken
        self.calls: Counter[str] = Counter()
        self._later = later  # whether `contains` answers by an awaitable
        self._capacity_bytes = capacity_bytes
        self._hanging: list[asyncio.Future[None]] = []
        self._until_close: list[asyncio.Future[None]] = []  # some of them

    async def open(self) -> None:
        """Ready at once."""
        await self._begin("open")

    async def close(self) -> None:
        """What hangs goes on hanging, but for what waits for just this."""
        _let_go(self._until_close)
        await self._begin("close")

    @property
    def hanging(self) -> int:
        """Calls that do not return."""
        return sum(not future.done() for future in self._hanging)

    def unstick(self) -> None:
        """Every call that hangs goes on now and does its work."""
        _let_go(self._hanging)
        self._until_close.clear()

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        """At once, unless made to answer later or this call is slow."""
        self.calls["contains"] += 1
        fault = self.plan.next("contains")
        if self._later or (fault is not None and fault.kind in (*HANGS, Kind.SLOW)):
            return self._contains_later(space, keys, fault)
        _raise(fault, "contains")
        return self._has(space, keys, fault)

    async def _contains_later(
        self, space: Namespace, keys: Sequence[ObjectKey], fault: Fault | None
    ) -> Sequence[bool]:
        await self._wait(fault)
        _raise(fault, "contains")
        return self._has(space, keys, fault)

    def _has(
        self, space: Namespace, keys: Sequence[ObjectKey], fault: Fault | None
    ) -> Sequence[bool]:
        lost = fault is not None and fault.kind is Kind.MISSING
        return [not lost and (label(space), key) in self.objects for key in keys]

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        """A fault shows in every object of the call."""
        fault = await self._begin("get")
        return [self._read(item, fault) for item in items]

    def _read(self, item: Item, fault: Fault | None) -> int:
        name = (label(item.space), item.key)
        seen = self._changed(name, self.objects.get(name), fault)
        if seen is None:
            return ABSENT
        header, payload = seen
        item.header[:] = header
        if len(payload) == item.length:
            item.payload[: item.length] = payload
        return len(payload)

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        """A fault changes every object of the call."""
        self.calls["put"] += 1
        fault = self.plan.next("put")
        await self._wait(fault)
        if fault is not None and fault.kind in (Kind.FULL, Kind.REFUSE):
            full = fault.kind is Kind.FULL
            return [IoOutcome.FULL if full else IoOutcome.REFUSED] * len(items)
        _raise(fault, "put")
        return [self._write(item, fault) for item in items]

    def _write(self, item: Item, fault: Fault | None) -> IoOutcome:
        name = (label(item.space), item.key)
        old = self.objects.get(name)
        more_bytes = len(item.header) + item.length - (_size(old) if old else 0)
        if self._capacity_bytes is not None and self._used() + more_bytes > self._capacity_bytes:
            return IoOutcome.FULL
        new = (bytes(item.header), bytes(item.payload[: item.length]))
        stored = self._changed(name, new, fault)
        if stored is not None:
            self.objects[name] = stored
        return IoOutcome.OK

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        """Broken ones are kept in `broken`."""
        await self._begin("delete")
        for key in keys:
            gone = self.objects.pop((label(space), key), None)
            if gone is not None and broken:
                self.broken.append(((label(space), key), gone))

    async def forget(self, space: Namespace) -> None:
        """All labels that begin with the fingerprint's."""
        await self._begin("forget")
        first = fingerprint_label(space)
        gone = [name for name in self.objects if name[0].partition("-")[0] == first]
        for name in gone:
            del self.objects[name]

    async def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        """In the order of storing."""
        await self._begin("names")
        for (space, key), (_, payload) in list(self.objects.items()):
            yield space, key, len(payload)

    async def probe(self) -> None:
        """Works when its call has no fault."""
        await self._begin("probe")

    def usage(self) -> Usage:
        """Exact."""
        return Usage(
            objects=len(self.objects),
            used_bytes=self._used(),
            capacity_bytes=self._capacity_bytes,
            quarantined_objects=len(self.broken),
        )

    def _used(self) -> int:
        return sum(map(_size, self.objects.values()))

    # ---- faults

    async def _begin(self, operation: str) -> Fault | None:
        self.calls[operation] += 1
        fault = self.plan.next(operation)
        await self._wait(fault)
        _raise(fault, operation)
        return fault

    async def _wait(self, fault: Fault | None) -> None:
        """Always lets others run, as input and output does."""
        if fault is not None and fault.kind in HANGS:
            future = asyncio.get_running_loop().create_future()
            self._hanging.append(future)
            if fault.kind is Kind.AFTER_CLOSE:
                self._until_close.append(future)
            await future
        else:
            slow = fault is not None and fault.kind is Kind.SLOW
            await asyncio.sleep(fault.delay_s if fault is not None and slow else 0)

    def _changed(
        self, name: Name, stored: tuple[bytes, bytes] | None, fault: Fault | None
    ) -> tuple[bytes, bytes] | None:
        """What is seen instead of what is there."""
        if stored is None or fault is None:
            return stored
        header, payload = stored
        match fault.kind:
            case Kind.MISSING:
                return None
            case Kind.SHORT:
                return header, payload[: -1 - fault.place % len(payload)]
            case Kind.LONG:
                return header, payload + bytes(1 + fault.place % (1 << 16))
            case Kind.FLIPPED:
                return header, flipped(payload, fault.place)
            case Kind.OTHER_KEY:
                others = (pair for other, pair in self.objects.items() if other != name)
                return next(others, (bytes(len(header)), payload))
            case _:
                return stored


def flipped(data: bytes, bit: int) -> bytes:
    """The bytes with one bit changed; the place is taken modulo their length."""
    byte, low = divmod(bit % (8 * len(data)), 8)
    changed = bytearray(data)
    changed[byte] ^= 1 << low
    return bytes(changed)


def _let_go(hanging: list[asyncio.Future[None]]) -> None:
    for future in hanging:
        if not future.done():
            future.set_result(None)
    hanging.clear()


def _size(stored: tuple[bytes, bytes]) -> int:
    return len(stored[0]) + len(stored[1])


def _raise(fault: Fault | None, operation: str) -> None:
    if fault is not None and fault.kind is Kind.ERROR:
        raise OSError(errno.EIO, f"{operation} fails on demand")
    if fault is not None and fault.kind is Kind.DENIED:
        raise PermissionError(errno.EACCES, f"{operation} is not permitted any more")
    if fault is not None and fault.kind is Kind.REFUSE:
        raise BackendError(f"{operation} is refused on demand")
