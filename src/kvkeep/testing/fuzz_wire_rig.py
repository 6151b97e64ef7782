"""The server that strangers talk to under fuzzing, its connections, and what must always be true.

Every call is answered exactly once while its connection lives; only a ProtocolError ends one; the
core's audit holds after each step; and in the end, when all strangers are gone, nothing is held
for them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from blake3 import blake3

from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.registry import compose
from kvkeep.config import QuotaConfig
from kvkeep.core import audit
from kvkeep.core.directory import Directory, Limits
from kvkeep.errors import ProtocolError
from kvkeep.server.io import Io
from kvkeep.server.quota_book import QuotaBook
from kvkeep.server.quotas import Quotas
from kvkeep.server.service import Service
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, NoFaults, Switched
from kvkeep.testing.fuzz_good import Good
from kvkeep.testing.fuzz_values import Step, Value
from kvkeep.types import Epoch, PeerId, Role, SlotState
from kvkeep.wire import messages as m
from kvkeep.wire.framing import client_frames, encode

PAGES = 64
PAGE_BYTES = 4096
LEASE = 0xF00D_0000_0000_0000  # this and more: the newest lease or ticket, the one before it, ...
_PLACES = 1 << 12
_SETTLE_S = 60.0
_SLICE = 5  # looks at chunks: a sweep has many slices
_LONGEST_WAIT_S = 5.0
_GUARD = GuardSettings(
    get_timeout_s=0.1,
    put_timeout_s=0.2,
    lookup_timeout_s=0.05,
    breaker_failures=2,
    breaker_open_s=0.1,
    breaker_open_most_s=0.5,
)
KINDS = (
    Fault(Kind.SLOW, delay_s=0.04),
    Fault(Kind.SLOW, delay_s=1.0),
    Fault(Kind.ERROR),
    Fault(Kind.NEVER),
    Fault(Kind.FULL),
    Fault(Kind.MISSING),
    Fault(Kind.FLIPPED, place=4321),
    Fault(Kind.OTHER_KEY),
)
_CALLS = (m.Lookup, m.Stage, m.Commit, m.Forget, m.Ping, m.Query)


class Conn:
    """One stranger's connection: what server/rpc.py does with it, without a socket."""

    def __init__(self, rig: "Rig", *, provable: bool) -> None:
        self.rig = rig
        self.peer = PeerId(0)
        self.open = True
        self.role = Role.BOTH
        self.asked: Counter[int] = Counter()
        self.answered: Counter[int] = Counter()
        self._provable = provable
        self._reader = client_frames()

    def send(self, message: m.ServerMessage) -> None:
        """The server's answer."""
        self.rig.saw(message)
        frame = encode(message)  # what cannot be encoded cannot be sent
        assert frame
        seq = getattr(message, "seq", None)
        if seq is not None:
            self.answered[seq] += 1
            assert self.answered[seq] <= self.asked[seq], f"{message!r} answers nothing"

    def feed(self, data: bytes) -> None:
        """Bytes arrive; what is no protocol ends the connection."""
        try:
            for message in self._reader.feed(data):
                if self.open:
                    self._serve(message)
        except ProtocolError as error:
            self.rig.note(f"protocol: {error}")
            self.end()

    def _serve(self, message: m.ClientMessage) -> None:
        service = self.rig.service
        if not self.peer:
            self._admit(message)
            return
        if isinstance(message, _CALLS):
            self.asked[message.seq] += 1
        self.rig.judge(self, message)
        service.receive(self.peer, message)

    def _admit(self, hello: m.ClientMessage) -> None:
        if not isinstance(hello, m.Hello):
            raise ProtocolError("the first message must be Hello")
        pid = 100 if self._provable else None
        answer = self.rig.service.hello(hello, self, pid=pid, provable=self._provable)
        self.rig.saw(answer)
        encode(answer)
        if isinstance(answer, m.Refused):
            self.open = False
            return
        self.peer, self.role = PeerId(answer.peer), Role(hello.role)

    def end(self) -> None:
        """The connection is over; its process lives on."""
        if self.open:
            self.open = False
            if self.peer:
                self.rig.service.closed(self.peer, "closed")

    def gone(self) -> None:
        """The process is over."""
        self.end()
        if self.peer:
            self.rig.service.gone(self.peer)
            self.peer = PeerId(0)


class Rig:
    """One server, its strangers and the engine that behaves."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.loop = loop
        self.seen: set[str] = set()
        self.ids: list[int] = []  # leases and tickets, newest last
        self.wrong: list[str] = []
        self.arena = bytearray(PAGES * PAGE_BYTES)
        self.words = [0] * PAGES
        self.plan = Switched()
        self.disk = FaultyBackend(self.plan, later=True)
        self._ids = 0
        limits = Limits(
            backends=1, lookup_wait_s=0.3, session_staging_fraction=0.5, quarantine_s=0.5
        )
        self.directory = Directory(self.words, self._new_id, limits=limits)
        store = compose(self.disk, settings=_GUARD, log=self._log, offload=_at_once)
        self.io = Io([store], memoryview(self.arena), clock=loop.time, log=self._log)
        self.service = Service(
            self.directory,
            epoch=Epoch(1),
            capacity_bytes=len(self.arena),
            clock=loop.time,
            log=self._log,
            io=self.io,
            later=partial(loop.call_later, 0.001),
        )
        self.service.sweeps.slice = _SLICE
        book = QuotaBook(QuotaConfig(default_l1="60%"))
        quotas = Quotas(
            book, self.directory, apply=self.service.apply, stores=[store], log=self._log
        )
        quotas.start()
        self.service.overview.quotas = quotas
        self._conns: dict[int, Conn] = {}
        self._all: list[Conn] = []
        self.good = Good(self)
        loop.set_exception_handler(self._callback_failed)

    async def begin(self) -> None:
        """Memory is there, and so is the engine that behaves."""
        self.service.grown(len(self.arena))
        await self.good.begin()

    async def take(self, step: Step) -> None:
        """One step of the script; what is no step means nothing."""
        if len(step) != 3 or not isinstance(step[0], int) or not isinstance(step[1], str):
            return
        conn = self._conn(step[0] % 4)
        what, argument = step[1], step[2]
        match what:
            case "say":
                self._say(conn, argument)
            case "raw" if isinstance(argument, bytes):
                conn.feed(argument)
            case "end":
                conn.end()
            case "gone":
                conn.gone()
            case "wait" if isinstance(argument, float) and argument >= 0:
                await self._pass(min(argument, _LONGEST_WAIT_S))
            case "disk" if isinstance(argument, int):
                self.plan.fault = KINDS[argument % len(KINDS)] if argument >= 0 else None
        await asyncio.sleep(0.001)
        self.check()

    async def finish(self) -> None:
        """Every stranger is gone and L2 works: nothing is held for them, all calls are answered."""
        self.disk.plan = NoFaults()
        self.disk.unstick()
        until_s = self.loop.time() + _SETTLE_S
        while not self._quiet():
            assert self.loop.time() < until_s, f"something does not end: {self._left()}"
            await self._pass(0.25)
        for conn in self._all:
            if conn.open:
                assert conn.answered == conn.asked, "a call was not answered"
            conn.gone()
        while self._held():
            assert self.loop.time() < until_s, f"held for nobody: {self._held()}"
            await self._pass(0.25)
        self.check()
        await self.good.ends()
        self.check()
        await self.io.close()

    def check(self) -> None:
        """What must be true at any time."""
        assert not self.wrong, self.wrong[0]
        audit.check(self.directory)
        self.good.keeps()

    # ---- what the strangers do

    def _conn(self, number: int) -> Conn:
        """A connection that is over makes room for a new one of that number."""
        conn = self._conns.get(number)
        if conn is None or not conn.open:
            conn = self._conns[number] = Conn(self, provable=number != 2)
            self._all.append(conn)
        return conn

    def _say(self, conn: Conn, value: Value) -> None:
        try:
            body = msgspec.msgpack.encode(self._meant(value))
        except (OverflowError, ValueError, RecursionError):
            return  # nobody could send it
        conn.feed(len(body).to_bytes(4, "little") + body)

    def _meant(self, value: Value) -> Value:
        """With real numbers of leases."""
        if isinstance(value, list):
            return [self._meant(part) for part in value]
        if isinstance(value, int) and LEASE <= value < LEASE + _PLACES and self.ids:
            return self.ids[-1 - (value - LEASE) % len(self.ids)]
        return value

    def judge(self, conn: Conn, message: m.ClientMessage) -> None:
        """Notice what a stranger may do to others."""
        match message:
            case m.Query(what="clear" | "quota_set") if conn.role is Role.OPERATOR:
                self.good.disturbed = True
            case m.Drop():
                self.good.disturbed |= self.good.knows(message.hashes)

    def saw(self, message: m.ServerMessage) -> None:
        """Remember what was handed out, and that this kind of answer was met."""
        match message:
            case m.Granted():
                self.ids += message.leases
                self.seen.add(f"granted {sorted(set(message.outcomes))}")
            case m.Found() | m.Resolved():
                self.ids += [message.lease] if message.lease else []
                some = bool(message.chunks), sorted(set(message.reasons))
                self.seen.add(f"{type(message).__name__} {some}")
            case m.Pending():
                self.ids.append(message.ticket)
            case m.Committed():
                self.seen.add(f"committed {sorted(set(message.outcomes))}")
            case m.Refused() | m.Failed() | m.Problem():
                self.note(f"{type(message).__name__}: {message.text}")
        self.seen.add(type(message).__name__)

    def note(self, text: str) -> None:
        """A kind of text."""
        letters = "".join(c for c in text if c.isalpha() or c == " ")
        self.seen.add(letters[:60])

    # ---- the server's surroundings

    def _new_id(self) -> int:
        self._ids += 1
        return int.from_bytes(blake3(self._ids.to_bytes(8, "little")).digest(8), "little") | 1

    def _log(self, event: str, **fields: object) -> None:
        if event in ("io_broken", "invariant_broken"):
            self.wrong.append(f"{event}: {fields}")

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.wrong.append(repr(context.get("exception") or context["message"]))

    async def _pass(self, seconds: float) -> None:
        until_s = self.loop.time() + seconds
        while self.loop.time() < until_s:
            await asyncio.sleep(min(0.25, seconds))
            self.service.tick()

    def _quiet(self) -> bool:
        d = self.directory
        answered = all(conn.answered == conn.asked for conn in self._all if conn.open)
        moving = d.fetcher.tickets or d.fetcher.flights.fetches or not d.persister.idle
        return answered and not moving and not self.disk.hanging

    def _left(self) -> str:
        d = self.directory
        missing = [dict(conn.asked - conn.answered) for conn in self._all if conn.open]
        return (
            f"unanswered {missing}, {len(d.fetcher.tickets)} lookups, "
            f"{len(d.fetcher.flights.fetches)} fetches, persister idle: {d.persister.idle}"
        )

    def _held(self) -> dict[str, object]:
        """What is neither free, resident nor the good engine's."""
        d = self.directory
        waiting = (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED)
        held: dict[str, object] = {s.name: d.slots.bytes_in[s] for s in waiting}
        held["sessions"] = sorted(set(d.sessions) - {self.good.session})
        held["peers"] = len(d.peers) - 1
        held["read"] = d.slots.reserved_bytes - self.good.reserved_bytes()
        return {name: what for name, what in held.items() if what}


async def _at_once(job: Callable[[], list[bytes]]) -> list[bytes]:
    return job()
