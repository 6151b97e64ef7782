"""The only caller of the core: turns messages into events, and replies and effects into messages.

No sockets, no loop: a connection is a `Link` with `send`, time comes from `clock`. The simulator
runs this very code. Decides nothing about KV; keeps the names that people see.
"""

from collections import Counter
from collections.abc import Callable
from math import ceil
from typing import Any, Protocol

import msgspec

from kvkeep import __version__
from kvkeep.core import events as ev
from kvkeep.core.audit import check
from kvkeep.core.directory import Directory
from kvkeep.core.leases import ReadLease, Session, WriteLease
from kvkeep.limits import format_bytes
from kvkeep.server.timeline import Record, Timeline
from kvkeep.types import (
    HASH_BYTES,
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Epoch,
    Fingerprint,
    LeaseId,
    PeerId,
    Role,
    SlotState,
    StageOutcome,
    printable,
)
from kvkeep.wire import messages as m

CHECK_IDLE_S = 5.0  # without a message for so long, the invariants are verified
CHECK_MOST_CHUNKS = 5_000  # more would keep the loop busy for too long
LEASE_WARN_S = 300.0  # a lease older than this is marked in `kvkeep leases`; nothing is freed

_STORED_ALREADY = {StageOutcome.RESIDENT, StageOutcome.IN_PROGRESS}
_TOO_LARGE = "chunk_too_large "  # problems of a session are filed under this and its id


class Link(Protocol):
    """How the service answers one connection."""

    def send(self, message: m.ServerMessage) -> None:
        """Queue one message; never blocks, never raises."""


class Log(Protocol):
    """One line per change of state."""

    def __call__(self, event: str, **fields: object) -> None:
        """Write the event with its fields; the field `level` is the line's level."""


class Client:
    """What the service knows of one connection."""

    __slots__ = ("hello", "link", "max_wait_ms", "peer", "pid", "session")

    def __init__(self, peer: PeerId, hello: m.Hello, link: Link, pid: int | None) -> None:
        self.peer = peer
        self.hello = hello
        self.link = link
        self.pid = pid
        self.session = hello.session
        self.max_wait_ms = 0.0


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
    ) -> None:
        """`wall_clock`: seconds since 1970, for people; without it `clock` stands in."""
        self.directory = directory
        self.epoch = epoch
        self.capacity_bytes = capacity_bytes
        self.timeline = Timeline()
        self.clients: dict[PeerId, Client] = {}
        self.problems: dict[str, str] = {}
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._wall_clock = wall_clock or clock
        self._log = log
        self._started_s = self._last_message_s = self._last_check_s = clock()

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
        )
        self.clients[peer] = Client(peer, hello, link, pid)
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
        )

    def closed(self, peer: PeerId, why: str = "closed") -> None:
        """The connection ended; its process may live on."""
        client = self.clients.pop(peer, None)
        if client is not None and Role(client.hello.role) is not Role.OPERATOR:
            self._log("left", session=client.session, pid=client.pid, why=why)
        self._apply(ev.PeerClosed(peer))

    def gone(self, peer: PeerId, *, confirmed: bool = False) -> None:
        """The process is provably gone, or confirmed that it touches nothing any more."""
        self._apply(ev.PeerGone(peer, confirmed))

    def grown(self, populated_bytes: int) -> None:
        """More of the arena is populated."""
        self._apply(ev.Grown(populated_bytes))
        for client in self.clients.values():
            if client.hello.wants_arena:
                client.link.send(m.Grown(populated_bytes))

    def tick(self) -> None:
        """Time passed. A server with nothing to do verifies the core's invariants."""
        self._apply(ev.Tick())
        self._forget_problems()
        now = self._clock()
        idle = now - max(self._last_message_s, self._last_check_s) > CHECK_IDLE_S
        if idle and len(self.directory.residents.index) <= CHECK_MOST_CHUNKS:
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
            case m.End():
                self._end(client, message)
            case m.Stage():
                client.link.send(self._stage(client, message))
            case m.Commit():
                client.link.send(self._commit(client, message))
            case m.Abort():
                leases = tuple(map(LeaseId, message.leases))
                self._apply(ev.Abort(client.session, leases, message.confirmed))
            case m.Drop():
                self._apply(ev.Drop(client.session, message.hashes))
            case m.Note():
                self._record(client, message.request).add(self._clock(), message.event)
            case m.Ping():
                client.max_wait_ms = max(client.max_wait_ms, message.max_wait_ms)
                client.link.send(m.Pong(message.seq))
            case m.Query():
                client.link.send(self._query(client, message))
            case m.Bye():
                self.gone(peer, confirmed=True)
            case m.Hello():
                client.link.send(m.Problem("a connection says Hello once"))

    def _lookup(self, client: Client, message: m.Lookup) -> m.Found:
        now = self._clock()
        event = ev.Lookup(
            client.session, message.request, message.hashes, message.salt, message.near
        )
        hit = self._apply(event)
        assert isinstance(hit, ev.Hit)
        reasons = bytes(hit.reasons)
        record = self._record(client, message.request)
        record.ended = False
        record.prompt_tokens = message.prompt_tokens
        record.hit_chunks, record.reasons = hit.chunks, reasons
        record.add(now, f"lookup: {hit.chunks} of {hit.chunks + len(reasons)} chunks in L1")
        self.counters["lookups"] += 1
        self.counters["hit_chunks"] += hit.chunks
        for code in set(reasons):
            self.counters[f"miss_{code}"] += reasons.count(code)
        return m.Found(message.seq, hit.lease, hit.chunks, hit.columns, reasons)

    def _end(self, client: Client, message: m.End) -> None:
        outcome = EndOutcome(message.outcome)
        event = ev.End(client.session, LeaseId(message.lease), message.ranks, outcome)
        self._apply(event)
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
            ev.StageItem(i.request, ChunkHash(i.parent), i.hashes, i.salt) for i in message.items
        )
        done = self._apply(ev.Stage(client.session, items))
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
        done = self._apply(ev.Commit(client.session, leases))
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

    def _warn_of_large_chunks(self, session: Session) -> None:
        """A chunk that the bounds on staging never allow: nothing of the session is ever stored."""
        limits = self.directory.limits
        share = limits.staging_fraction * limits.session_staging_fraction
        most_bytes = int(share * self.capacity_bytes)
        self.problems.pop(_TOO_LARGE + session.id, None)
        if session.chunk_bytes <= most_bytes:
            return
        need_bytes = ceil(session.chunk_bytes / share / (1 << 20)) << 20
        fix = f"set l1.size to {need_bytes >> 20}MiB or more"
        if session.chunk_bytes <= limits.staging_fraction * self.capacity_bytes:
            fix += ", or raise l1.session_staging_fraction"
        self.problems[_TOO_LARGE + session.id] = (
            f"one chunk of session {printable(session.id)} takes "
            f"{format_bytes(session.chunk_bytes)} and a session may stage "
            f"{format_bytes(most_bytes)}: {fix}"
        )
        self._log(
            "chunk_too_large",
            level="warning",
            session=session.id,
            chunk_bytes=session.chunk_bytes,
            most_bytes=most_bytes,
            l1_needs_bytes=need_bytes,
        )

    def _forget_problems(self) -> None:
        """A session that is over has no problem."""
        for name in [name for name in self.problems if name.startswith(_TOO_LARGE)]:
            if name.removeprefix(_TOO_LARGE) not in self.directory.sessions:
                del self.problems[name]

    # ---- operators

    def _query(self, client: Client, message: m.Query) -> m.Answer | m.Failed:
        if Role(client.hello.role) is not Role.OPERATOR:
            return m.Failed(message.seq, "only an operator connection may ask this")
        match message.what:
            case "status":
                body: object = self.status()
            case "leases":
                body = self.leases()
            case "clear" if message.argument not in ("", "force"):
                why = f"clear takes no argument or 'force', not {message.argument[:64]!r}"
                return m.Failed(message.seq, why)
            case "clear":
                reply = self._apply(ev.Clear(force=message.argument == "force"))
                assert isinstance(reply, ev.Done)
                body = {"cleared_chunks": reply.changed, "status": self.status()}
                self._log("cleared", chunks=reply.changed, force=message.argument == "force")
            case "explain":
                try:
                    body = self.timeline.explain(message.argument)
                except KeyError as error:
                    return m.Failed(message.seq, str(error.args[0]))
            case _:
                return m.Failed(message.seq, f"unknown question {message.what!r}")
        return m.Answer(message.seq, msgspec.json.encode(body).decode())

    def status(self) -> dict[str, Any]:
        """The answer of `kvkeep status --json`."""
        d = self.directory
        sessions = d.sessions.values()
        return {
            "version": __version__,
            "epoch": f"{self.epoch:016x}",
            "uptime_s": round(self._clock() - self._started_s, 3),
            "l1": {
                "capacity_bytes": self.capacity_bytes,
                "populated_bytes": d.arena.populated_bytes,
                "free_bytes": d.arena.free_bytes,
                "staging_bytes": d.slots.bytes_in[SlotState.STAGING],
                "resident_bytes": d.slots.bytes_in[SlotState.RESIDENT],
                "reserved_bytes": d.slots.reserved_bytes,
                "orphaned_bytes": d.slots.bytes_in[SlotState.ORPHANED],
                "quarantined_bytes": d.slots.bytes_in[SlotState.QUARANTINED],
                "objects": sum(len(chunk.rows) for chunk in d.residents.index.values()),
            },
            "leases": sum(len(s.reads_open) + len(s.writes_open) for s in sessions),
            "sessions": [self._session(s.id) for s in sessions],
            "l2": [],
            "problems": sorted(self.problems.values()),
        }

    def counts(self) -> dict[str, int]:
        """Every counter, the core's and our own."""
        residents = self.directory.residents
        evicted = {
            "evicted_chunks": residents.evicted_chunks,
            "evicted_bytes": residents.evicted_bytes,
        }
        return {**self.directory.counters, **self.counters, **evicted}

    def leases(self) -> list[dict[str, Any]]:
        """Everything a session holds, oldest first; `old` marks what a person should look at."""
        now = self._clock()
        rows: list[dict[str, Any]] = []
        for session in self.directory.sessions.values():
            pids = sorted(
                {c.pid for c in self.clients.values() if c.session == session.id and c.pid}
            )
            held: list[tuple[ReadLease | WriteLease, str, int]]
            held = [(r, "read", len(r.chunks)) for r in session.reads_open.values()]
            held += [(w, "write", 1) for w in session.writes_open.values()]
            for lease, kind, chunks in held:
                age_s = now - lease.since_s
                rows.append(
                    {
                        "lease": f"{lease.id:016x}",
                        "kind": kind,
                        "session": session.id,
                        "request": lease.request,
                        "chunks": chunks,
                        "bytes": chunks * session.chunk_bytes,
                        "age_s": round(age_s, 3),
                        "old": age_s > LEASE_WARN_S,
                        "pids": pids,
                    }
                )
        return sorted(rows, key=lambda row: -row["age_s"])

    def _session(self, session_id: str) -> dict[str, Any]:
        session = self.directory.sessions[session_id]
        clients = [c for c in self.clients.values() if c.session == session_id]
        return {
            "session": session_id,
            "model": next((c.hello.model for c in clients if c.hello.model), ""),
            "client": next((c.hello.client for c in clients if c.hello.client), ""),
            "world": session.world,
            "ranks": sorted(session.workers),
            "ready": session.ready,
            "writes": session.writes,
            "pids": sorted({c.pid for c in clients if c.pid}),
            "chunk_bytes": session.chunk_bytes,
            "reserved_bytes": session.reserved_bytes,
            "staging_bytes": session.staging_bytes,
            "max_wait_ms": round(max((c.max_wait_ms for c in clients), default=0.0), 3),
        }

    # ---- effects

    def _apply(self, event: ev.Event) -> ev.Reply:
        reply, effects = self.directory.handle(event, self._clock())
        if effects:
            self._carry_out(effects)
        return reply

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            push: m.ServerMessage
            match effect:
                case ev.SessionReady():
                    push = m.Ready(effect.fingerprint, effect.world, effect.rows)
                    self._log("session_ready", session=effect.session, world=effect.world)
                    self._warn_of_large_chunks(self.directory.sessions[effect.session])
                case ev.SessionUnready():
                    push = m.Unready(effect.why)
                    self._log("session_unready", session=effect.session, why=effect.why)
                case ev.LeaseRevoked():
                    push = m.Revoked(effect.lease)
            for client in self.clients.values():
                schedules = client.hello.role in (Role.SCHEDULER, Role.BOTH)
                if client.session == effect.session and schedules:
                    client.link.send(push)


def _whole_hashes(message: m.Lookup | m.Stage) -> bool:
    parts = [message.hashes] if isinstance(message, m.Lookup) else [i.hashes for i in message.items]
    return all(len(part) % HASH_BYTES == 0 for part in parts)
