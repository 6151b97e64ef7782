"""One seed's world: its server, engines, operator, chance and time, and the digest of all of it."""

import asyncio
import random
import struct
from collections import Counter, deque
from collections.abc import Coroutine
from typing import Any

from blake3 import blake3

from kvkeep.core import events as ev
from kvkeep.testing.engine import Engine
from kvkeep.testing.fake_client import FakeClient
from kvkeep.testing.faults import Fault
from kvkeep.testing.host import Host
from kvkeep.testing.knobs import drawn
from kvkeep.testing.layouts import Identity
from kvkeep.testing.process import Process, ProcessEnded
from kvkeep.testing.sim_storage import Disk
from kvkeep.types import Role, SlotState
from kvkeep.wire import messages as m

_RECENT = 6  # event names kept for a failure's text


class World:
    """Everything of one seed. All chance comes from `rng`, all time from `loop`."""

    def __init__(self, seed: int, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.rng = random.Random(seed)
        self.knobs = drawn(self.rng)
        self.coverage: Counter[tuple[SlotState, str]] = Counter()
        self.copies: Counter[str] = Counter()  # what became of every copy and of L2's I/O
        self.struck: Counter[str] = Counter()  # misfortunes by class
        self.events = 0
        self.recent: deque[str] = deque(maxlen=_RECENT)
        self.busy_until_s = 0.0  # no scheduler takes a step before
        self.finishing = False  # engines take no new requests
        self.may_leave = True  # idle engines say Bye
        self.over: asyncio.Future[BaseException | None] = loop.create_future()
        self.engines: dict[int, Engine] = {}
        self.processes: dict[int, Process] = {}
        self.places: list[asyncio.Task[None]] = []
        names = [f"l2{number}" for number in range(self.knobs.limits.backends)]
        self.disks = [Disk(self.rng, self.knobs.l2, name) for name in names]
        self.host = Host(self)
        self._hash = blake3()
        self._numbers = 0
        self._event: ev.Event | None = None
        hello = m.Hello(m.VERSIONS, "", Role.OPERATOR, wants_arena=False)
        self.operator = FakeClient(self, self.new_process(), hello)
        loop.set_exception_handler(self._callback_failed)

    # ---- what every part uses

    def new_id(self) -> int:
        """A random non-zero 64-bit id."""
        return self.rng.getrandbits(64) or 1

    def new_number(self) -> int:
        """1, 2, 3, ..."""
        self._numbers += 1
        return self._numbers

    def new_process(self) -> Process:
        """A process that has just started."""
        process = Process(self.loop, self.rng, self.new_number())
        self.processes[process.pid] = process
        return process

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background; the end of its process ends it, any other error the seed."""
        task = self.loop.create_task(work)
        task.add_done_callback(self._task_ended)
        return task

    def fail(self, error: BaseException) -> None:
        """The first failure ends the seed."""
        if not self.over.done():
            self.over.set_result(error)

    def seen(self, state: SlotState, event: ev.Event) -> None:
        """An event met a slot in this state."""
        name = type(event).__name__
        self.coverage[state, name] += 1
        if event is not self._event:
            self._event = event
            self.events += 1
            self.recent.append(name)

    def counted(self, what: str) -> None:
        """Something worth counting happened."""
        self.copies[what] += 1

    def calm(self) -> None:
        """No misfortune any more; calls that hang go on hanging."""
        self.finishing = True
        self.knobs.calm()
        for disk in self.disks:
            disk.calm()

    def trace(self, way: str, connection: int, data: bytes) -> None:
        """Bytes that reached or left the server become part of the digest."""
        head = struct.pack("<cdQQ", way.encode(), self.loop.time(), connection, len(data))
        self._hash.update(head + data)

    def digest(self) -> bytes:
        """Digest of every message so far, with its time."""
        return self._hash.digest()

    # ---- what happens

    def start(self, faults: list[Fault]) -> None:
        """The server, the operator, the engines, the faults."""
        self.host.start()
        self.operator.start()
        self.places = [self.spawn(self._place(n)) for n in range(self.knobs.engines)]
        self.spawn(self._misfortune(faults))

    async def _place(self, number: int) -> None:
        """One engine after another."""
        session = f"s{number}"
        while not self.finishing:
            if self.rng.random() >= self.knobs.same_session:
                session = f"s{number}.{self.new_number()}"
            engine = self.engines[number] = Engine(self, self._identity(session))
            await engine.live()
            await asyncio.sleep(self.rng.random() * 0.1)

    def _identity(self, session: str) -> Identity:
        rng, knobs = self.rng, self.knobs
        both = rng.random() < 0.5
        return Identity(
            session=session,
            world=2 if int(session[1:].split(".")[0]) % 2 else 1,
            rows=rng.choice(knobs.layouts),
            both=both,
            one_process=rng.random() < 0.3,
            writes=rng.random() >= knobs.read_only,
            dma=rng.random() < knobs.dma,
            recompute=rng.random() >= knobs.trusting,
        )

    async def _misfortune(self, faults: list[Fault]) -> None:
        while not self.finishing:
            await asyncio.sleep(0.01 + self.rng.random() * 0.04)
            for fault in faults:
                if not self.finishing:
                    fault.maybe(self.rng, self)

    # ---- failures

    def story_ended(self, story: asyncio.Task[None]) -> None:
        """The seed's plan is through, well or badly."""
        if not story.cancelled() and not self.over.done():
            self.over.set_result(story.exception())

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None and not isinstance(error, ProcessEnded):
                self.fail(error)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.fail(context.get("exception") or RuntimeError(context["message"]))
