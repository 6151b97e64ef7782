"""Every call of one workload to its L2 fails once, and from then on, in every way there is.

Real service, core, io and store; the model judges every event. Whatever fails: each answer is right
or a miss, and in the end, when L2 works again, nothing is held for anybody.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.registry import compose
from kvkeep.core import audit
from kvkeep.core import events as ev
from kvkeep.core.directory import Limits
from kvkeep.core.keys import chunk_hash, root_hash
from kvkeep.server.io import Io
from kvkeep.server.service import Service
from kvkeep.testing import virtual_loop
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, NoFaults, Nth, Plan
from kvkeep.testing.layouts import Identity
from kvkeep.testing.model import Memory, WatchedDirectory, content
from kvkeep.testing.sim_usable import pack
from kvkeep.types import (
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Epoch,
    GroupKind,
    PeerId,
    Role,
    RowSpec,
    SlotState,
    StageOutcome,
    StorePolicy,
)
from kvkeep.wire import messages as m

PAGES = 64
PAGE_BYTES = 4096
ROWS = (RowSpec(0, GroupKind.FULL_ATTENTION, 4000), RowSpec(1, GroupKind.SLIDING_WINDOW, 5000, 2))
ENGINE = Identity("s", 1, ROWS, True, True, True, False, True)
GUARD = GuardSettings(
    get_timeout_s=0.1,
    put_timeout_s=0.2,
    lookup_timeout_s=0.05,
    breaker_failures=2,
    breaker_open_s=0.1,
    breaker_open_most_s=0.5,
)
WAIT_S = 0.3  # of a lookup
PERSIST_S = 1.0  # what the workload waits for L2 at most
SETTLE_S = 200.0
MOST_CALLS = 60  # with a call that fails for ever the retries never end

FAULTS = (
    Fault(Kind.ERROR),
    Fault(Kind.DENIED),
    Fault(Kind.NEVER),
    Fault(Kind.AFTER_CLOSE),
    Fault(Kind.SLOW, delay_s=0.04),
    Fault(Kind.SLOW, delay_s=3.0),
    Fault(Kind.REFUSE),
    Fault(Kind.FULL),
    Fault(Kind.MISSING),
    Fault(Kind.SHORT, place=5),
    Fault(Kind.LONG, place=5),
    Fault(Kind.FLIPPED, place=12345),
    Fault(Kind.OTHER_KEY),
)


class Counted:
    """What the model counts, and what io complains of."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.broken: list[str] = []

    def seen(self, state: SlotState, event: ev.Event) -> None:
        pass

    def counted(self, what: str) -> None:
        self.counts[what] += 1

    def log(self, event: str, **fields: object) -> None:
        if event == "io_broken":
            self.broken.append(str(fields["why"]))


class Link:
    """The messages of the server, and who waits for one."""

    def __init__(self) -> None:
        self.messages: list[m.ServerMessage] = []

    def send(self, message: m.ServerMessage) -> None:
        self.messages.append(message)

    async def take(self, wanted: Callable[[m.ServerMessage], bool], most_s: float) -> Any:
        """The first such message; None when it does not come in time."""
        deadline_s = asyncio.get_running_loop().time() + most_s
        while True:
            for message in self.messages:
                if wanted(message):
                    self.messages.remove(message)
                    return message
            if asyncio.get_running_loop().time() > deadline_s:
                return None
            await asyncio.sleep(0.005)


class Rig:
    """One server with one L2, and one engine that is always right."""

    def __init__(self, plan: Plan, policy: StorePolicy, *, later: bool) -> None:
        loop = asyncio.get_running_loop()
        self.watch = Counted()
        self.disk = FaultyBackend(plan, later=later)
        self.memory = Memory(Epoch(1), bytearray(PAGES * PAGE_BYTES), [0] * PAGES)
        self._ids = iter(range(1, 1 << 30))
        limits = Limits(
            backends=1,
            lookup_wait_s=WAIT_S,
            session_reserve_fraction=0.9,
            session_staging_fraction=1.0,
            persist_tries=2,
            persists_per_backend=2,
            store_policy=policy,
        )
        self.directory = WatchedDirectory(
            self.memory, lambda: next(self._ids), limits=limits, watch=self.watch
        )
        store = compose(self.disk, settings=GUARD, log=self.watch.log, offload=_at_once)
        self.io = Io([store], memoryview(self.memory.arena), clock=loop.time, log=self.watch.log)
        self.service = Service(
            self.directory,
            epoch=self.memory.epoch,
            capacity_bytes=PAGES * PAGE_BYTES,
            clock=loop.time,
            log=self.watch.log,
            io=self.io,
            later=partial(loop.call_later, 0.001),
        )
        self.service.grown(PAGES * PAGE_BYTES)
        self.link = Link()
        print_ = ENGINE.fingerprint(0)
        hello = m.Hello(m.VERSIONS, "s", Role.BOTH, rows=ROWS, fingerprint=print_)
        welcome = self.service.hello(hello, self.link, pid=1)
        assert isinstance(welcome, m.Welcome)
        self.peer = PeerId(welcome.peer)
        self.root = root_hash(ENGINE.session_fingerprint())
        self._seq = 0

    async def ask(self, make: Callable[[int], m.ClientMessage], most_s: float) -> Any:
        self._seq += 1
        seq = self._seq
        self.service.receive(self.peer, make(seq))
        return await self.link.take(lambda got: getattr(got, "seq", 0) == seq, most_s)

    # ---- what the engine does

    async def store(self, hashes: list[ChunkHash], start: int) -> None:
        parent = hashes[start - 1] if start else self.root
        item = m.StageItem("r", parent, pack(hashes[start:]), None, start)
        granted = await self.ask(lambda seq: m.Stage(seq, (item,)), 0.0)
        outcomes = [StageOutcome(o) for o in granted.outcomes]
        new = [
            h for h, o in zip(hashes[start:], outcomes, strict=True) if o is StageOutcome.GRANTED
        ]
        for spec, column in zip(ROWS, granted.columns, strict=True):
            for one, offset in zip(new, memoryview(column.offsets).cast("Q"), strict=True):
                right = content(one, 0, spec.group, spec.object_bytes)
                self.memory.arena[offset : offset + spec.object_bytes] = right
        committed = await self.ask(lambda seq: m.Commit(seq, granted.leases), 0.0)
        assert set(committed.outcomes) <= {CommitOutcome.COMMITTED}

    async def load(self, hashes: list[ChunkHash]) -> int:
        """Look up, verify every byte, release; the hit."""
        self._seq += 1
        seq = self._seq
        packed = pack(hashes)
        self.service.receive(self.peer, m.Lookup(seq, "r", packed))
        found = await self.link.take(lambda got: getattr(got, "seq", 0) == seq, 0.0)
        if isinstance(found, m.Pending):
            ticket = found.ticket
            found = await self.link.take(
                lambda got: isinstance(got, m.Resolved) and got.ticket == ticket, WAIT_S + 0.1
            )
        assert found is not None, "no answer by the deadline"
        for spec, column in zip(ROWS, found.columns, strict=True) if found.lease else ():
            slots = memoryview(column.slots).cast("Q")
            offsets = memoryview(column.offsets).cast("Q")
            for one, slot, offset in zip(hashes[: found.chunks], slots, offsets, strict=True):
                right = content(one, 0, spec.group, spec.object_bytes)
                read = self.memory.arena[offset : offset + spec.object_bytes]
                assert slot == ev.NO_SLOT or read == right, "wrong bytes"
        if found.lease:
            self.service.receive(self.peer, m.End(found.lease, (0,), EndOutcome.USED))
        return int(found.chunks)

    async def persisted(self) -> None:
        """Wait until L2 has all, but not for ever."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + PERSIST_S
        while not self.directory.persister.idle and loop.time() < until_s:
            self.service.tick()
            await asyncio.sleep(0.02)

    async def settled(self) -> None:
        """L2 works again: everything drains."""
        self.disk.plan = NoFaults()
        self.disk.unstick()
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SETTLE_S
        while not self._quiet():
            assert loop.time() < until_s, "L2 works, and something is still held"
            self.service.tick()
            await asyncio.sleep(0.25)

    def _quiet(self) -> bool:
        d = self.directory
        moving = d.fetcher.tickets or d.fetcher.flights.fetches or not d.persister.idle
        held = d.slots.reserved_bytes or d.slots.bytes_in[SlotState.STAGING]
        return not (moving or held or d.residents.unlinked or self.disk.hanging)


async def _at_once(job: Callable[[], list[bytes]]) -> list[bytes]:
    return job()


async def _workload(rig: Rig) -> list[int]:
    """The hits of its lookups."""
    hashes: list[ChunkHash] = []
    parent = rig.root
    for number in range(8):
        parent = chunk_hash(parent, bytes([number]))
        hashes.append(parent)
    hits = []
    await rig.store(hashes[:6], 0)
    await rig.persisted()
    rig.service.apply(ev.Clear())
    hits.append(await rig.load(hashes[:6]))
    hits.append(await rig.load(hashes))
    await rig.store(hashes, 6)
    await rig.persisted()
    rig.service.apply(ev.Clear())
    hits.append(await rig.load(hashes))
    forgotten = await rig.ask(m.Forget, 1.0)
    if forgotten is not None and forgotten.done:
        assert await rig.load(hashes) == 0, "forgotten, and found"
    await rig.store(hashes[:2], 0)
    hits.append(await rig.load(hashes))
    return hits


async def _run(plan: Plan, policy: StorePolicy, *, later: bool) -> tuple[list[int], Rig]:
    rig = Rig(plan, policy, later=later)
    hits = await _workload(rig)
    await rig.settled()
    assert rig.watch.broken == []
    await rig.io.close()
    return hits, rig


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
@pytest.mark.parametrize("policy", list(StorePolicy), ids=lambda policy: policy.value)
def test_without_a_failure_everything_is_found(policy: StorePolicy, later: bool) -> None:
    hits, rig = virtual_loop.run(_run(NoFaults(), policy, later=later))
    if policy is StorePolicy.WRITE_BACK:  # with so much room nothing is written ahead
        assert hits == [0, 0, 0, 2]
    else:
        assert hits == [6, 6, 8, 2]
        assert rig.watch.counts["fetched_ok"] >= 6
        assert rig.watch.counts["persisted_ok"] == 10


@pytest.mark.slow
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kind.value}-{f.delay_s:g}")
def test_the_nth_call_fails(fault: Fault, for_ever: bool) -> None:
    for policy, later in ((StorePolicy.WRITE_THROUGH, False), (StorePolicy.SKIP_L1, True)):
        n, calls = 0, 1
        while n < calls:
            n += 1
            plan = Nth(n, fault, for_ever=for_ever)
            hits, _ = virtual_loop.run(_run(plan, policy, later=later))
            calls = max(calls, min(plan.seen, MOST_CALLS))
            assert len(hits) == 4
            assert all(0 <= hit <= 8 for hit in hits)
        assert n >= 20, "the workload hardly uses its L2"


def test_every_kind_of_fault_is_tried() -> None:
    assert {fault.kind for fault in FAULTS} == set(Kind)


async def _closed_while_it_hangs(n: int) -> int:
    """The server ends while call `n` hangs; it goes on after that, into memory that is left."""
    rig = Rig(Nth(n, Fault(Kind.AFTER_CLOSE)), StorePolicy.WRITE_THROUGH, later=True)
    await _workload(rig)
    hung = rig.disk.hanging
    await rig.io.close()
    await asyncio.sleep(1.0)
    audit.check(rig.directory)
    assert rig.disk.hanging == 0
    assert rig.watch.broken == []
    return hung


def test_calls_that_return_after_the_close_harm_nobody() -> None:
    assert sum(virtual_loop.run(_closed_while_it_hangs(n)) for n in range(1, 25)) > 10
