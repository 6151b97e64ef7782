"""`kvkeep serve` without a socket: the real service and frames, started, stopped and killed.

Does what server/rpc.py does with connections and processes, on the simulated network. A new start
has a new epoch, directory and arena; clients of the old one keep the old memory.
"""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.errors import ProtocolError
from kvkeep.server.service import Service
from kvkeep.testing.knobs import PAGE_BYTES
from kvkeep.testing.model import Memory, WatchedDirectory
from kvkeep.testing.network import End, connection
from kvkeep.testing.process import Process
from kvkeep.types import Epoch, LeaseId, PeerId
from kvkeep.wire import messages as m
from kvkeep.wire.framing import client_frames, encode

if TYPE_CHECKING:
    from kvkeep.testing.world import World

_TICK_S = 0.25
_GROW_STEPS = 4


class Host:
    """One server after another."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.service: Service | None = None
        self.directory: WatchedDirectory
        self.memory: Memory
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
        self.directory = WatchedDirectory(
            self.memory, world.new_id, limits=knobs.limits, seen=world.seen
        )
        self.service = Service(
            self.directory,
            epoch=self.memory.epoch,
            capacity_bytes=size,
            clock=world.loop.time,
            log=_no_log,
        )
        self._populate(self.service, 1)
        self._tick(self.service)

    def kill(self) -> None:
        """SIGKILL: every connection ends somewhere in the middle; nothing is said to anybody."""
        if self.service is None:
            return
        self.service = None
        self.memory.model = None
        self._stopped = False
        self._backlog.clear()
        served, self._served = self._served, []
        for one in served:
            one.over = True
            one.end.close(cut=True)

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
            self.do(lambda: _ignore(service._apply(ev.Revoke(lease))))

    def clear(self) -> None:
        """An operator empties L1."""
        service = self.service
        if service is not None:
            self.do(lambda: _ignore(service._apply(ev.Clear())))

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
