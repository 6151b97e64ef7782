"""A simulated engine: steps, requests, loads and stores as the vLLM connector does them.

Follows facts of the real engine: every load is asynchronous or taints its request, a chunk is
staged in the step that computes it, copied and reported by every rank, and committed only after
that step's output. A request that shared a failed load is tainted: its staged chunks are aborted.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.core.events import NO_SLOT
from kvkeep.testing.fake_client import Call, FakeClient
from kvkeep.testing.layouts import Identity
from kvkeep.testing.process import Process, ProcessEnded
from kvkeep.testing.sim_usable import pack
from kvkeep.testing.worker import Part, Report, Worker
from kvkeep.types import ChunkHash, EndOutcome, Role, RowSpec, StageOutcome
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from kvkeep.testing.world import World

_MOST_REQUESTS = 4
_LIFE_STEPS = (20, 400)
_STALL_S = 1.5


@dataclass(slots=True)
class Request:
    """One prompt on its way through the engine."""

    name: str
    salt: str | None
    root: ChunkHash
    hashes: list[ChunkHash]
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: bool = False
    tainted: bool = False  # its blocks are, or were, garbage
    asking: Call | None = None  # its lookup under way


@dataclass(slots=True)
class Staged:
    """A granted chunk until it is committed or aborted."""

    request: Request
    lease: int
    parts: list[list[Part]]  # by rank


@dataclass(slots=True)
class _Item:
    """Chunks of a request that the next step stages."""

    request: Request
    start: int


class Engine:
    """One engine instance: a scheduler, its workers, and their processes."""

    def __init__(self, world: "World", identity: Identity) -> None:
        self.world = world
        self.identity = identity
        self.processes: list[Process] = []
        self.clients: list[FakeClient] = []
        self.workers: list[Worker] = []
        self.requests: dict[str, Request] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._items: list[_Item] = []
        self._forgetting = False
        self._steps_left = world.rng.randint(*_LIFE_STEPS)
        self._build()

    def _build(self) -> None:
        who, world = self.identity, self.world
        main = self._process()
        role = Role.BOTH if who.both else Role.SCHEDULER
        self.scheduler = self._client(main, role, 0)
        for rank in range(who.world):
            if who.both and rank == 0:
                client = self.scheduler
            else:
                process = main if who.one_process else self._process()
                client = self._client(process, Role.WORKER, rank)
            self.workers.append(Worker(world, client, rank))

    def _process(self) -> Process:
        process = self.world.new_process()
        self.processes.append(process)
        return process

    def _client(self, process: Process, role: Role, rank: int) -> FakeClient:
        who, works = self.identity, role is not Role.SCHEDULER
        hello = m.Hello(
            m.VERSIONS,
            who.session,
            role,
            rank,
            who.world,
            who.rows if works else (),
            who.fingerprint(rank) if works else b"",
            writes=who.writes,
            dma=who.dma,
            recompute=who.recompute,
            wants_arena=works,
        )
        client = FakeClient(self.world, process, hello)
        self.clients.append(client)
        return client

    # ---- life

    async def live(self) -> None:
        """Serve until its time is over or a process dies; nothing of it is left afterwards."""
        for client in self.clients:
            client.start()
        try:
            await self._steps()
            for client in self.clients[::-1]:
                await client.close()
        except ProcessEnded:
            # The others notice that the engine is dead, some time later.
            await asyncio.sleep(self.world.rng.random() * 0.3)
        self.kill()

    def kill(self) -> None:
        """Every process of the engine ends."""
        for process in self.processes:
            process.kill()

    @property
    def idle(self) -> bool:
        """No request, copy or call is under way; nothing is in an engine that died."""
        if not all(process.alive for process in self.processes):
            return True
        asking = any(c.calls or c.pending for c in self.clients)
        return not self._tasks and not self._items and not asking

    async def _steps(self) -> None:
        world, rng = self.world, self.world.rng
        while True:
            await self._step_time()
            if not all(process.alive for process in self.processes):
                raise ProcessEnded(self.identity.session)
            self._steps_left -= 1
            ending = world.finishing or self._steps_left <= 0
            if not ending and len(self.requests) < _MOST_REQUESTS and rng.random() < 0.5:
                self._new_request()
            if self.requests and rng.random() < world.knobs.abort:
                self._abort(rng.choice(list(self.requests.values())))
            if rng.random() < world.knobs.forget and not self._forgetting:
                self._spawn(self._forget())
            if self._items:
                items, self._items = self._items, []
                self._spawn(self._store(items))
            if ending and self.idle and world.may_leave:
                return

    async def _step_time(self) -> None:
        rng, knobs = self.world.rng, self.world.knobs
        most_s = _STALL_S if rng.random() < knobs.stall else knobs.step_s
        busy_s = max(0.0, self.world.busy_until_s - self.world.loop.time())
        await self.scheduler.process.sleep(rng.random() * most_s + busy_s)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.world.spawn(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self) -> None:
        """Its weights change: what was stored until now is wrong."""
        self._forgetting = True
        call = await self.scheduler.call(m.Forget)
        if call is not None:
            assert isinstance(call.reply, m.Forgotten)
        self._forgetting = False

    # ---- one request

    def _abort(self, request: Request) -> None:
        request.aborted = True
        if request.asking is not None and request.asking.ticket:
            self.scheduler.abandon(request.asking)

    def _usable(self) -> bool:
        """Every rank is there, with the layout that this engine has."""
        ready = self.scheduler.ready
        return ready is not None and ready.fingerprint == self.identity.session_fingerprint()

    def _new_request(self) -> None:
        if not self._usable():
            return
        rng = self.world.rng
        salt = "a" if rng.random() < self.world.knobs.salted else None
        root, hashes = self.identity.chain(rng, salt)
        request = Request(f"r{self.world.new_number()}", salt, root, hashes)
        self.requests[request.name] = request
        self._spawn(self._serve(request))

    async def _serve(self, request: Request) -> None:
        try:
            hit = await self._reuse(request)
            if hit is not None and self.identity.writes | (self.world.rng.random() < 0.1):
                self._items.append(_Item(request, hit))
        finally:
            request.loaded.set()
            del self.requests[request.name]

    async def _reuse(self, request: Request) -> int | None:
        """Look up and load; chunks that need not be stored, None when they are being stored."""
        world, rng = self.world, self.world.rng
        found = await self._lookup(request, near=rng.random() >= world.knobs.far)
        if found is not None and found[0].chunks and not found[0].lease:
            found = await self._lookup(request, near=True)  # now it is about to be scheduled
        if found is None or not found[0].lease:
            return 0
        reply, epoch = found
        await self._step_time()
        if request.aborted:  # not dispatched: the scheduler ends every part
            self._end(reply.lease, EndOutcome.UNUSED)
            return None
        inline = rng.random() < world.knobs.sync_loads
        if inline:  # the chunks behind the hit are computed in the step that loads
            self._items.append(_Item(request, reply.chunks))
        good = await self._load(request, epoch, reply)
        if not good and inline:
            request.tainted = True
        if inline:
            return None
        return reply.chunks if good else 0

    async def _lookup(self, request: Request, *, near: bool) -> tuple[m.Found, int] | None:
        """The answer and its epoch."""
        packed, rng, knobs = pack(request.hashes), self.world.rng, self.world.knobs
        fetch, wait_ms = rng.random() >= knobs.no_fetch, rng.choice(knobs.waits_ms)
        self.scheduler.process.check()
        call = request.asking = self.scheduler.begin(
            lambda seq: m.Lookup(seq, request.name, packed, request.salt, near, 1, fetch, wait_ms)
        )
        if call is None:
            return None
        timer = None
        if rng.random() < knobs.give_up:
            after_s = rng.random() * 0.1
            timer = self.world.loop.call_later(after_s, self.scheduler.abandon, call)
        answered = await self.scheduler.answered(call)
        if timer is not None:
            timer.cancel()
        request.asking = None
        if answered is None:
            return None
        assert isinstance(call.reply, m.Found)
        return call.reply, call.epoch

    async def _load(self, request: Request, epoch: int, found: m.Found) -> bool:
        """Every rank copies its part out; True when all of them got all of it."""
        chunks = [request.hashes[i] for i in range(found.chunks)]
        parts = self._parts([found.lease] * len(chunks), chunks, found.columns)
        session, rng, knobs = self.identity.session, self.world.rng, self.world.knobs
        reports = await self._all_ranks(
            "load", lambda worker: worker.load(epoch, session, parts[worker.rank])
        )
        failed = Report.FAILED in reports
        outcome = EndOutcome.FAILED if failed else EndOutcome.USED
        if rng.random() < 0.5:
            for worker in self.workers:
                worker.client.notify(m.End(found.lease, (worker.rank,), outcome, request.name))
        else:
            self._end(found.lease, outcome)
        if rng.random() < knobs.end_twice:
            self._end(found.lease, EndOutcome.USED)
        if not self.identity.recompute:
            self._end(found.lease, outcome)  # a rank's own notice may have been lost
        if failed:
            self.scheduler.notify(m.Drop(rng.choice(chunks)))
        return all(report is Report.DONE for report in reports)

    def _end(self, lease: int, outcome: EndOutcome) -> None:
        ranks = tuple(range(self.identity.world))
        self.scheduler.notify(m.End(lease, ranks, outcome))

    # ---- stores

    async def _store(self, items: Sequence[_Item]) -> None:
        """One Stage for all requests of the step, then copies, reports, one Commit."""
        wanted = [i for i in items if i.start < len(i.request.hashes)]
        if not wanted:
            return
        wire = tuple(self._stage_item(item) for item in wanted)
        call = await self.scheduler.call(lambda seq: m.Stage(seq, wire))
        if call is None:
            return
        assert isinstance(call.reply, m.Granted)
        staged = self._granted(wanted, call.reply)
        if not staged:
            return
        await self._step_time()
        staged = self._not_dispatched(staged)
        for entry in staged:
            await entry.request.loaded.wait()
        garbage = any(entry.request.tainted for entry in staged)
        reports = await self._all_ranks(
            "store",
            lambda worker: worker.store(
                call.epoch, [part for e in staged for part in e.parts[worker.rank]], garbage
            ),
        )
        if garbage:  # they shared blocks with the failed load
            for entry in staged:
                entry.request.tainted = True
        await self._step_time()
        await self._settle(staged, reports)

    def _stage_item(self, item: _Item) -> m.StageItem:
        request, start = item.request, item.start
        parent = request.hashes[start - 1] if start else request.root
        packed = pack(request.hashes[start:])
        return m.StageItem(request.name, parent, packed, request.salt, start)

    def _granted(self, wanted: Sequence[_Item], reply: m.Granted) -> list[Staged]:
        owners = [(i.request, h) for i in wanted for h in i.request.hashes[i.start :]]
        granted = [
            owner
            for owner, outcome in zip(owners, reply.outcomes, strict=True)
            if outcome == StageOutcome.GRANTED
        ]
        by_rank = self._parts(reply.leases, [h for _, h in granted], reply.columns)
        staged = []
        for (request, _), lease in zip(granted, reply.leases, strict=True):
            parts = [[part for part in rank if part.lease == lease] for rank in by_rank]
            staged.append(Staged(request, lease, parts))
        return staged

    def _not_dispatched(self, staged: list[Staged]) -> list[Staged]:
        """Give back what was granted to requests that are gone by now; the rest is dispatched."""
        gone = tuple(e.lease for e in staged if e.request.aborted)
        if gone:
            self.scheduler.notify(m.Abort(gone))
        return [e for e in staged if not e.request.aborted]

    async def _settle(self, staged: Sequence[Staged], reports: Sequence[Report | None]) -> None:
        """Every rank reported, or never will: commit, abort, or leave it to the server."""
        rng, knobs = self.world.rng, self.world.knobs
        copied = all(report is Report.DONE for report in reports)
        good = tuple(e.lease for e in staged if copied and not e.request.tainted)
        bad = tuple(e.lease for e in staged if e.lease not in good)
        if bad and None not in reports:
            confirmed = rng.random() >= knobs.unconfirmed
            self.scheduler.notify(m.Abort(bad, confirmed))
        if good:
            await self.scheduler.call(lambda seq: m.Commit(seq, good))
            if rng.random() < knobs.end_twice:  # abort after commit: a counted no-op
                self.scheduler.notify(m.Abort(good))

    # ---- parts

    async def _all_ranks(
        self, kind: str, work: Callable[[Worker], Coroutine[Any, Any, Report]]
    ) -> list[Report | None]:
        """Run a copy on every rank; None for a rank whose process ended."""
        jobs = [worker.submit(kind, work(worker)) for worker in self.workers]
        reports = [await job for job in jobs]
        self.scheduler.process.check()
        return reports

    def _parts(
        self, leases: Sequence[int], chunks: Sequence[bytes], columns: Sequence[m.Columns]
    ) -> list[list[Part]]:
        """Handles by rank; rows come rank by rank."""
        rows: tuple[RowSpec, ...] = self.identity.rows
        parts: list[list[Part]] = [[] for _ in range(self.identity.world)]
        for index, column in enumerate(columns):
            rank, row = divmod(index, len(rows))
            table = zip(
                leases,
                chunks,
                memoryview(column.slots).cast("Q"),
                memoryview(column.offsets).cast("Q"),
                memoryview(column.generations).cast("Q"),
                strict=True,
            )
            for lease, chunk, slot, offset, generation in table:
                if slot != NO_SLOT:
                    spec = rows[row]
                    size = spec.object_bytes
                    parts[rank].append(
                        Part(lease, chunk, spec.group, size, slot, offset, generation)
                    )
        return parts
