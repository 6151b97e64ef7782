"""`kvkeep serve` without a socket: the real service and frames, started, stopped and killed.

Does what server/rpc.py does with connections and processes, on the simulated network. A new start
has a new epoch, directory and arena; clients of the old one keep the old memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvkeep.backends.checked import Store
from kvkeep.backends.registry import compose
from kvkeep.core import events as ev
from kvkeep.core.quota import EVERYTHING
from kvkeep.errors import ProtocolError
from kvkeep.server.io import Apply, Forgotten, Io
from kvkeep.server.overview import Log
from kvkeep.server.quota_book import QuotaBook
from kvkeep.server.quotas import Quotas
from kvkeep.server.service import Service
from kvkeep.server.watchdog import Watchdog
from kvkeep.testing.knobs import PAGE_BYTES
from kvkeep.testing.model import Memory, WatchedDirectory
from kvkeep.testing.network import End, connection
from kvkeep.testing.process import Process
from kvkeep.testing.sim_storage import Mount
from kvkeep.types import Epoch, LeaseId, Namespace, PeerId
from kvkeep.wire import messages as m
from kvkeep.wire.framing import client_frames, encode

if TYPE_CHECKING:
    from kvkeep.testing.world import World

_TICK_S = 0.25
_SLICE = 20  # looks at chunks: much happens between two slices of a sweep
_SLICE_EVERY_S = 0.001
_END_READS_CHUNKS = 3
_GROW_STEPS = 4


class Host:
    """One server after another."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.service: Service | None = None
        self.directory: WatchedDirectory
        self.memory: Memory
        self.io: Io | None = None
        self.mounts: list[Mount] = []
        self._stopped = False
        self._backlog: deque[Callable[[], None]] = deque()
        self._served: list[Served] = []
        self._numbers = 0

    def start(self) -> None:
        """A fresh server; its memory is populated step by step."""
        assert self.service is None
        world, knobs = self.world, self.world.knobs
        size = knobs.arena_pages * PAGE_BYTES
        self.memory = Memory(Epoch(world.new_id()), bytearray(size), [0] * knobs.slots)
        limits = msgspec.structs.replace(knobs.limits, end_reads_chunks=_END_READS_CHUNKS)
        self.directory = WatchedDirectory(self.memory, world.new_id, limits=limits, watch=world)
        self.io = self._mounted() if knobs.limits.backends else None
        self.service = Service(
            self.directory,
            epoch=self.memory.epoch,
            capacity_bytes=size,
            clock=world.loop.time,
            log=_no_log,
            io=self.io,
            stopped=lambda pid: world.processes[pid].stopped,
            watchdog=Watchdog(clock=lambda: 1.0 + world.loop.time()),
            later=partial(self._later, self.memory),
        )
        self.service.sweeps.slice = _SLICE
        quotas = Quotas(
            QuotaBook(), self.directory, apply=self.service.apply, stores=(), log=_no_log
        )
        self.service.overview.quotas = quotas
        self._populate(self.service, 1)
        self._tick(self.service)

    def kill(self) -> None:
        """SIGKILL: every connection ends somewhere in the middle; nothing is said to anybody."""
        if self.service is None:
            return
        self.service = None
        self.memory.model = None
        for mount in self.mounts:
            mount.die(self.world.rng)
        if self.io is not None:
            self.world.spawn(self.io.close())  # only so that nothing of it is left on the loop
        self._stopped = False
        self._backlog.clear()
        served, self._served = self._served, []
        for one in served:
            one.over = True
            one.end.close(cut=True)

    def _mounted(self) -> Io:
        """The real I/O on storage that outlives it."""
        world = self.world
        self.mounts = [Mount(disk, self.memory, world.fail) for disk in world.disks]

        def log(event: str, **fields: object) -> None:
            if event == "io_broken":
                world.fail(AssertionError(f"io: {fields['why']}"))

        stores = [
            compose(mount, settings=world.knobs.l2.guard, log=log, offload=_at_once)
            for mount in self.mounts
        ]
        return _Io(self, stores, log)

    def from_io(self, memory: Memory, call: Callable[[], object]) -> None:
        """What I/O says is heard by the server it belongs to, when that one runs."""

        def hear() -> None:
            try:
                call()
            except BaseException as error:  # else io would take it for its own
                self.world.fail(error)
                raise

        if memory.model is not None:
            self.do(hear)

    def _later(self, memory: Memory, action: Callable[[], None]) -> None:
        self.world.loop.call_later(_SLICE_EVERY_S, lambda: self.from_io(memory, action))

    def drain(self) -> None:
        """SIGTERM: first everything goes to L2."""
        service = self.service
        if service is not None:
            self.do(lambda: _ignore(service.apply(ev.Drain(sliced=True))))

    def stop(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while; what arrives meanwhile waits in order."""
        if self.service is not None and not self._stopped:
            self._stopped = True
            self.world.loop.call_later(for_s, self.resume, self.service)

    def resume(self, service: Service | None) -> None:
        """SIGCONT for the server that was stopped."""
        if service is not self.service:
            return
        self._stopped = False
        self.directory.model.l2.woke_s = self.world.loop.time()
        while self._backlog:
            self._backlog.popleft()()

    def do(self, action: Callable[[], None]) -> None:
        """The server's thread does this, now or when it runs again."""
        if self._stopped:
            self._backlog.append(action)
        elif self.service is not None:
            action()

    def connect(self, process: Process) -> End | None:
        """A client's connect(); None when nobody listens."""
        if self.service is None:
            return None
        near, far = connection(self.world.loop, self.world.rng, self.world.knobs.network)
        near.descriptors = self.memory
        self._numbers += 1
        self._served.append(Served(self, self.service, far, process, self._numbers))
        return near

    def forget(self, served: "Served") -> None:
        """A connection is over."""
        if served in self._served:
            self._served.remove(served)

    def revoke(self, lease: LeaseId) -> None:
        """An operator's order, or memory pressure: end a read against its reader's will."""
        service = self.service
        if service is not None:
            # There is no message for it yet; the service's own door carries the push out.
            self.do(lambda: _ignore(service.apply(ev.Revoke(lease))))

    def clear(self, *, sliced: bool = True) -> None:
        """An operator empties L1."""
        service = self.service
        if service is not None:
            self.do(lambda: _ignore(service.apply(ev.Clear(sliced=sliced))))

    def lift_quotas(self) -> None:
        """Requests without a salt may take all of L1."""
        service = self.service
        if service is not None:
            self.do(lambda: _ignore(service.apply(ev.SetQuota(None, EVERYTHING))))

    def _populate(self, service: Service, step: int) -> None:
        if service is not self.service or step > _GROW_STEPS:
            return
        pages = self.world.knobs.arena_pages * step // _GROW_STEPS
        self.do(lambda: service.grown(pages * PAGE_BYTES))
        self.world.loop.call_later(0.1 * step, self._populate, service, step + 1)

    def _tick(self, service: Service) -> None:
        if service is self.service:
            self.do(service.tick)
            self.world.loop.call_later(_TICK_S, self._tick, service)


class _Io(Io):
    """The real one; what it says reaches its server through the host."""

    def __init__(self, host: Host, stores: Sequence[Store], log: Log) -> None:
        arena = memoryview(host.memory.arena)
        super().__init__(stores, arena, clock=host.world.loop.time, log=log)
        self._host = host
        self._memory = host.memory

    def attach(self, apply: Apply, forgotten: Forgotten | None = None) -> None:
        def told(event: ev.Event) -> ev.Reply:
            self._host.from_io(self._memory, lambda: apply(event))
            return ev.Done(0)

        def told_forgotten(space: Namespace, done: bool) -> None:
            if forgotten is not None:
                self._host.from_io(self._memory, lambda: forgotten(space, done))

        super().attach(told, told_forgotten)


class Served:
    """One connection at the server; the service's `Link`."""

    def __init__(
        self, host: Host, service: Service, end: End, process: Process, number: int
    ) -> None:
        self.end = end
        self.over = False
        self._host = host
        self._service = service
        self._process = process
        self._number = number
        self._reader = client_frames()
        self._peer = PeerId(0)
        end.on_data = lambda data: host.do(lambda: self._feed(data))
        end.on_end = lambda: host.do(lambda: self._ended("closed by the client"))

    def send(self, message: m.ServerMessage) -> None:
        """Queue one message."""
        frame = encode(message)
        self._host.world.trace("<", self._number, frame)
        self.end.send(frame)

    def _feed(self, data: bytes) -> None:
        if self.over:
            return
        self._host.world.trace(">", self._number, data)
        try:
            messages = self._reader.feed(data)
        except ProtocolError as error:
            self._abort(str(error))
            return
        for message in messages:
            if self._peer:
                self._service.receive(self._peer, message)
            elif isinstance(message, m.Hello):
                self._admit(message)
            else:
                self._abort("the first message must be Hello")
            if self.over:
                return

    def _admit(self, hello: m.Hello) -> None:
        answer = self._service.hello(hello, self, pid=self._process.pid)
        if isinstance(answer, m.Refused):
            self.send(answer)
            self._abort("refused", cut=False)
            return
        peer = self._peer = PeerId(answer.peer)
        service, host = self._service, self._host

        def gone() -> None:
            if host.service is service:
                host.do(lambda: service.gone(peer))

        self._process.watch(gone)
        self.send(answer)

    def _abort(self, why: str, *, cut: bool = True) -> None:
        self.end.close(cut=cut)
        self._ended(why)

    def _ended(self, why: str) -> None:
        if self.over:
            return
        self.over = True
        self._host.forget(self)
        if self._peer:
            self._service.closed(self._peer, why)


def _no_log(event: str, **fields: object) -> None:
    """The simulator's digest covers messages; log lines are for people."""


def _ignore(_: object) -> None:
    pass


async def _at_once(job: Callable[[], list[bytes]]) -> list[bytes]:
    """No threads here."""
    return job()
