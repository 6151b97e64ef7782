"""Nobody starves: frames are served in turn, and every wait has a bound. Counted, not timed."""

import asyncio
import hashlib
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
from tests.server.l2_world import NEVER, chunks, virtual, world

from kvkeep.config import LimitsConfig
from kvkeep.server.operators import MOST_WAITING
from kvkeep.server.rpc import SLICE_FRAMES, Connection, ControlServer
from kvkeep.server.watchdog import Watchdog
from kvkeep.testing.faulty_backend import FaultyBackend, Switched
from kvkeep.types import EndOutcome, PeerId, Role, StorePolicy
from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode

LOOKUP = encode(m.Lookup(1, "r", bytes(64)))
MOST = 5  # pending lookups, in these tests


def alone(name: str) -> bytes:
    """The hash of a chunk that nobody has stored."""
    return hashlib.sha256(name.encode()).digest()


@dataclass
class Server:
    """What a connection needs of its server; the service only notes who was served."""

    served: list[tuple[int, m.ClientMessage]] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    watchdog: Watchdog = field(default_factory=Watchdog)
    turns: deque[Callable[[], None]] = field(default_factory=deque)
    lost_peers: list[tuple[int, str]] = field(default_factory=list)

    @property
    def service(self) -> "Server":
        return self

    def receive(self, peer: PeerId, message: m.ClientMessage) -> None:
        self.served.append((peer, message))

    def later(self, action: Callable[[], None]) -> None:
        self.turns.append(action)

    def lost(self, connection: Connection) -> None:
        self.lost_peers.append((connection.peer, connection.why))

    def turn(self) -> None:
        """What the loop does next: each waiting connection once."""
        for _ in range(len(self.turns)):
            self.turns.popleft()()

    def connect(self, peer: int) -> tuple[Connection, "Transport"]:
        connection, transport = Connection(cast(ControlServer, self)), Transport()
        connection.peer = PeerId(peer)
        connection.connection_made(cast(asyncio.Transport, transport))
        return connection, transport

    def of(self, peer: int) -> int:
        return sum(who == peer for who, _ in self.served)


@dataclass
class Transport:
    """Whether it is being read from."""

    reads: bool = True
    aborted: bool = False

    def pause_reading(self) -> None:
        assert self.reads
        assert not self.aborted
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        assert not self.aborted
        self.reads = True

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def set_write_buffer_limits(self, high: int) -> None:
        pass


def test_a_flood_delays_another_lookup_by_one_slice_at_most() -> None:
    server = Server()
    flood, flooded = server.connect(1)
    other, _ = server.connect(2)
    flood.data_received(LOOKUP * 3000)
    assert 0 < server.of(1) <= SLICE_FRAMES
    assert not flooded.reads, "its memory is bounded: it is not read from"
    server.turn()
    before = server.of(1)
    other.data_received(LOOKUP)
    assert server.of(2) == 1, "served in its own turn, whatever waits of the other"
    assert before <= 2 * SLICE_FRAMES
    while server.turns:
        assert not flooded.reads
        server.turn()
    assert server.of(1) == 3000
    assert flooded.reads
    assert server.counters["connections_paused"] == 1


def test_two_floods_take_turns() -> None:
    server = Server()
    connections = [server.connect(peer)[0] for peer in (1, 2)]
    for connection in connections:
        connection.data_received(LOOKUP * 500)
    while server.turns:
        assert abs(server.of(1) - server.of(2)) <= SLICE_FRAMES
        server.turn()
    assert server.of(1) == server.of(2) == 500


def test_frames_keep_their_order_over_slices_and_reads() -> None:
    server = Server()
    connection, _ = server.connect(1)
    frames = b"".join(encode(m.Ping(n)) for n in range(1000))
    for start in range(0, len(frames), 777):
        connection.data_received(frames[start : start + 777])
        if start % 5 == 0:
            server.turn()
    while server.turns:
        server.turn()
    assert [cast(m.Ping, message).seq for _, message in server.served] == list(range(1000))


def test_what_follows_a_bad_frame_is_not_served() -> None:
    server = Server()
    connection, transport = server.connect(1)
    connection.data_received(LOOKUP * 300 + b"\xff" * 64 + LOOKUP * 300)
    while server.turns:
        server.turn()
    assert transport.aborted
    assert server.of(1) <= 300
    connection.connection_lost(None)
    assert "over the limit" in server.lost_peers[0][1]


def test_a_connection_that_is_dropped_is_not_served_further() -> None:
    server = Server()
    connection, transport = server.connect(1)
    connection.data_received(LOOKUP * 300)
    transport.abort()  # it does not read its answers
    server.turn()
    assert server.of(1) <= 2 * SLICE_FRAMES
    assert not server.turns


def test_a_connection_that_ended_has_no_more_turns() -> None:
    server = Server()
    connection, _ = server.connect(1)
    connection.data_received(LOOKUP * 300)
    served = server.of(1)
    connection.connection_lost(None)
    server.turn()
    assert server.of(1) == served
    assert not server.turns


# ---- bounds of what waits


@virtual
async def test_a_session_may_have_so_many_lookups_pending() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        raw.plan = Switched(NEVER, operation="contains")
        w.service.most_pending = MOST
        flood, other = w.join("flood"), w.join("other")
        for number in range(MOST + 3):
            w.tell(flood, m.Lookup(number, f"r{number}", alone(f"{number}")))
        kinds = Counter(type(message).__name__ for message in flood[1].sent)
        assert kinds == {"Ready": 1, "Pending": MOST, "Found": 3}
        assert w.service.counters["lookups_over_bound"] == 3
        w.tell(other, m.Lookup(1, "r", alone("one")))
        assert isinstance(other[1].sent[-1], m.Pending), "the bound is each session's own"
        ticket = await flood[1].next(m.Pending)
        w.tell(flood, m.Cancel(ticket.ticket))
        w.tell(flood, m.Lookup(99, "again", alone("one")))
        assert isinstance(flood[1].sent[-1], m.Pending), "one that ended makes room"
        await w.until(lambda: not w.directory.fetcher.tickets)
        assert not w.service._pending_of


@virtual
async def test_operators_that_wait_are_bounded() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine = w.join("engine")
        raw.plan = Switched(NEVER, operation="put")
        await w.store(engine, chunks(2))
        operator = w.join("", Role.OPERATOR)
        for seq in range(MOST_WAITING + 2):
            w.tell(operator, m.Query(seq, "wait_persisted", "5"))
        assert [type(message) for message in operator[1].sent] == [m.Failed, m.Failed]
        assert w.service.counters["waits_refused"] == 2
        w.service.tick()
        assert len(operator[1].sent) == 2


@pytest.mark.slow
@virtual
async def test_ten_thousand_requests_in_flight_are_all_answered() -> None:
    raw = FaultyBackend()
    async with world(raw, store_policy=StorePolicy.WRITE_BACK) as w:
        engine = w.join("engine")
        stored = chunks(2)
        await w.store(engine, stored)
        raw.plan = Switched(NEVER, operation="contains")
        seats = [w.join(f"s{n}") for n in range(10)]
        for number in range(10_000):
            asked = b"".join(stored) + alone(f"{number}")
            w.tell(seats[number % 10], m.Lookup(number, f"r{number}", asked))
        assert len(w.directory.fetcher.tickets) == 10_000
        tickets: set[int] = set()
        hits: Counter[int] = Counter()
        for seat in seats:
            tickets |= {p.ticket for p in seat[1].sent if isinstance(p, m.Pending)}
            while len([p for p in seat[1].sent if isinstance(p, m.Resolved)]) < 1000:
                await asyncio.sleep(0.1)
            for resolved in [p for p in seat[1].sent if isinstance(p, m.Resolved)]:
                tickets.remove(resolved.ticket)
                hits[resolved.chunks] += 1
                w.tell(seat, m.End(resolved.lease, (0,), EndOutcome.USED))
        assert not tickets
        assert hits == {2: 10_000}
        assert not w.directory.fetcher.tickets
        assert w.directory.slots.reserved_bytes == 0
        assert not w.service._pending_of


@pytest.mark.parametrize("number", [0, 5])
@virtual
async def test_forgets_that_wait_are_bounded(number: int) -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine = w.join("engine")
        raw.plan = Switched(NEVER, operation="forget")
        for seq in range(MOST_WAITING + number):
            w.tell(engine, m.Forget(seq))
        refused = [p for p in engine[1].sent if isinstance(p, m.Forgotten)]
        assert [p.seq for p in refused] == list(range(MOST_WAITING, MOST_WAITING + number))
        assert not any(p.done for p in refused)
        assert w.service.counters["forget_refused"] == number
