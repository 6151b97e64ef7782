"""Answers operators' questions: status, leases, explain, clear, wait_persisted, quota.

Also what the service knows of one connection, whoever it is. An answer that must wait (until L2 has
everything) is kept here and sent when it is true or its time is over.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from kvkeep.core import events as ev
from kvkeep.core.directory import Directory
from kvkeep.server.overview import Log, Overview
from kvkeep.server.timeline import Timeline
from kvkeep.types import PeerId, Role
from kvkeep.wire import messages as m

PERSIST_WAIT_S = 30.0  # without an argument
MOST_WAITING = 64  # questions that wait for their answer, of each kind
_NOT_PERSISTED = ("persist_overflow", "persist_lost", "persist_failed")


class Link(Protocol):
    """How the service answers one connection."""

    def send(self, message: m.ServerMessage) -> None:
        """Queue one message; never blocks, never raises."""


class Client:
    """What the service knows of one connection."""

    __slots__ = ("hello", "link", "max_wait_ms", "peer", "pid", "session", "version")

    def __init__(
        self, peer: PeerId, hello: m.Hello, link: Link, pid: int | None, *, version: int
    ) -> None:
        self.peer = peer
        self.hello = hello
        self.link = link
        self.pid = pid
        self.version = version  # of the protocol, as agreed
        self.session = hello.session
        self.max_wait_ms = 0.0


class Sweeping(Protocol):
    """What empties L1 and has it persisted, by and by."""

    @property
    def sliced(self) -> bool:
        """Whether that is done in slices."""

    def clear(self, *, force: bool, then: Callable[[int], None]) -> None:
        """Empty L1; `then` gets the number of chunks."""


class Served(Protocol):
    """What the questions are about."""

    directory: Directory
    overview: Overview
    timeline: Timeline
    backends: tuple[str, ...]
    counters: Counter[str]

    @property
    def sweeps(self) -> Sweeping:
        """What takes longer than one callback may."""

    @property
    def clients(self) -> Mapping[PeerId, Client]:
        """Every connection."""

    def apply(self, event: ev.Event) -> ev.Reply:
        """Hand an event to the core."""


class Operators:
    """The questions of one server epoch."""

    def __init__(self, served: Served, clock: Callable[[], float], log: Log) -> None:
        self._served = served
        self._clock = clock
        self._log = log
        self._clearing = 0  # questions that wait for their end
        self._until_persisted: list[tuple[Client, int, float]] = []  # who, seq, until when

    def ask(self, client: Client, message: m.Query) -> None:
        """Answer now, or later."""
        answer = self._query(client, message)
        if answer is not None:
            client.link.send(answer)

    def _query(self, client: Client, message: m.Query) -> m.Answer | m.Failed | None:
        """None: the answer comes later."""
        served = self._served
        if Role(client.hello.role) is not Role.OPERATOR:
            return m.Failed(message.seq, "only an operator connection may ask this")
        match message.what:
            case "status":
                body: object = served.overview.status()
            case "leases":
                body = served.overview.leases()
            case "wait_persisted":
                return self._wait_persisted(client, message)
            case "quota" | "quota_set" | "quota_unset" if served.overview.quotas is not None:
                served.overview.quotas.ask(message, client.link.send)
                return None
            case "clear" if message.argument not in ("", "force"):
                why = f"clear takes no argument or 'force', not {message.argument[:64]!r}"
                return m.Failed(message.seq, why)
            case "clear":
                return self._clear(client, message)
            case "explain":
                try:
                    body = served.timeline.explain(message.argument, served.backends)
                except KeyError as error:
                    return m.Failed(message.seq, str(error.args[0]))
            case _:
                return m.Failed(message.seq, f"unknown question {message.what!r}")
        return m.Answer(message.seq, msgspec.json.encode(body).decode())

    def _clear(self, client: Client, message: m.Query) -> m.Failed | None:
        """Answered when everything has left L1."""
        if self._clearing >= MOST_WAITING:
            return self._too_many(message)
        force = message.argument == "force"
        self._clearing += 1

        def cleared(chunks: int) -> None:
            self._clearing -= 1
            self._log("cleared", chunks=chunks, force=force)
            body = {"cleared_chunks": chunks, "status": self._served.overview.status()}
            if client.peer in self._served.clients:
                client.link.send(m.Answer(message.seq, msgspec.json.encode(body).decode()))

        self._served.sweeps.clear(force=force, then=cleared)
        return None

    def _too_many(self, message: m.Query) -> m.Failed:
        self._served.counters["waits_refused"] += 1
        why = f"{MOST_WAITING} operators wait for the end of {message.what} already: ask later"
        return m.Failed(message.seq, why)

    def _wait_persisted(self, client: Client, message: m.Query) -> m.Failed | None:
        """Have what L2 lacks written, under write_back too, and wait for that."""
        try:
            wait_s = float(message.argument or PERSIST_WAIT_S)
        except ValueError:
            return m.Failed(message.seq, f"{message.argument[:64]!r} is no number of seconds")
        if not self._served.backends:
            why = "this server has no L2: what it holds ends with it; start it with --l2 URL"
            return m.Failed(message.seq, why)
        if len(self._until_persisted) >= MOST_WAITING:
            return self._too_many(message)
        self._served.apply(ev.Drain(self._served.sweeps.sliced))
        self._until_persisted.append((client, message.seq, self._clock() + wait_s))
        self.tell_persisted()
        return None

    def tell_persisted(self) -> None:
        """Answer those who wait for L2, when it has everything or their time is over."""
        if not self._until_persisted:
            return
        now = self._clock()
        directory = self._served.directory
        persister, counters = directory.persister, directory.counters
        idle = persister.idle
        left: list[tuple[Client, int, float]] = []
        for client, seq, until_s in self._until_persisted:
            if client.peer not in self._served.clients:
                continue
            if not idle and now < until_s:
                left.append((client, seq, until_s))
                continue
            missing = persister.missing()
            body = {
                "done": idle and not missing,
                "missing_chunks": missing,
                "queued_bytes": persister.queued_bytes,
                "running": len(persister.running),
                "evicted_objects": self._served.overview.l2_evicted(),
                **{name: counters[name] for name in _NOT_PERSISTED},
            }
            client.link.send(m.Answer(seq, msgspec.json.encode(body).decode()))
        self._until_persisted = left
