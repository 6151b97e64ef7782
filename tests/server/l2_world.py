"""A service whose L2 are faulty backends under real stores, on a loop without waiting."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from itertools import count
from typing import Any

import msgspec

from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.registry import compose
from kvkeep.core.audit import check
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.keys import extend_chain
from kvkeep.server.io import Io
from kvkeep.server.service import Service
from kvkeep.testing import virtual_loop
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Switched
from kvkeep.types import (
    ChunkHash,
    Epoch,
    GroupKind,
    PeerId,
    Role,
    RowSpec,
)
from kvkeep.wire import messages as m

PAGES = 64
PAGE = 4096
BYTES = 5_000  # of one object: two pages
ROOT = ChunkHash(bytes(32))
PATIENCE_S = 20.0
QUICK = GuardSettings(get_timeout_s=0.05, put_timeout_s=0.05, lookup_timeout_s=0.05)
NEVER = Fault(Kind.NEVER)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run on a loop whose time passes only when nobody has anything to do: no waiting, no luck."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        virtual_loop.run(test(*args, **kwargs))

    return run


class Link:
    """What one connection is sent; `next` waits for it."""

    def __init__(self) -> None:
        self.sent: list[m.ServerMessage] = []
        self._came = asyncio.Event()

    def send(self, message: m.ServerMessage) -> None:
        self.sent.append(message)
        self._came.set()

    async def next(self, kind: type[Any] | tuple[type[Any], ...], ticket: int | None = None) -> Any:
        """The oldest message of this type (and of this lookup), taken out."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for message in self.sent:
                    if isinstance(message, kind) and ticket in (None, ticket_of(message)):
                        self.sent.remove(message)
                        return message
                self._came.clear()
                await self._came.wait()


class World:
    """A service whose L2 are faulty backends, and an arena that is really written."""

    def __init__(
        self, backends: list[FaultyBackend], limits: Limits, settings: GuardSettings
    ) -> None:
        ids = count(1)
        self.lines: list[tuple[str, dict[str, object]]] = []
        self.arena = memoryview(bytearray(PAGES * PAGE))
        clock = asyncio.get_running_loop().time
        stores = [compose(raw, settings=settings, log=self.log) for raw in backends]
        self.io = Io(stores, self.arena, clock=clock, log=self.log)
        limits = msgspec.structs.replace(limits, backends=len(backends))
        self.directory = Directory([0] * 256, new_id=lambda: next(ids), limits=limits)
        self.service = Service(
            self.directory,
            epoch=Epoch(1),
            capacity_bytes=PAGES * PAGE,
            clock=clock,
            log=self.log,
            io=self.io,
            later=asyncio.get_running_loop().call_soon,
        )
        self.service.grown(PAGES * PAGE)
        self.seq = count(1)

    def log(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))

    def join(
        self, session: str, role: Role = Role.BOTH, versions: tuple[int, ...] = m.VERSIONS
    ) -> tuple[PeerId, Link]:
        link = Link()
        rows = () if role is Role.OPERATOR else (RowSpec(0, GroupKind.FULL_ATTENTION, BYTES),)
        hello = m.Hello(versions, session, role, rows=rows, fingerprint=bytes(range(32)))
        welcome = self.service.hello(hello, link, pid=1)
        assert isinstance(welcome, m.Welcome)
        return PeerId(welcome.peer), link

    def tell(self, who: tuple[PeerId, Link], message: m.ClientMessage) -> None:
        self.service.receive(who[0], message)

    async def ask(self, who: tuple[PeerId, Link], kind: type[Any], make: Callable[..., Any]) -> Any:
        """Send the message that `make` gives for a seq; the answer."""
        message = make(next(self.seq))
        self.tell(who, message)
        answer = await who[1].next(kind)
        assert answer.seq == message.seq
        return answer

    async def store(self, who: tuple[PeerId, Link], keys: list[ChunkHash]) -> None:
        """Each chunk's bytes are its own hash, repeated."""
        item = m.StageItem("w", ROOT, b"".join(keys))
        granted = await self.ask(who, m.Granted, lambda seq: m.Stage(seq, (item,)))
        offsets = memoryview(granted.columns[0].offsets).cast("Q")
        for key, offset in zip(keys, offsets, strict=True):
            self.arena[offset : offset + BYTES] = content(key)
        done = await self.ask(who, m.Committed, lambda seq: m.Commit(seq, granted.leases))
        assert done.outcomes == bytes(len(keys))

    async def persisted(self, operator: tuple[PeerId, Link]) -> dict[str, Any]:
        answer = await self.ask(operator, m.Answer, lambda n: m.Query(n, "wait_persisted", "15"))
        body: dict[str, Any] = msgspec.json.decode(answer.body)
        return body

    async def find(
        self, who: tuple[PeerId, Link], keys: list[ChunkHash], wait_ms: float = 15_000.0
    ) -> m.Found | m.Resolved:
        """The final answer of a lookup, checked against the arena's bytes."""
        lookup = m.Lookup(next(self.seq), "r", b"".join(keys), wait_ms=wait_ms)
        self.tell(who, lookup)
        first = await who[1].next((m.Found, m.Pending))
        found: m.Found | m.Resolved = first
        if isinstance(first, m.Pending):
            found = await who[1].next(m.Resolved, first.ticket)
        for column in found.columns:
            for key, offset in zip(keys, memoryview(column.offsets).cast("Q"), strict=False):
                assert self.arena[offset : offset + BYTES] == content(key)
        return found

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                await asyncio.sleep(0.001)


def ticket_of(message: m.ServerMessage) -> int | None:
    return message.ticket if isinstance(message, m.Resolved) else None


def content(key: ChunkHash) -> bytes:
    return (key * (BYTES // 32 + 1))[:BYTES]


def chunks(number: int, first: int = 0) -> list[ChunkHash]:
    return extend_chain(ROOT, range(first, first + number * 256), 256)


@asynccontextmanager
async def world(
    *backends: FaultyBackend, settings: GuardSettings | None = None, **limits: Any
) -> AsyncIterator[World]:
    """Opened; at the end nothing is under way and the core is sound."""
    made = World(list(backends), Limits(**limits), settings or GuardSettings())
    await made.io.open()
    yield made
    for raw in backends:
        raw.plan = Switched()
        raw.unstick()
    await made.until(lambda: not made.directory.fetcher.flights.fetches)
    await made.io.close()
    check(made.directory)
    assert [line for line in made.lines if line[0] == "io_broken"] == []


async def filled(w: World) -> tuple[tuple[PeerId, Link], list[ChunkHash]]:
    """Three chunks that are in L2 and in L1 no more."""
    engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
    keys = chunks(3)
    await w.store(engine, keys)
    assert (await w.persisted(operator))["done"]
    await w.ask(operator, m.Answer, lambda seq: m.Query(seq, "clear"))
    return engine, keys
