"""What may go wrong in the safety phase, one class per kind; a seed has some of them.

A later part adds a fault by one class and one entry in `FAULTS`.
"""

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kvkeep.testing.fake_client import FakeClient
from kvkeep.testing.faulty_backend import Fault as L2Fault
from kvkeep.testing.knobs import PAGE_BYTES
from kvkeep.testing.sim_storage import OUTAGES
from kvkeep.types import EndOutcome
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from kvkeep.testing.world import World

_BUSY_S = 1.5
_BAD_FRAME = b"\xff" * 8  # a length over every limit


class Fault(Protocol):
    """One kind of misfortune."""

    def maybe(self, rng: random.Random, world: "World") -> None:
        """Strike, or not; called every few virtual milliseconds."""


class Sometimes(ABC):
    """A fault that strikes at a rate per call."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def maybe(self, rng: random.Random, world: "World") -> None:
        """Strike at the rate."""
        if rng.random() < self.rate:
            world.struck[type(self).__name__] += 1
            self.strike(rng, world)

    @abstractmethod
    def strike(self, rng: random.Random, world: "World") -> None:
        """Do the harm."""


class LoseConnection(Sometimes):
    """A connection breaks, in the middle of a message; its process lives on and copies on."""

    def strike(self, rng: random.Random, world: "World") -> None:
        clients = _clients(world)
        asking = [client for client in clients if client.calls]
        if asking and rng.random() < 0.5:
            clients = asking
        if clients:
            rng.choice(clients).lose(cut=True)
            _maybe_busy(rng, world)


class SpoilFrame(Sometimes):
    """A client sends what is no frame: the server ends that connection."""

    def strike(self, rng: random.Random, world: "World") -> None:
        ends = [client.end for client in _clients(world) if client.up]
        if ends:
            end = rng.choice(ends)
            assert end is not None
            end.send(_BAD_FRAME)


class KillProcess(Sometimes):
    """A process of an engine dies in the middle of whatever it does."""

    def strike(self, rng: random.Random, world: "World") -> None:
        engines = world.engines.values()
        processes = [p for e in engines for p in e.processes if p.alive]
        workers = [w for e in engines for w in e.workers if w.client.process.alive]
        storing = [w.client.process for w in workers if w.storing]
        if storing and rng.random() < 0.7:
            rng.choice(storing).kill()
        elif processes:
            rng.choice(processes).kill()


class StopEngine(Sometimes):
    """All of an engine is stopped for a while; others may take what it reads."""

    def strike(self, rng: random.Random, world: "World") -> None:
        engines = [engine for engine in world.engines.values() if engine.processes]
        if engines:
            for_s = rng.choice((0.1, 1.0, 5.0))
            for process in rng.choice(engines).processes:
                process.stop(for_s)


class KillServer(Sometimes):
    """The server dies, and is back a little later with another epoch and arena."""

    def strike(self, rng: random.Random, world: "World") -> None:
        if world.host.service is not None:
            world.host.kill()
            _maybe_busy(rng, world)
            world.loop.call_later(rng.random() * 0.5, world.host.start)


class StopServer(Sometimes):
    """The server is stopped for a while."""

    def strike(self, rng: random.Random, world: "World") -> None:
        world.host.stop(rng.choice((0.02, 0.2, 3.0)))


class Revoke(Sometimes):
    """A read lease ends against its reader's will, in the middle of its copy."""

    def strike(self, rng: random.Random, world: "World") -> None:
        if world.host.service is None:
            return
        sessions = world.host.directory.sessions.values()
        leases = [lease for session in sessions for lease in session.reads_open]
        if leases:
            world.host.revoke(rng.choice(leases))


class Operate(Sometimes):
    """An operator looks around and clears, also by force."""

    def strike(self, rng: random.Random, world: "World") -> None:
        what, argument = rng.choice(
            (
                ("clear", ""),
                ("clear", "force"),
                ("clear", "force"),
                ("status", ""),
                ("leases", ""),
                ("quota", ""),
                ("explain", ""),
                ("nonsense", ""),
            )
        )
        world.spawn(self._ask(world, what, argument))

    async def _ask(self, world: "World", what: str, argument: str) -> None:
        call = await world.operator.call(lambda seq: m.Query(seq, what, argument))
        if call is not None:
            failed = isinstance(call.reply, m.Failed)
            assert failed == (what == "nonsense") or what == "explain"


class Limit(Sometimes):
    """An operator gives a tenant another limit, or takes it away."""

    def strike(self, rng: random.Random, world: "World") -> None:
        salt = rng.choice(("", "a"))
        limit = rng.choice(("0", "12.5%", "25%", "60%", "100%", f"{3 * PAGE_BYTES}B"))
        order = {"salt": salt} if rng.random() < 0.3 else {"salt": salt, "l1": limit}
        what = "quota_set" if "l1" in order else "quota_unset"
        world.spawn(self._ask(world, what, json.dumps(order)))

    async def _ask(self, world: "World", what: str, argument: str) -> None:
        await world.operator.call(lambda seq: m.Query(seq, what, argument))


class Empty(Sometimes):
    """L1 is cleared: what is wanted again comes from L2."""

    def strike(self, rng: random.Random, world: "World") -> None:
        world.host.clear()


class Restart(Sometimes):
    """The server is told to end: it drains to L2 for a while, then another one starts."""

    def strike(self, rng: random.Random, world: "World") -> None:
        service = world.host.service
        if service is None:
            return
        world.host.drain()

        def end() -> None:
            if world.host.service is service and not world.finishing:
                world.host.kill()
                world.loop.call_later(rng.random() * 0.2, world.host.start)

        world.loop.call_later(rng.random() * 0.5, end)


class Outage(Sometimes):
    """An L2 fails at everything for a while."""

    def strike(self, rng: random.Random, world: "World") -> None:
        if not world.disks:
            return
        disk = rng.choice(world.disks)
        fault = L2Fault(rng.choice(OUTAGES), delay_s=rng.random())
        disk.plan.outage = fault

        def over() -> None:
            if disk.plan.outage is fault:
                disk.plan.outage = None

        world.loop.call_later(rng.choice((0.1, 1.0, 3.0)) * rng.random(), over)


class DamageL2(Sometimes):
    """Bytes in an L2 change while nobody looks."""

    def strike(self, rng: random.Random, world: "World") -> None:
        if world.disks:
            rng.choice(world.disks).damage()


class Unstick(Sometimes):
    """What hung in an L2 goes on: late calls return, long after their deadline."""

    def strike(self, rng: random.Random, world: "World") -> None:
        if world.disks:
            rng.choice(world.disks).backend.unstick()


class Misuse(Sometimes):
    """Messages about leases that nobody has, or from who may not ask: refused, nothing changes."""

    def strike(self, rng: random.Random, world: "World") -> None:
        number = world.new_id()
        client = rng.choice([world.operator, *_clients(world)])
        client.notify(m.End(number, (0, 1, 7), EndOutcome.USED))
        client.notify(m.Abort((number,)))
        client.notify(m.Cancel(number))
        client.notify(m.Note("r", "a note"))
        world.spawn(self._ask(client, number))

    async def _ask(self, client: FakeClient, number: int) -> None:
        call = await client.call(lambda seq: m.Commit(seq, (number, number)))
        if call is not None:
            assert isinstance(call.reply, m.Committed)


FAULTS: tuple[tuple[Callable[[float], Fault], float], ...] = (  # with the most it strikes per call
    (LoseConnection, 0.15),
    (SpoilFrame, 0.1),
    (KillProcess, 0.1),
    (StopEngine, 0.05),
    (KillServer, 0.015),
    (StopServer, 0.05),
    (Revoke, 0.3),
    (Operate, 0.15),
    (Misuse, 0.1),
    (Restart, 0.01),
    (Empty, 0.15),
    (Limit, 0.1),
    (Outage, 0.01),
    (DamageL2, 0.2),
    (Unstick, 0.05),
)
_ENABLED = 0.6


def drawn(rng: random.Random) -> list[Fault]:
    """A random subset, each at a random rate."""
    rates = (1.0, 0.5, 0.1)
    return [make(most * rng.choice(rates)) for make, most in FAULTS if rng.random() < _ENABLED]


def _maybe_busy(rng: random.Random, world: "World") -> None:
    """Schedulers stall: they dispatch old handles after their workers are back."""
    if rng.random() < 0.5:
        world.busy_until_s = world.loop.time() + rng.random() * _BUSY_S


def _clients(world: "World") -> list[FakeClient]:
    """Clients with a connection, in an order that depends on the seed alone."""
    return [c for e in world.engines.values() for c in e.clients if c.end is not None]
