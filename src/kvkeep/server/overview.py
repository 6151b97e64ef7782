"""What people see of a server: its status, its leases, its counters, and what is wrong with it.

Reads the core's state and the stores'; decides nothing and changes nothing.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import ceil
from typing import Any, Protocol

from kvkeep import __version__
from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.header import HeaderProblem
from kvkeep.core.directory import Directory
from kvkeep.core.leases import ReadLease, Session, WriteLease
from kvkeep.limits import format_bytes
from kvkeep.types import Epoch, PeerId, SlotState, printable
from kvkeep.wire import messages as m

SESSIONS_SHOWN = 256  # of the oldest
LEASES_SHOWN = 1_000  # of the oldest
LEASE_WARN_S = 300.0  # a lease older than this is marked in `kvkeep leases`; nothing is freed
_TOO_LARGE = "chunk_too_large "  # problems of a session are filed under this and its id


class Log(Protocol):
    """One line per change of state."""

    def __call__(self, event: str, **fields: object) -> None:
        """Write the event with its fields; the field `level` is the line's level."""


class Connected(Protocol):
    """One connection, as far as people see it."""

    session: str
    pid: int | None
    hello: m.Hello
    max_wait_ms: float


class Quotas(Protocol):
    """What every tenant may take and has."""

    def ask(self, message: m.Query, send: Callable[[m.Answer | m.Failed], None]) -> None:
        """Answer an operator's question or order, now or later."""

    def refused(self) -> list[dict[str, Any]]:
        """Refusals of the tenants that had any."""


class Overview:
    """The answers of `kvkeep status` and `kvkeep leases`, and the list of problems."""

    def __init__(
        self,
        directory: Directory,
        clients: Mapping[PeerId, Connected],
        *,
        epoch: Epoch,
        capacity_bytes: int,
        clock: Callable[[], float],
        log: Log,
        stores: Callable[[], Sequence[dict[str, Any]]],
    ) -> None:
        """`stores`: one status of each L2 store, now."""
        self.problems: dict[str, str] = {}
        self.quotas: Quotas | None = None
        self.memory: dict[str, object] = {}  # the budget, once it is known
        self._d = directory
        self._clients = clients
        self._epoch = epoch
        self._capacity_bytes = capacity_bytes
        self._clock = clock
        self._log = log
        self._stores = stores
        self._started_s = clock()
        self.loop: Callable[[], dict[str, Any]] = dict  # the watchdog's part of the status

    def status(self) -> dict[str, Any]:
        """The answer of `kvkeep status --json`."""
        d, stores = self._d, self._stores()
        sessions = d.sessions.values()
        return {
            "version": __version__,
            "epoch": f"{self._epoch:016x}",
            "uptime_s": round(self._clock() - self._started_s, 3),
            "l1": {
                "capacity_bytes": self._capacity_bytes,
                "populated_bytes": d.arena.populated_bytes,
                "free_bytes": d.arena.free_bytes,
                "staging_bytes": d.slots.bytes_in[SlotState.STAGING],
                "resident_bytes": d.slots.bytes_in[SlotState.RESIDENT],
                "reserved_bytes": d.slots.reserved_bytes,
                "orphaned_bytes": d.slots.bytes_in[SlotState.ORPHANED],
                "quarantined_bytes": d.slots.bytes_in[SlotState.QUARANTINED],
                "objects": d.residents.objects,
            },
            "leases": sum(len(s.reads_open) + len(s.writes_open) for s in sessions),
            "session_count": len(sessions),
            "sessions": self._sessions(),
            "l2": stores,
            "transfers": self._transfers(),
            "quota_refused": self.quotas.refused() if self.quotas is not None else [],
            "loop": self.loop(),
            "memory": self.memory,
            "problems": self._what_is_wrong(stores),
        }

    def _what_is_wrong(self, stores: Sequence[dict[str, Any]]) -> list[str]:
        """One sentence for each problem; of L2 too."""
        found = sorted(self.problems.values())
        for store in stores:
            name = f"L2 {store['name']} ({printable(str(store['url']))})"
            stuck = f"; {store['stuck']} calls are stuck" if store["stuck"] else ""
            if store["state"] != "closed":
                why = printable(str(store["why"] or "it is slow"))
                found.append(
                    f"{name} is not used: {why}{stuck}; it is used again by itself when it works"
                )
            elif stuck:
                found.append(f"{name} is slow{stuck}")
            if store["forgetting"]:
                found.append(
                    f"{name} has not forgotten {store['forgetting']} layouts that were reset: none "
                    "of it is served, but do not restart the server before it has"
                )
            if store["read_only"]:
                found.append(f"{name} is read-only: nothing is persisted there; mount it writable")
            found += [f"{name}: {problem}" for problem in _encryption_problems(store)]
        return found

    def _transfers(self) -> dict[str, int]:
        """What is under way between L1 and L2."""
        fetcher, persister = self._d.fetcher, self._d.persister
        return {
            "pending_lookups": len(fetcher.tickets),
            "fetches": len(fetcher.flights.fetches),
            "fetching_bytes": fetcher.flights.staged_bytes,
            "persists": len(persister.running),
            "persist_queue_bytes": persister.queued_bytes,
        }

    def l2_evicted(self) -> int:
        """Objects that L2 has evicted since the start."""
        return sum(store["evicted"] for store in self._stores())

    def leases(self) -> list[dict[str, Any]]:
        """What sessions hold, oldest first, `LEASES_SHOWN` at most.

        `old` marks what a person should look at.
        """
        now = self._clock()
        held = heapq.merge(
            *[_oldest_first(s) for s in self._d.sessions.values()], key=lambda pair: pair[1].since_s
        )
        shown = list(islice(held, LEASES_SHOWN))
        pids = {session.id: set[int]() for session, _ in shown}
        for client in self._clients.values():
            if client.pid and client.session in pids:
                pids[client.session].add(client.pid)
        rows: list[dict[str, Any]] = []
        for session, lease in shown:
            chunks = len(lease.chunks) if isinstance(lease, ReadLease) else 1
            age_s = now - lease.since_s
            rows.append(
                {
                    "lease": f"{lease.id:016x}",
                    "kind": "read" if isinstance(lease, ReadLease) else "write",
                    "session": session.id,
                    "request": lease.request,
                    "chunks": chunks,
                    "bytes": chunks * session.chunk_bytes,
                    "age_s": round(age_s, 3),
                    "old": age_s > LEASE_WARN_S,
                    "pids": sorted(pids[session.id]),
                }
            )
        return rows

    def _sessions(self) -> list[dict[str, Any]]:
        clients: dict[str, list[Connected]] = {}
        for client in self._clients.values():
            clients.setdefault(client.session, []).append(client)
        shown = islice(self._d.sessions.values(), SESSIONS_SHOWN)
        return [self._session(session, clients.get(session.id, [])) for session in shown]

    def _session(self, session: Session, clients: Sequence[Connected]) -> dict[str, Any]:
        return {
            "session": session.id,
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

    def judge_chunk_size(self, session: Session) -> None:
        """A chunk that the bounds on staging never allow: nothing of the session is ever stored."""
        limits = self._d.limits
        share = limits.staging_fraction * limits.session_staging_fraction
        most_bytes = int(share * self._capacity_bytes)
        self.problems.pop(_TOO_LARGE + session.id, None)
        if session.chunk_bytes <= most_bytes:
            return
        need_bytes = ceil(session.chunk_bytes / share / (1 << 20)) << 20
        fix = f"set l1.size to {need_bytes >> 20}MiB or more"
        if session.chunk_bytes <= limits.staging_fraction * self._capacity_bytes:
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

    def forget_problems(self) -> None:
        """A session that is over has no problem."""
        for name in [name for name in self.problems if name.startswith(_TOO_LARGE)]:
            if name.removeprefix(_TOO_LARGE) not in self._d.sessions:
                del self.problems[name]


def _encryption_problems(store: Mapping[str, Any]) -> Iterator[str]:
    unreadable: Mapping[str, int] = store["unreadable_now"]
    if unreadable:
        parts = ", ".join(f"{why}: {count}" for why, count in unreadable.items())
        fix = "each is written anew when its chunk is stored again"
        if HeaderProblem.NO_KEY in unreadable:
            put = "put their key back into the file of l2.key_file"
            if store["encryption"] is None:
                put = "name the file with their key in l2.key_file"
            fix = f"{put} and restart the server, or leave them: {fix}"
        yield f"{sum(unreadable.values())} objects cannot be read ({parts}): {fix}"
    if too_large_bytes := store["too_large_bytes"]:
        need_bytes = ceil(too_large_bytes / PAGE_BYTES) * PAGE_BYTES
        yield (
            f"an object of {too_large_bytes} bytes does not fit into l2.encrypt_buffer_bytes, and "
            f"such are never stored: set it to {need_bytes} or more, best several times that"
        )


def _oldest_first(session: Session) -> Iterator[tuple[Session, ReadLease | WriteLease]]:
    both: list[Iterable[ReadLease | WriteLease]]
    both = [session.reads_open.values(), session.writes_open.values()]
    return ((session, lease) for lease in heapq.merge(*both, key=lambda lease: lease.since_s))
