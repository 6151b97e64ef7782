"""The only caller of the core: turns messages into events, and replies and effects into messages.

No sockets, no loop: a connection is a `Link` with `send`, time comes from `clock`. The simulator
runs this very code. Decides nothing about KV; keeps the names that people see.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvkeep import __version__
from kvkeep.core import events as ev
from kvkeep.core.audit import check
from kvkeep.core.directory import Directory
from kvkeep.server.io import Io
from kvkeep.server.operators import Client, Link, Operators
from kvkeep.server.overview import Log, Overview
from kvkeep.server.relief import Relief, is_stopped
from kvkeep.server.sweeps import Later, Sweeps
from kvkeep.server.timeline import Record, Timeline
from kvkeep.server.watchdog import Watchdog
from kvkeep.types import (
    HASH_BYTES,
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Epoch,
    Fingerprint,
    IoOutcome,
    LeaseId,
    PeerId,
    Role,
    StageOutcome,
    TicketId,
)
from kvkeep.wire import messages as m

PENDING_SINCE = 2  # the protocol version that knows pending lookups
MOST_PENDING = 4_096  # lookups of one session that may wait for L2
CHECK_IDLE_S = 5.0  # without a message for so long, the invariants are verified
CHECK_MOST_SLOTS = 1_000  # ever used: more would keep the loop busy for too long

_STORED_ALREADY = {StageOutcome.RESIDENT, StageOutcome.IN_PROGRESS}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Who waits for a pending lookup."""

    client: Client
    request: str


class Service:
    """Messages in, messages out, for all connections of one server epoch."""

    def __init__(
        self,
        directory: Directory,
        *,
        epoch: Epoch,
        capacity_bytes: int,
        clock: Callable[[], float],
        log: Log,
        wall_clock: Callable[[], float] | None = None,
        io: Io | None = None,
        stopped: Callable[[int], bool] = is_stopped,
        later: Later | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        """`wall_clock`: seconds since 1970, for people; without it `clock` stands in.

        `io` carries out what concerns L2; without it there is none. `later` runs something when
        the loop has served what is ready; without it nothing is sliced.
        """
        self.directory = directory
        self.epoch = epoch
        self.capacity_bytes = capacity_bytes
        self.timeline = Timeline()
        self.clients: dict[PeerId, Client] = {}
        self.counters: Counter[str] = Counter()
        self.stopping = False  # operators are served, engines are not
        self.backends = tuple(store.name for store in io.stores) if io is not None else ()
        self.overview = Overview(
            directory,
            self.clients,
            epoch=epoch,
            capacity_bytes=capacity_bytes,
            clock=clock,
            log=log,
            stores=lambda: io.statuses() if io is not None else [],
        )
        self.problems = self.overview.problems
        self.watchdog = watchdog or Watchdog()
        self.overview.loop = self.watchdog.status
        self.most_pending = MOST_PENDING
        self._io = io
        self._clock = clock
        self._wall_clock = wall_clock or clock
        self._log = log
        self._pending: dict[TicketId, _Waiting] = {}
        self._early: dict[TicketId, ev.Hit] = {}  # answered before the lookup's own call returned
        self._pending_of: Counter[str] = Counter()  # session -> its pending lookups
        self._operators = Operators(self, clock, log)
        self.sweeps = Sweeps(self, log, later=later, rested=self._operators.tell_persisted)
        self._relief = Relief(directory.pressure, self.clients, clock, stopped=stopped)
        self._last_message_s = self._last_check_s = clock()
        if io is not None:
            io.attach(self._apply_io, self.sweeps.forgotten)

    # ---- connections

    def hello(
        self, hello: m.Hello, link: Link, *, pid: int | None, provable: bool = True
    ) -> m.Welcome | m.Refused:
        """Admit a connection or say why not. `provable`: its death can be proven (pidfd)."""
        version = next((v for v in m.VERSIONS if v in hello.versions), None)
        if version is None:
            ours = ", ".join(map(str, m.VERSIONS))
            theirs = ", ".join(map(str, hello.versions))
            return m.Refused(
                f"this server speaks protocol {ours}, the client speaks {theirs}: "
                "install the same kvkeep version (or the one before) on both sides"
            )
        if self.stopping and Role(hello.role) is not Role.OPERATOR:
            return m.Refused("the server is stopping; it is persisting what L2 does not have yet")
        peer = PeerId(self.directory.new_id())
        writes = hello.writes and provable
        join = ev.Join(
            session=hello.session,
            peer=peer,
            role=Role(hello.role),
            rank=hello.rank,
            world=hello.world,
            rows=hello.rows,
            fingerprint=Fingerprint(hello.fingerprint),
            writes=writes,
            dma=hello.dma,
            recompute=hello.recompute,
            confirms=PeerId(hello.confirms),
            model=hello.model,
        )
        self.clients[peer] = Client(peer, hello, link, pid, version=version)
        reply, effects = self.directory.handle(join, self._clock())
        if isinstance(reply, ev.JoinRefused):
            del self.clients[peer]
            self._log("refused", session=hello.session, pid=pid, why=reply.text)
            return m.Refused(reply.text)
        # What an earlier connection of this process still has under way would belong to nobody.
        self.clients.pop(PeerId(hello.confirms), None)
        if Role(hello.role) is not Role.OPERATOR:
            self._log("joined", session=hello.session, role=Role(hello.role).name.lower(), pid=pid)
        self._carry_out(effects)
        return m.Welcome(
            version=version,
            epoch=self.epoch,
            peer=peer,
            arena_bytes=self.capacity_bytes,
            populated_bytes=self.directory.arena.populated_bytes,
            slots=len(self.directory.slots.generations),
            has_arena=hello.wants_arena and Role(hello.role) is not Role.OPERATOR,
            writable=writes,
            server=__version__,
            backends=self.backends,
            lookup_wait_ms=self.directory.limits.lookup_wait_s * 1e3,
        )

    def closed(self, peer: PeerId, why: str = "closed") -> None:
        """The connection ended; its process may live on."""
        client = self.clients.pop(peer, None)
        if client is not None and Role(client.hello.role) is not Role.OPERATOR:
            self._log("left", session=client.session, pid=client.pid, why=why)
        self.apply(ev.PeerClosed(peer))

    def gone(self, peer: PeerId, *, confirmed: bool = False) -> None:
        """The process is provably gone, or confirmed that it touches nothing any more."""
        self.apply(ev.PeerGone(peer, confirmed))

    def grown(self, populated_bytes: int) -> None:
        """More of the arena is populated."""
        self.apply(ev.Grown(populated_bytes))
        for client in self.clients.values():
            if client.hello.wants_arena:
                client.link.send(m.Grown(populated_bytes))

    @property
    def idle_s(self) -> float:
        """How long ago the last message came."""
        return self._clock() - self._last_message_s

    def stop(self) -> None:
        """The server ends soon: take no engine any more, and persist what L2 lacks."""
        self.stopping = True
        self.problems["stopping"] = "the server is stopping: it persists what L2 does not have yet"
        self.apply(ev.Drain(self.sweeps.sliced))

    def tick(self) -> None:
        """Time passed. A server with nothing to do verifies the core's invariants."""
        self.apply(ev.Tick())
        self.overview.forget_problems()
        now = self._clock()
        self._operators.tell_persisted()
        idle = now - max(self._last_message_s, self._last_check_s) > CHECK_IDLE_S
        if idle and len(self.directory.slots.state) <= CHECK_MOST_SLOTS:
            self._last_check_s = now
            try:
                check(self.directory)
            except AssertionError as error:  # our bug: visible, and the cache goes on
                self.problems["invariant"] = f"an invariant is broken: {error}; report this"
                self._log("invariant_broken", what=str(error))

    # ---- messages

    def receive(self, peer: PeerId, message: m.ClientMessage) -> None:
        """Serve one message of a connection that said Hello. Every call gets one reply."""
        client = self.clients.get(peer)
        if client is None:
            return
        self._last_message_s = self._clock()
        match message:
            case m.Lookup() | m.Stage() if not _whole_hashes(message):
                what = type(message).__name__
                why = f"{what}: the hashes must have a multiple of {HASH_BYTES} bytes"
                client.link.send(m.Failed(message.seq, why))
            case m.Lookup():
                client.link.send(self._lookup(client, message))
            case m.Cancel():
                ticket = TicketId(message.ticket)
                if self.apply(ev.Cancel(client.session, ticket)) == ev.Done(1):
                    self._not_pending(ticket)
            case m.End():
                self._end(client, message)
            case m.Stage():
                client.link.send(self._stage(client, message))
            case m.Commit():
                client.link.send(self._commit(client, message))
            case m.Abort():
                leases = tuple(map(LeaseId, message.leases))
                self.apply(ev.Abort(client.session, leases, message.confirmed))
            case m.Drop():
                self.apply(ev.Drop(client.session, message.hashes))
            case m.Forget():
                session = self.directory.sessions.get(client.session)
                self.sweeps.forget(client, message, session)
            case m.Note():
                record = self._record(client, message.request)
                record.prompt_tokens = record.prompt_tokens or message.prompt_tokens
                record.add(self._clock(), message.event)
            case m.Ping():
                client.max_wait_ms = max(client.max_wait_ms, message.max_wait_ms)
                client.link.send(m.Pong(message.seq))
            case m.Query():
                self._operators.ask(client, message)
            case m.Bye():
                self.gone(peer, confirmed=True)
            case m.Hello():
                client.link.send(m.Problem("a connection says Hello once"))

    def _lookup(self, client: Client, message: m.Lookup) -> m.Found | m.Pending:
        fetch = message.fetch and client.version >= PENDING_SINCE
        if fetch and self._pending_of[client.session] >= self.most_pending:
            self.counters["lookups_over_bound"] += 1
            fetch = False  # what L1 has is said at once
        event = ev.Lookup(
            client.session,
            message.request,
            message.hashes,
            message.salt or None,  # an empty one is none: the same tenant
            message.near,
            fetch,
            message.wait_ms / 1e3 if message.wait_ms >= 0 else None,
        )
        reply = self.apply(event)
        self.counters["lookups"] += 1
        record = self._record(client, message.request)
        record.ended = False
        record.prompt_tokens = message.prompt_tokens
        if isinstance(reply, ev.Pending):
            hit = self._early.pop(reply.ticket, None)
            if hit is None:
                record.add(self._clock(), "lookup: L2 may have more")
                self._pending[reply.ticket] = _Waiting(client, message.request)
                self._pending_of[client.session] += 1
                return m.Pending(message.seq, reply.ticket)
        else:
            assert isinstance(reply, ev.Hit)
            hit = reply
        self._record_hit(client, message.request, hit)
        return m.Found(
            message.seq, hit.lease, hit.chunks, hit.columns, bytes(hit.reasons), hit.tiers
        )

    def _resolve(self, effect: ev.Answered) -> None:
        """The answer of a pending lookup: pushed, or part of the lookup's own reply."""
        waiting = self._not_pending(effect.ticket)
        if waiting is None:
            self._early[effect.ticket] = effect.hit
            return
        hit, client = effect.hit, waiting.client
        self._record_hit(client, waiting.request, hit)
        if client.peer in self.clients:
            reasons = bytes(hit.reasons)
            client.link.send(
                m.Resolved(effect.ticket, hit.lease, hit.chunks, hit.columns, reasons, hit.tiers)
            )
        elif hit.lease:  # nobody is left who would end it
            ranks = tuple(range(client.hello.world))
            self.apply(ev.End(client.session, hit.lease, ranks, EndOutcome.UNUSED))

    def _not_pending(self, ticket: TicketId) -> _Waiting | None:
        waiting = self._pending.pop(ticket, None)
        if waiting is not None:
            session = waiting.client.session
            self._pending_of[session] -= 1
            if not self._pending_of[session]:
                del self._pending_of[session]
        return waiting

    def _record_hit(self, client: Client, request: str, hit: ev.Hit) -> None:
        reasons = bytes(hit.reasons)
        record = self._record(client, request)
        if hit.chunks and not hit.lease:  # no hit yet: nothing is reserved
            of = hit.chunks + len(reasons)
            text = f"lookup: {hit.chunks} of {of} chunks may serve; asked again when it is its turn"
            record.add(self._clock(), text)
            return
        tiers = hit.tiers or bytes(hit.chunks)
        record.hit_chunks, record.reasons, record.tiers = hit.chunks, reasons, tiers
        record.chunk_tokens = client.hello.chunk_tokens
        text = f"lookup: {hit.chunks} of {hit.chunks + len(reasons)} chunks"
        places = [(tiers.count(0), "in L1")]
        places += [(tiers.count(1 + n), f"from {name}") for n, name in enumerate(self.backends)]
        said = ", ".join(f"{count} {place}" for count, place in places if count)
        record.add(self._clock(), f"{text} ({said})" if said else text)
        self.counters["hit_chunks"] += hit.chunks
        for number, name in enumerate(self.backends):
            self.counters[f"hit_from_{name}"] += tiers.count(1 + number)
        for code in set(reasons):
            self.counters[f"miss_{code}"] += reasons.count(code)

    def _end(self, client: Client, message: m.End) -> None:
        outcome = EndOutcome(message.outcome)
        event = ev.End(client.session, LeaseId(message.lease), message.ranks, outcome)
        self.apply(event)
        if not message.request:
            return
        now = self._clock()
        record = self._record(client, message.request)
        record.ended = True
        record.device_tokens, record.loaded_tokens = message.device_tokens, message.loaded_tokens
        record.saved_ms = message.saved_ms
        text = f"released: {outcome.name.lower()}"
        if outcome is EndOutcome.UNUSED and record.hit_chunks and message.device_tokens:
            text = "in L1, not needed: the engine's own cache had it"
        if message.loaded_tokens:
            text = f"loaded {message.loaded_tokens} tokens in {message.load_ms:.1f} ms"
        record.add(now, text)
        self.counters["loaded_tokens"] += message.loaded_tokens
        self.counters["device_tokens"] += message.device_tokens

    def _stage(self, client: Client, message: m.Stage) -> m.Granted:
        items = tuple(
            ev.StageItem(i.request, ChunkHash(i.parent), i.hashes, i.salt or None, i.first)
            for i in message.items
        )
        done = self.apply(ev.Stage(client.session, items))
        assert isinstance(done, ev.Staged)
        self._record_staged(client, items, done.outcomes)
        return m.Granted(
            message.seq,
            bytes(done.outcomes),
            done.leases,
            done.columns,
            done.largest_free_bytes,
        )

    def _commit(self, client: Client, message: m.Commit) -> m.Committed:
        leases = tuple(map(LeaseId, message.leases))
        session = self.directory.sessions.get(client.session)
        open_now = session.writes_open if session is not None else {}
        requests = [open_now[i].request if i in open_now else "" for i in leases]
        done = self.apply(ev.Commit(client.session, leases))
        assert isinstance(done, ev.Committed)
        pairs = zip(requests, done.outcomes, strict=True)
        stored = Counter(r for r, outcome in pairs if r and outcome is CommitOutcome.COMMITTED)
        now = self._clock()
        for request, chunks in stored.items():
            noun = "chunk" if chunks == 1 else "chunks"
            self._record(client, request).add(now, f"stored {chunks} {noun}")
        return m.Committed(message.seq, bytes(done.outcomes))

    # ---- what people see of a request

    def _record(self, client: Client, request: str) -> Record:
        """Where to write about it. An operator's own requests leave no trace."""
        now, at = self._clock(), self._wall_clock()
        if Role(client.hello.role) is Role.OPERATOR:
            return Record(client.session, request, now, at)
        return self.timeline.record(client.session, request, now, at)

    def _record_staged(
        self, client: Client, items: tuple[ev.StageItem, ...], outcomes: tuple[StageOutcome, ...]
    ) -> None:
        counts: dict[str, Counter[StageOutcome]] = {}
        start = 0
        for item in items:
            end = start + len(item.hashes) // HASH_BYTES
            counts.setdefault(item.request, Counter()).update(outcomes[start:end])
            start = end
        now = self._clock()
        for request, count in counts.items():
            if request and not count.keys() <= _STORED_ALREADY:
                parts = (f"{n} {outcome.name.lower()}" for outcome, n in sorted(count.items()))
                self._record(client, request).add(now, "stage: " + ", ".join(parts))

    def status(self) -> dict[str, Any]:
        """The answer of `kvkeep status --json`."""
        with self.watchdog.entry("status"):
            return self.overview.status()

    def counts(self) -> dict[str, int]:
        """Every counter, the core's and our own."""
        residents = self.directory.residents
        evicted = {
            "evicted_chunks": residents.evicted_chunks,
            "evicted_bytes": residents.evicted_bytes,
        }
        lost = {
            "timeline_forgotten": self.timeline.forgotten,
            "discards_lost": self._io.discards_lost if self._io is not None else 0,
        }
        return {**self.directory.counters, **self.counters, **evicted, **lost}

    # ---- effects

    def apply(self, event: ev.Event) -> ev.Reply:
        """Hand an event to the core and carry out what follows."""
        reply, effects = self.directory.handle(event, self._clock())
        if effects:
            self._carry_out(effects)
        if (order := self._relief.order()) is not None:
            self.apply(order)
        self.sweeps.carry_on()
        return reply

    def _apply_io(self, event: ev.Event) -> ev.Reply:
        """What I/O says: an entry of its own unless it is said within another one."""
        began_s = self.watchdog.begin()
        try:
            return self.apply(event)
        finally:
            self.watchdog.end("io", began_s)

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            push: m.ServerMessage
            match effect:
                case ev.Answered():
                    self._resolve(effect)
                    continue
                case ev.Swept():
                    self.sweeps.swept(effect)
                    continue
                case ev.ChunkPersisted():
                    self._record_persisted(effect)
                    continue
                case ev.SessionReady():
                    push = m.Ready(effect.fingerprint, effect.world, effect.rows)
                    self._log("session_ready", session=effect.session, world=effect.world)
                    self.overview.judge_chunk_size(self.directory.sessions[effect.session])
                case ev.SessionUnready():
                    push = m.Unready(effect.why)
                    self._log("session_unready", session=effect.session, why=effect.why)
                case ev.LeaseRevoked():
                    push = m.Revoked(effect.lease)
                case _:
                    assert self._io is not None, "an effect for L2 without any"
                    self._io.carry_out(effect)
                    continue
            for client in self.clients.values():
                schedules = client.hello.role in (Role.SCHEDULER, Role.BOTH)
                if client.session == effect.session and schedules:
                    client.link.send(push)

    def _record_persisted(self, effect: ev.ChunkPersisted) -> None:
        self._operators.tell_persisted()
        record = self.timeline.known(effect.session, effect.request)
        if record is None or not effect.request:
            return
        name, ok = self.backends[effect.backend], effect.outcome is IoOutcome.OK
        why = effect.outcome.name.lower()
        record.count(self._clock(), f"persisted to {name}" if ok else f"not in {name}: {why}")


def _whole_hashes(message: m.Lookup | m.Stage) -> bool:
    parts = [message.hashes] if isinstance(message, m.Lookup) else [i.hashes for i in message.items]
    return all(len(part) % HASH_BYTES == 0 for part in parts)
