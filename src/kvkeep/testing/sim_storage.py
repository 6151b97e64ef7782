"""The L2 of a simulated world: storage that outlives servers, and one server's way into it.

A `Disk` is an in-memory backend with misfortune; it keeps its objects when a server is killed. A
`Mount` is what one server epoch has of it: when that server dies, each object that was being
stored is there entirely or not at all, and nothing touches memory for it any more. At the moment
when bytes move, the mount asks the model whether that memory may be touched.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from kvkeep.backends.base import ABSENT, Item, Usage
from kvkeep.backends.header import fingerprint_label, label
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Name, flipped
from kvkeep.testing.model import Memory, content
from kvkeep.testing.sim_l2_knobs import L2Knobs
from kvkeep.types import ChunkHash, IoOutcome, Namespace, ObjectKey

_BITS = 1 << 20
_ANY = (Kind.ERROR, Kind.DENIED, Kind.SLOW, Kind.NEVER)
_SPOILT = (Kind.MISSING, Kind.SHORT, Kind.LONG, Kind.FLIPPED, Kind.OTHER_KEY)
# Of the share that fails: a failed put pauses the persists for long; some calls are rare.
_HARDER = {"get": 2.0, "put": 0.25, "probe": 1.5, "forget": 1.0, "delete": 0.7}
_KINDS = {  # what may go wrong with a call
    "contains": (*_ANY, Kind.MISSING),
    "get": (*_ANY, *_SPOILT),
    "put": (*_ANY, *_SPOILT, Kind.FULL, Kind.REFUSE),
    "delete": _ANY,
    "forget": _ANY,
    "probe": _ANY,
}
OUTAGES = (Kind.ERROR, Kind.DENIED, Kind.SLOW)  # of everything, for a while
_AT_REST = ("flipped", "short", "header", "other_key")
_LATEST_S = 1.0  # a dead server's write lands this long after its death at most
KNOWN = (  # each as `operation word`, to see that all of them are met
    *(f"{operation} {kind.value}" for operation, kinds in _KINDS.items() for kind in kinds),
    *(f"{operation} late" for operation in _KINDS),
    "put after_close",
    *(f"outage {kind.value}" for kind in OUTAGES),
    *(f"at_rest {word}" for word in _AT_REST),
)


class Misfortune:
    """The plan of one disk: single failures, and outages until `calm`."""

    def __init__(self, rng: random.Random, knobs: L2Knobs) -> None:
        self.outage: Fault | None = None  # what every call does now
        self.calm = False
        self.struck: Counter[str] = Counter()  # each of `KNOWN`
        self._rng = rng
        self._knobs = knobs
        self._stuck = 0

    def next(self, operation: str) -> Fault | None:
        """The fault of the call that begins now."""
        if self.calm:
            return self._latency(operation)
        if self.outage is not None:
            self.struck[f"outage {self.outage.kind.value}"] += 1
            return self.outage
        return self._single(operation) or self._latency(operation)

    def _latency(self, operation: str) -> Fault | None:
        """How long it takes when all is well."""
        knobs = self._knobs
        if not knobs.latency_s or (operation == "contains" and not knobs.later):
            return None
        return Fault(Kind.SLOW, delay_s=self._rng.random() * knobs.latency_s)

    def _single(self, operation: str) -> Fault | None:
        rng, knobs = self._rng, self._knobs
        share = knobs.share * _HARDER.get(operation, 0.5)
        if rng.random() >= share:
            return None
        kinds = [kind for kind in _KINDS.get(operation, ()) if kind in knobs.kinds]
        if not kinds:
            return None
        kind = rng.choice(kinds)
        if kind is Kind.NEVER:
            if self._stuck >= knobs.most_stuck:
                return None
            self._stuck += 1
        guard = knobs.guard
        limits_s = {"contains": guard.lookup_timeout_s, "get": guard.get_timeout_s}
        limit_s = limits_s.get(operation, guard.put_timeout_s)
        delay_s = limit_s * rng.choice((0.5, 0.5, 1.5, 4.0))
        late = kind is Kind.SLOW and delay_s > limit_s
        self.struck[f"{operation} {'late' if late else kind.value}"] += 1
        return Fault(kind, delay_s=delay_s, place=rng.randrange(_BITS))


class Disk:
    """One L2 of the world."""

    def __init__(self, rng: random.Random, knobs: L2Knobs, name: str) -> None:
        self.plan = Misfortune(rng, knobs)
        self.backend = FaultyBackend(
            self.plan, name=name, capacity_bytes=knobs.capacity_bytes, later=knobs.later
        )
        self.since_s: dict[Name, float] = {}  # when an object's chunk became resident in L1
        self._rng = rng

    def calm(self) -> None:
        """Nothing goes wrong any more, and there is room; what hangs goes on hanging."""
        self.plan.calm = True
        self.backend._capacity_bytes = None

    def fill_up(self) -> None:
        """No room for anything more, so that every chunk stays in L1."""
        self.backend._capacity_bytes = 0

    def damage(self) -> None:
        """Bytes at rest change, or one object is where another should be."""
        objects, rng = self.backend.objects, self._rng
        if not objects:
            return
        name = rng.choice(list(objects))
        header, payload = objects[name]
        if not payload:
            return
        what = rng.randrange(len(_AT_REST))
        self.plan.struck[f"at_rest {_AT_REST[what]}"] += 1
        match what:
            case 0:
                objects[name] = header, flipped(payload, rng.randrange(_BITS))
            case 1:
                objects[name] = header, payload[: rng.randrange(len(payload))]
            case 2:
                objects[name] = flipped(header, rng.randrange(_BITS)), payload
            case _:
                objects[name] = objects[rng.choice(list(objects))]

    def store(self, item: Item, *, later_s: float = 0.0) -> None:
        """What a server that is gone had begun to write is there, now or in a while."""
        name = (label(item.space), item.key)
        pair = bytes(item.header), bytes(item.payload[: item.length])

        def land() -> None:
            self.backend.objects[name] = pair
            self.since_s.pop(name, None)  # also when a later Forget took it away: nobody can help

        if later_s:
            self.plan.struck["put after_close"] += 1
            asyncio.get_running_loop().call_later(later_s, land)
        else:
            self.backend.objects[name] = pair

    def stored_before(self, space: Namespace, when_s: float) -> list[Name]:
        """Objects of a fingerprint whose chunk is older than that."""
        first = fingerprint_label(space)
        return [
            name
            for name in self.backend.objects
            if name[0].partition("-")[0] == first and self.since_s.get(name, when_s) < when_s
        ]


class Mount:
    """One server epoch's raw backend."""

    def __init__(self, disk: Disk, memory: Memory, fail: Callable[[BaseException], None]) -> None:
        self.disk = disk
        self.name = disk.backend.name
        self.url = disk.backend.url
        self.dead = False
        self._memory = memory
        self._fail = fail
        self._under_way: dict[asyncio.Task[object], tuple[str, Sequence[Item]]] = {}

    def chunks_under_way(self, operation: str) -> list[ChunkHash]:
        """Whose bytes such calls still touch; each chunk once per call."""
        calls = self._under_way.values()
        return [items[0].key.chunk for what, items in calls if what == operation]

    def die(self, rng: random.Random) -> None:
        """The server is gone: each object it was storing is there, or not, or lands later."""
        self.dead = True
        for task, (what, items) in list(self._under_way.items()):
            for item in items if what == "put" else ():
                lands = rng.random()
                if lands < 0.7:
                    self.disk.store(item, later_s=_LATEST_S * rng.random() if lands < 0.4 else 0.0)
            task.cancel()

    @contextmanager
    def _call(self, what: str, items: Sequence[Item]) -> Iterator[None]:
        self._alive()
        task = asyncio.current_task()
        assert task is not None
        self._under_way[task] = what, items
        try:
            yield
        finally:
            del self._under_way[task]

    def _alive(self) -> None:
        if self.dead:
            raise OSError("the server of this mount is gone")

    # ---- the backend

    async def open(self) -> None:
        await self.disk.backend.open()

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        self._alive()
        return self.disk.backend.contains(space, keys)

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        with self._call("get", items):
            sizes = await self.disk.backend.get(items)
        model = self._memory.model
        if model is not None:
            with self._judged():
                flight = model.l2.filled(items[0].key.chunk)
                forgotten_s = model.l2.forgotten_s.get(flight.fingerprint, 0.0)
                if not flight.doomed:
                    read = [i for i, size in zip(items, sizes, strict=True) if size != ABSENT]
                    self._not_forgotten(read, forgotten_s)
        return sizes

    def _not_forgotten(self, items: Sequence[Item], forgotten_s: float) -> None:
        """What a lookup after a Forget finds was stored after it."""
        for item in items:
            name = (label(item.space), item.key)
            since_s = self.disk.since_s.get(name, forgotten_s)
            assert since_s >= forgotten_s, "what was forgotten is fetched"

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        with self._call("put", items):
            outcomes = await self.disk.backend.put(items)
        model = self._memory.model
        for item, outcome in zip(items, outcomes, strict=True):
            key = item.key
            right = content(key.chunk, key.rank, key.group, item.length)
            with self._judged():
                assert item.payload[: item.length] == right, "wrong bytes go to L2"
            if model is not None and outcome is IoOutcome.OK:
                since_s = model.l2.resident_since_s.get(key.chunk, 0.0)
                self.disk.since_s[label(item.space), key] = since_s
        return outcomes

    @contextmanager
    def _judged(self) -> Iterator[None]:
        """A failure here would be taken for the backend's own."""
        try:
            yield
        except AssertionError as error:
            self._fail(error)

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        with self._call("delete", ()):
            await self.disk.backend.delete(space, keys, broken=broken)

    async def forget(self, space: Namespace) -> None:
        with self._call("forget", ()):
            await self.disk.backend.forget(space)

    def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        return self.disk.backend.names()

    async def probe(self) -> None:
        with self._call("probe", ()):
            await self.disk.backend.probe()

    def usage(self) -> Usage:
        return self.disk.backend.usage()

    async def close(self) -> None:
        pass
