"""Effects become calls of stores, and their ends events; with real stores over a faulty backend."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from itertools import count
from typing import Any

import msgspec
import pytest

from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.header import label
from kvkeep.backends.registry import compose
from kvkeep.core.audit import check
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.keys import extend_chain
from kvkeep.server.io import Io
from kvkeep.server.service import Service
from kvkeep.testing import virtual_loop
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Nth, Switched
from kvkeep.types import (
    ChunkHash,
    EndOutcome,
    Epoch,
    GroupKind,
    PeerId,
    Reason,
    Role,
    RowSpec,
    SlotState,
    StorePolicy,
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

    async def next(self, kind: type[Any], ticket: int | None = None) -> Any:
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
        )
        self.service.grown(PAGES * PAGE)
        self.seq = count(1)

    def log(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))

    def join(self, session: str, role: Role = Role.BOTH) -> tuple[PeerId, Link]:
        link = Link()
        rows = () if role is Role.OPERATOR else (RowSpec(0, GroupKind.FULL_ATTENTION, BYTES),)
        hello = m.Hello(m.VERSIONS, session, role, rows=rows, fingerprint=bytes(range(32)))
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
        first = await who[1].next(m.Found | m.Pending)
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


@pytest.mark.parametrize("later", [False, True])
@virtual
async def test_what_is_stored_comes_back_from_l2(later: bool) -> None:
    async with world(FaultyBackend(later=later)) as w:
        engine, keys = await filled(w)
        found = await w.find(engine, [*keys, ChunkHash(b"?" * 32)])
        assert (found.chunks, found.tiers) == (3, b"\1\1\1")
        assert found.reasons == bytes([Reason.L2_MISS])
        assert (await w.find(engine, keys)).tiers in (b"", b"\0\0\0")


@virtual
async def test_an_answer_at_once_needs_no_push() -> None:
    """Where the question is answered from memory and L2 has nothing, Found is the reply."""
    async with world(FaultyBackend()) as w:
        engine = w.join("s")
        found = await w.find(engine, chunks(2))
        assert isinstance(found, m.Found)
        assert found.reasons == bytes([Reason.L2_MISS] * 2)


@virtual
async def test_a_missing_chunk_is_answered_later_when_the_question_takes_time() -> None:
    async with world(FaultyBackend(later=True)) as w:
        found = await w.find(w.join("s"), chunks(1))
        assert isinstance(found, m.Resolved)
        assert found.reasons == bytes([Reason.L2_MISS])


@virtual
async def test_a_question_that_hangs_is_given_up() -> None:
    raw = FaultyBackend()
    async with world(raw, settings=QUICK) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(NEVER, operation="contains")
        found = await w.find(engine, keys)
        assert found.chunks == 0
        assert len(found.reasons) == 3


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Kind.MISSING, Reason.L2_MISS),
        (Kind.FLIPPED, Reason.CORRUPT),
        (Kind.OTHER_KEY, Reason.CORRUPT),
        (Kind.ERROR, Reason.L2_ERROR),
        (Kind.REFUSE, Reason.L2_ERROR),
    ],
)
@virtual
async def test_a_get_that_fails(kind: Kind, reason: Reason) -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Nth(2, Fault(kind, place=77), operation="get")
        found = await w.find(engine, keys)
        assert (found.chunks, found.reasons[:1]) == (1, bytes([reason]))
        again = await w.find(engine, keys)
        assert again.chunks == (1 if reason is Reason.CORRUPT else 3)
        assert len(raw.broken) == (reason is Reason.CORRUPT)


@virtual
async def test_late_io_keeps_its_memory_until_it_returns() -> None:
    raw = FaultyBackend()
    async with world(raw, settings=QUICK) as w:
        engine, keys = await filled(w)
        raw.plan = Nth(1, NEVER, operation="get")
        found = await w.find(engine, keys)
        assert (found.chunks, found.reasons[0]) == (0, Reason.L2_TIMEOUT)
        await w.until(lambda: len(w.directory.residents.index) == 2)
        assert w.directory.slots.bytes_in[SlotState.STAGING] == 2 * PAGE
        raw.unstick()
        await w.until(lambda: not w.directory.slots.bytes_in[SlotState.STAGING])
        assert len(w.directory.residents.index) == 2  # what came late is not verified
        assert (await w.find(engine, keys)).chunks == 3


@virtual
async def test_the_lookups_deadline_rings() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Nth(3, NEVER, operation="get")
        found = await w.find(engine, keys, wait_ms=30.0)
        assert (found.chunks, found.reasons) == (2, bytes([Reason.L2_TIMEOUT]))


@virtual
async def test_what_is_there_is_not_written_again() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        assert raw.calls["put"] == 3
        await w.store(engine, keys)
        await w.until(lambda: w.directory.persister.idle)
        assert raw.calls["put"] == 3
        assert w.directory.counters["persisted_ok"] == 6


@pytest.mark.parametrize("later", [False, True])
@virtual
async def test_drop_takes_the_object_away(later: bool) -> None:
    raw = FaultyBackend(later=later)
    async with world(raw) as w:
        engine, keys = await filled(w)
        await w.find(engine, keys)
        w.tell(engine, m.Drop(keys[1]))
        await w.until(lambda: raw.calls["delete"] == 1 and len(raw.objects) == 2)
        assert [name[1].chunk for name, _ in raw.broken] == [keys[1]]
        assert (await w.find(engine, keys)).chunks == 1


@virtual
async def test_forget_empties_l2_of_the_layout() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        await w.find(engine, keys)
        forgotten = await w.ask(engine, m.Forgotten, m.Forget)
        assert forgotten.chunks == 3
        await w.until(lambda: not raw.objects)
        assert (await w.find(engine, keys)).chunks == 0


@pytest.mark.parametrize("operation", ["delete", "forget"])
@virtual
async def test_a_deletion_that_fails_is_logged(operation: str) -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        await w.find(engine, keys)
        raw.plan = Switched(Fault(Kind.ERROR), operation=operation)
        w.tell(engine, m.Drop(keys[0]) if operation == "delete" else m.Forget(1))
        await w.until(lambda: f"l2_{operation}_failed" in [name for name, _ in w.lines])
        assert len(raw.objects) == 3


@virtual
async def test_a_broken_task_is_reported_and_answered() -> None:
    """Our own bug: the core hears of an error, and nobody waits for ever."""
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)

        async def broken(*_: Any) -> Any:
            raise RuntimeError("planted")

        w.io.stores[0].get = broken  # type: ignore[method-assign]
        found = await w.find(engine, keys)
        assert (found.chunks, found.reasons[0]) == (0, Reason.L2_ERROR)
        said = [fields["why"] for name, fields in w.lines if name == "io_broken"]
        assert len(said) == 3
        assert "planted" in str(said[0])
        w.lines.clear()


@virtual
async def test_a_broken_put_is_reported_and_given_up() -> None:
    raw = FaultyBackend()
    async with world(raw, persist_tries=1) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)

        async def broken(*_: Any) -> Any:
            raise RuntimeError("planted")

        w.io.stores[0].put = broken  # type: ignore[method-assign]
        await w.store(engine, chunks(1))
        body = await w.persisted(operator)
        assert (body["done"], body["persist_failed"]) == (True, 1)
        w.lines.clear()


@virtual
async def test_stuck_loads_do_not_delay_another_backends_hits() -> None:
    stuck, good = FaultyBackend(name="stuck"), FaultyBackend(name="good")
    async with world(stuck, good, fetches_per_backend=8, fetch_fraction=0.5) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
        bad, fine = [chunks(1, n << 20) for n in range(8)], chunks(3, 77 << 20)
        for keys in (*bad, fine):
            await w.store(engine, keys)
        assert (await w.persisted(operator))["done"]
        await w.ask(operator, m.Answer, lambda seq: m.Query(seq, "clear"))
        space = w.directory.sessions["s"].space(None)
        for key in list(stuck.objects):
            if key[1].chunk in fine:
                del stuck.objects[key]
        assert all(name[0] == label(space) for name in good.objects)
        stuck.plan = Switched(NEVER, operation="get")
        for keys in bad:
            w.tell(engine, m.Lookup(next(w.seq), "r", b"".join(keys), wait_ms=15_000.0))
            assert isinstance(await engine[1].next(m.Pending), m.Pending)
        await w.until(lambda: stuck.hanging == 8)
        found = await w.find(engine, fine)
        assert (found.chunks, found.tiers) == (3, b"\2\2\2")
        stuck.unstick()
        for _ in bad:
            assert (await engine[1].next(m.Resolved)).chunks == 1


# ---- the service


@virtual
async def test_wait_persisted_answers_when_everything_is_there() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
        raw.plan = Switched(NEVER, operation="put")
        await w.store(engine, chunks(2))
        w.tell(operator, m.Query(5, "wait_persisted", "15"))
        w.service.tick()
        assert not [s for s in operator[1].sent if isinstance(s, m.Answer)]
        raw.plan = Switched()
        raw.unstick()
        answer = await operator[1].next(m.Answer)
        assert answer.seq == 5
        assert msgspec.json.decode(answer.body)["done"] is True


@virtual
async def test_wait_persisted_ends_with_its_time() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
        raw.plan = Switched(NEVER, operation="put")
        await w.store(engine, chunks(1))
        w.tell(operator, m.Query(6, "wait_persisted", "0"))
        answer = await operator[1].next(m.Answer)
        body = msgspec.json.decode(answer.body)
        assert (body["done"], body["running"]) == (False, 1)


@virtual
async def test_wait_persisted_wants_a_number() -> None:
    async with world(FaultyBackend()) as w:
        operator = w.join("op", Role.OPERATOR)
        w.tell(operator, m.Query(6, "wait_persisted", "soon"))
        assert isinstance(operator[1].sent[-1], m.Failed)


@virtual
async def test_a_client_that_went_meanwhile_leaves_nothing() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(NEVER, operation="get")
        w.tell(engine, m.Lookup(1, "r", b"".join(keys)))
        assert isinstance(await engine[1].next(m.Pending), m.Pending)
        w.service.closed(engine[0])
        w.service.gone(engine[0])
        raw.plan = Switched()
        raw.unstick()
        await w.until(lambda: not w.directory.fetcher.flights.fetches)
        assert not [s for s in engine[1].sent if isinstance(s, m.Resolved)]
        assert w.directory.slots.reserved_bytes == 0
        assert w.service._pending == {}
        assert w.service._early == {}


@virtual
async def test_cancel_of_another_session_changes_nothing() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        other = w.join("t")
        raw.plan = Switched(NEVER, operation="get")
        w.tell(engine, m.Lookup(1, "r", b"".join(keys)))
        ticket = (await engine[1].next(m.Pending)).ticket
        w.tell(other, m.Cancel(ticket))
        raw.plan = Switched()
        raw.unstick()
        assert (await engine[1].next(m.Resolved)).chunks == 3


@virtual
async def test_a_cancelled_lookup_is_not_resolved() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(NEVER, operation="get")
        w.tell(engine, m.Lookup(1, "r", b"".join(keys)))
        w.tell(engine, m.Cancel((await engine[1].next(m.Pending)).ticket))
        raw.plan = Switched()
        raw.unstick()
        await w.until(lambda: len(w.directory.residents.index) == 3)
        assert not [s for s in engine[1].sent if isinstance(s, m.Resolved)]
        assert w.directory.slots.reserved_bytes == 0


@virtual
async def test_explain_says_which_backend_it_came_from() -> None:
    async with world(FaultyBackend(name="disk")) as w:
        engine, keys = await filled(w)
        found = await w.find(engine, keys)
        w.tell(engine, m.End(found.lease, (0,), EndOutcome.USED, "r", loaded_tokens=768))
        told = w.service.timeline.explain("r", w.service.backends)
        assert [chunk["tier"] for chunk in told["chunks"]] == ["l2:disk"] * 3
        assert told["timeline"][1]["event"] == "lookup: 3 of 3 chunks (3 from disk)"
        stored = w.service.timeline.explain("w", w.service.backends)["timeline"]
        assert stored[-1]["event"] == "3 persisted to disk"


# ---- open and close


@virtual
async def test_one_store_that_does_not_open_closes_the_others() -> None:
    good = FaultyBackend(name="good")
    bad = FaultyBackend(Switched(Fault(Kind.REFUSE), operation="open"), name="bad")
    w = World([good, bad], Limits(), GuardSettings())
    with pytest.raises(Exception, match="open is refused"):
        await w.io.open()
    assert good.calls["close"] == 1


@virtual
async def test_close_leaves_hanging_io_behind() -> None:
    raw = FaultyBackend()
    w = World([raw], Limits(store_policy=StorePolicy.WRITE_THROUGH), GuardSettings())
    await w.io.open()
    engine = w.join("s")
    raw.plan = Switched(NEVER, operation="put")
    await w.store(engine, chunks(1))
    await w.until(lambda: raw.hanging == 1)
    async with asyncio.timeout(PATIENCE_S):
        await w.io.close()
    assert raw.calls["close"] == 1
    raw.unstick()
    await asyncio.sleep(0.01)
    assert len(w.directory.persister.running) == 1  # nobody is told any more
