"""The part of the naive model that knows who is connected: sessions, ranks and processes."""

from dataclasses import dataclass, field

from kvkeep.core import events as ev
from kvkeep.types import GroupKind, Role, RowSpec

Rows = tuple[RowSpec, ...]


@dataclass
class Person:
    """One connection and its process."""

    session: str
    rank: int | None
    dma: bool
    writes: bool
    open: bool = True
    gone: bool = False


@dataclass
class Member:
    """One session."""

    world: int
    recompute: bool
    scheduler: int | None = None
    workers: dict[int, int] = field(default_factory=dict)
    rows_of: dict[int, Rows] = field(default_factory=dict)
    rows: Rows = ()  # of all ranks, since the session was last ready
    ranks: tuple[int, ...] = ()
    writes: bool = False
    fingerprint: bytes = b""  # of all ranks, since then

    @property
    def ready(self) -> bool:
        return self.scheduler is not None and set(self.workers) == set(range(self.world))


class Party:
    """Joins, closes and deaths. What they do to memory is up to the subclass."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.peers: dict[int, Person] = {}

    def end_reads(self, session: str, rank: int | None = None) -> None:
        """End the parts of one rank (or all) of every read of a session."""
        raise NotImplementedError

    def lose_writes(self, session: str) -> None:
        """Every open write of the session ends unpublished."""
        raise NotImplementedError

    def died(self, peer: int, confirmed: bool) -> int:
        """Free what only this process could still write; says how many extents waited for it."""
        raise NotImplementedError

    def holds(self, session: str) -> bool:
        """Whether the session still has open leases."""
        raise NotImplementedError

    def may_touch(self, peer: int) -> bool:
        """Whether the peer's process may still touch memory that was handed out."""
        raise NotImplementedError

    # ---- one event

    def join(self, event: ev.Join, reply: ev.Reply, effects: list[ev.Effect]) -> None:
        if self._bad(event):
            assert isinstance(reply, ev.JoinRefused)
            assert effects == []
            return
        assert isinstance(reply, ev.Joined)
        effects = list(effects)
        if event.confirms in self.peers:
            self.gone(event.confirms, True, effects)
        works = event.role in (Role.WORKER, Role.BOTH)
        rank = event.rank if works else None
        self.peers[event.peer] = Person(event.session, rank, event.dma, event.writes)
        if event.role is Role.OPERATOR:
            assert effects == []
            return
        member = self.members.setdefault(event.session, Member(event.world, event.recompute))
        if works:
            member.workers[event.rank] = event.peer
            member.rows_of[event.rank] = event.rows
        if event.role in (Role.SCHEDULER, Role.BOTH):
            if member.scheduler is not None:
                self._scheduler_left(event.session, member)
            member.scheduler, member.recompute = event.peer, event.recompute
        if member.ready:
            self._complete(event.session, member)
            ready = effects.pop()
            assert isinstance(ready, ev.SessionReady)
            assert (ready.session, ready.rows) == (event.session, member.rows)
            member.fingerprint = ready.fingerprint
        assert effects == []

    def _bad(self, event: ev.Join) -> bool:
        if event.peer in self.peers:
            return True
        if event.role is Role.OPERATOR:
            return False
        member = self.members.get(event.session)
        works = event.role in (Role.WORKER, Role.BOTH)
        return (
            (member is not None and member.world != event.world)
            or not 0 <= event.rank < event.world
            or (works and (not event.rows or not event.fingerprint))
            or any(spec.object_bytes < 1 for spec in event.rows)
            or any(
                spec.kind is GroupKind.SLIDING_WINDOW and spec.window_chunks < 1
                for spec in event.rows
            )
        )

    def _complete(self, session: str, member: Member) -> None:
        pairs = [(s, rank) for rank in range(member.world) for s in member.rows_of[rank]]
        rows, ranks = tuple(s for s, _ in pairs), tuple(rank for _, rank in pairs)
        if member.rows and (rows, ranks) != (member.rows, member.ranks):
            self.end_reads(session)
            self.lose_writes(session)
        member.rows, member.ranks = rows, ranks
        assert member.scheduler is not None
        everyone = [member.scheduler, *member.workers.values()]
        member.writes = all(self.peers[peer].writes for peer in everyone)

    def _scheduler_left(self, session: str, member: Member) -> None:
        member.scheduler = None
        self.lose_writes(session)
        if member.recompute:
            self.end_reads(session)

    def closed(self, peer: int, effects: list[ev.Effect]) -> int:
        """Returns how many connections ended; takes the effects it explains from the list."""
        person = self.peers.get(peer)
        if person is None or not person.open:
            return 0
        person.open = False
        member = self.members.get(person.session)
        if member is None:
            self._forget_person(peer)
            return 1
        was_ready = member.ready
        if member.scheduler == peer:
            self._scheduler_left(person.session, member)
        if person.rank is not None and member.workers.get(person.rank) == peer:
            del member.workers[person.rank]
            if member.recompute:
                self.end_reads(person.session, person.rank)
        if was_ready and not member.ready:
            unready = effects.pop(0)
            assert isinstance(unready, ev.SessionUnready)
            assert unready.session == person.session
        self._forget(person.session)
        self._forget_person(peer)
        return 1

    def gone(self, peer: int, confirmed: bool, effects: list[ev.Effect]) -> int:
        person = self.peers.get(peer)
        if person is None:
            return 0
        person.gone = True
        person.dma = person.dma and not confirmed
        # The order matters only for who is told: memory is the same whichever way round.
        self.closed(peer, effects)
        freed = self.died(peer, confirmed)
        member = self.members.get(person.session)
        if member is not None and person.rank is not None and person.rank not in member.workers:
            self.end_reads(person.session, person.rank)
        self.peers.pop(peer, None)
        self._forget(person.session)
        return freed

    def _forget_person(self, peer: int) -> None:
        if not self.may_touch(peer):
            del self.peers[peer]

    def _forget(self, session: str) -> None:
        member = self.members.get(session)
        if member and member.scheduler is None and not member.workers and not self.holds(session):
            del self.members[session]
