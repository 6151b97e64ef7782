"""Decides who belongs to a session, and what happens to memory when somebody leaves.

A closed socket does not prove that its owner stopped touching memory: staged extents of a lost
session become orphans until the process that may write them confirmed or is provably gone
(DESIGN section 2). Reads of a session that recomputes end at once: the generation protects them.
"""

from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.arena import rounded
from kvkeep.core.keys import combine_ranks
from kvkeep.core.leases import Peer, Session
from kvkeep.types import GroupKind, PeerId, Role

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

MOST_RANKS = MOST_GROUPS = 1 << 16  # what names and headers of objects have room for


class Membership:
    """Join, close and death of connections."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory

    def join(self, event: ev.Join, now_s: float) -> ev.Reply:
        """Add a connection to its session; a newer connection for a role replaces the older one."""
        refusal = self._refusal(event)
        if refusal:
            return ev.JoinRefused(refusal)
        if event.confirms in self._d.peers:
            self.gone(event.confirms, now_s=now_s, confirmed=True)
        works = event.role in (Role.WORKER, Role.BOTH)
        rank = event.rank if works else None
        self._d.peers[event.peer] = Peer(event.peer, event.session, rank, event.dma, event.writes)
        if event.role is Role.OPERATOR:
            return ev.Joined()
        session = self._d.sessions.get(event.session)
        if session is None:
            session = Session(event.session, event.world, event.recompute, event.model)
            self._d.sessions[event.session] = session
        if works:
            self._add_worker(session, event)
        if event.role in (Role.SCHEDULER, Role.BOTH):
            if session.scheduler is not None:
                self._scheduler_left(session, now_s)
            session.scheduler = event.peer
            session.recompute = event.recompute
        if session.ready:
            self._complete(session, now_s)
        return ev.Joined()

    def closed(self, peer_id: PeerId, now_s: float) -> ev.Reply:
        """The connection ended; its process may live on."""
        peer = self._d.peers.get(peer_id)
        if peer is None or not peer.open:
            return ev.Done(0)
        peer.open = False
        session = self._d.sessions.get(peer.session)
        if session is None:
            self._forget_if_harmless(peer)
            return ev.Done(1)
        was_ready = session.ready
        if session.scheduler == peer_id:
            self._scheduler_left(session, now_s)
        if peer.rank is not None and session.workers.get(peer.rank) == peer_id:
            del session.workers[peer.rank]
            self._d.fetcher.unready(session)
            if session.recompute:
                self._d.sweeper.end_reads(session, (peer.rank,))
        if was_ready and not session.ready:
            who = "scheduler" if peer.rank is None else f"rank {peer.rank}"
            self._d.effects.append(ev.SessionUnready(session.id, f"{who} left"))
        self.forget_if_empty(session)
        self._forget_if_harmless(peer)
        return ev.Done(1)

    def gone(self, peer_id: PeerId, *, now_s: float, confirmed: bool) -> ev.Reply:
        """The process is provably gone (or says that it touches nothing any more)."""
        peer = self._d.peers.get(peer_id)
        if peer is None:
            return ev.Done(0)
        peer.gone = True
        if confirmed:
            peer.dma = False
        self.closed(peer_id, now_s)
        orphans, peer.orphans = peer.orphans, set()
        for slot in sorted(orphans):
            self._d.give_up(slot, peer_id, confirmed=confirmed, now_s=now_s)
        session = self._d.sessions.get(peer.session)
        if session is not None:
            for lease in [w for w in session.writes_open.values() if peer_id in w.writers]:
                self._d.stager.lose(session, lease, confirmed=False, now_s=now_s)
            if peer.rank is not None and peer.rank not in session.workers:
                self._d.sweeper.end_reads(session, (peer.rank,))
            self.forget_if_empty(session)
        self._d.peers.pop(peer_id, None)
        return ev.Done(len(orphans))

    # ---- parts

    def _refusal(self, event: ev.Join) -> str | None:
        if event.peer in self._d.peers:  # a second Hello would forget what the first may write
            return "this connection has joined already"
        if event.role is Role.OPERATOR:
            return None
        session = self._d.sessions.get(event.session)
        if session is not None and session.world != event.world:
            return (
                f"session {event.session} has world size {session.world}, this rank says "
                f"{event.world}: start all ranks with the same parallel configuration"
            )
        if event.world > MOST_RANKS or any(
            not 0 <= spec.group < MOST_GROUPS for spec in event.rows
        ):
            return f"a session has at most {MOST_RANKS} ranks and {MOST_GROUPS} KV groups"
        if not 0 <= event.rank < event.world:
            return f"rank {event.rank} is outside world size {event.world}"
        if event.role in (Role.WORKER, Role.BOTH) and not (event.rows and event.fingerprint):
            return "a worker must say its layout and fingerprint"
        if any(spec.object_bytes <= 0 for spec in event.rows):
            return "an object must have at least one byte"
        windows = (spec for spec in event.rows if spec.kind is GroupKind.SLIDING_WINDOW)
        if any(spec.window_chunks <= 0 for spec in windows):  # else every length were a hit
            return "a sliding window must cover at least one chunk"
        return None

    def _add_worker(self, session: Session, event: ev.Join) -> None:
        session.model = event.model or session.model
        session.workers[event.rank] = event.peer
        session.rows[event.rank] = event.rows
        session.fingerprints[event.rank] = event.fingerprint

    def _complete(self, session: Session, now_s: float) -> None:
        """Every rank is there: fix the rows; a changed layout ends what the old one held."""
        ranks = range(session.world)
        rows = tuple(spec for rank in ranks for spec in session.rows[rank])
        row_ranks = tuple(rank for rank in ranks for _ in session.rows[rank])
        fingerprint = combine_ranks([session.fingerprints[rank] for rank in ranks])
        before = session.all_rows, session.row_ranks, session.fingerprint
        if session.all_rows and (rows, row_ranks, fingerprint) != before:
            self._d.fetcher.unready(session)
            self._end_all_reads(session)
            self._lose_writes(session, now_s)
        session.all_rows = self._d.layouts.setdefault(rows, rows)
        session.row_ranks = row_ranks
        session.leading_run = any(spec.kind is GroupKind.FULL_ATTENTION for spec in rows)
        peers = (session.scheduler, *session.workers.values())
        session.writes = all(self._d.peers[peer].writes for peer in peers if peer is not None)
        session.chunk_bytes = sum(rounded(spec.object_bytes) for spec in rows)
        places = zip(row_ranks, rows, strict=True)
        session.objects = self._d.objects[session.all_rows] = ev.ObjectRows(
            session.world, tuple((rank, spec.group, spec.object_bytes) for rank, spec in places)
        )
        session.fingerprint = fingerprint
        ready = ev.SessionReady(session.id, session.fingerprint, session.world, rows)
        self._d.effects.append(ready)

    def _scheduler_left(self, session: Session, now_s: float) -> None:
        session.scheduler = None
        self._d.fetcher.unready(session)
        self._lose_writes(session, now_s)
        if session.recompute:
            self._d.sweeper.end_reads(session, sorted(set(session.row_ranks)))

    def _lose_writes(self, session: Session, now_s: float) -> None:
        for lease in list(session.writes_open.values()):
            self._d.stager.lose(session, lease, confirmed=False, now_s=now_s)

    def _end_all_reads(self, session: Session) -> None:
        """At once, since the rows that they name are about to change."""
        for lease in list(session.reads_open.values()):
            for rank in list(lease.live_ranks):
                self._d.end_part(session, lease, rank)

    def _forget_if_harmless(self, peer: Peer) -> None:
        """A closed connection whose process can touch nothing of ours needs no watching."""
        session = self._d.sessions.get(peer.session)
        writes = session.writes_open.values() if session is not None else ()
        reads = session is not None and session.reads_open and not session.recompute
        if not (peer.orphans or reads or any(peer.id in w.writers for w in writes)):
            self._d.peers.pop(peer.id, None)

    def forget_if_empty(self, session: Session) -> None:
        """A session without connections that holds nothing is over."""
        held = session.reads_open or session.writes_open
        if session.scheduler is None and not session.workers and not held:
            self._d.sessions.pop(session.id, None)
