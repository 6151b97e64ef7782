"""Reads that end for others: who may be harmed, for whom, and never for nothing."""

from tests.core.build import World, alone, chain, row
from tests.core.conftest import MakeShell
from tests.core.shell import Shell

from kvkeep.core import events as ev
from kvkeep.types import ChunkHash, LeaseId, Reason, StageOutcome, TicketId


def reads(w: World, session: str, name: str, chunks: int = 1) -> LeaseId:
    """Store a prompt and hold it; time goes on."""
    keys = alone(name, chunks)
    w.store(session, keys)
    hit = w.lookup(session, keys)
    assert hit.chunks == chunks
    w.now_s += 0.1
    return hit.lease


def waits(w: Shell, session: str, name: str, chunks: int = 1) -> tuple[TicketId, list[ChunkHash]]:
    """A lookup of what only L2 has; it began now."""
    keys = alone(name, chunks)
    w.put(keys)
    ticket = w.ask(session, keys)
    w.now_s += 0.1
    return ticket, keys


def revoked(w: World) -> set[LeaseId]:
    return {e.lease for e in w.effects if isinstance(e, ev.LeaseRevoked)}


def relieve(w: Shell, *stopped: str) -> set[LeaseId]:
    """Which reads end, as the sessions are told."""
    many = w.did(ev.Relieve(frozenset(stopped)))
    assert many == len(revoked(w))
    return revoked(w)


def squeezed(shell: MakeShell, pages: int = 4) -> Shell:
    w = shell(pages=pages, fetch_fraction=1.0)
    for session in "abc":
        w.join(session)
    return w


def test_a_lookup_harms_no_read_that_began_before_it(shell: MakeShell) -> None:
    w = squeezed(shell, pages=3)
    leases = {reads(w, "b", name) for name in "123"}
    ticket, _ = waits(w, "a", "wanted")
    assert w.directory.pressure.felt()
    assert relieve(w) == set()
    assert leases <= set(w.directory.sessions["b"].reads_open)
    w.end("b", min(leases))
    w.bring()
    assert w.hit(ticket).chunks == 1


def late_reads(
    shell: MakeShell, *, recompute: bool = True
) -> tuple[Shell, TicketId, list[LeaseId]]:
    """A lookup that waits for its last chunk, and reads of others that began after it."""
    w = shell(pages=6, fetch_fraction=1.0, fetches_per_backend=1)
    w.join("a")
    w.join("b", recompute=recompute)
    ticket, keys = waits(w, "a", "wanted", 4)  # one at a time: its rest is not begun
    leases = [reads(w, "b", name) for name in "123"]
    for key in keys[1:4]:
        w.bring(key)
    return w, ticket, leases


def test_an_older_lookup_takes_the_youngest_reads(shell: MakeShell) -> None:
    w, ticket, leases = late_reads(shell)
    assert not w.fetches
    assert w.waits(ticket)
    assert w.directory.pressure.felt()
    assert relieve(w) == {leases[2]}, "the youngest, and only as many as needed"
    assert not w.directory.pressure.felt()
    w.bring()
    assert w.hit(ticket).chunks == 4
    assert set(w.directory.sessions["b"].reads_open) == set(leases[:2])
    assert w.counters["revoked_for_room"] == 1


def test_who_cannot_recompute_keeps_what_it_reads(shell: MakeShell) -> None:
    w, ticket, _ = late_reads(shell, recompute=False)
    assert relieve(w, "b") == set()
    w.ring(ticket)
    assert w.hit(ticket).chunks == 3
    assert w.hit(ticket).reasons == (Reason.NO_ROOM,)


def test_a_stopped_engines_reads_go_first_however_old(shell: MakeShell) -> None:
    w = squeezed(shell)
    old, young = reads(w, "a", "1", 2), reads(w, "b", "2", 2)
    ticket, keys = waits(w, "c", "wanted", 2)
    assert relieve(w) == set()
    assert relieve(w, "a") == {old}
    w.bring()
    assert w.hit(ticket).chunks == 2
    assert young in w.directory.sessions["b"].reads_open
    assert w.resident(keys) == [True, True]


def test_a_store_takes_reads_of_stopped_engines_alone(shell: MakeShell) -> None:
    w = squeezed(shell)
    old, young = reads(w, "a", "1", 2), reads(w, "b", "2", 2)
    keys = alone("new")
    assert w.stage("c", keys).outcomes == (StageOutcome.NO_ROOM,)
    assert w.directory.pressure.felt()
    assert relieve(w) == set()
    assert not w.directory.pressure.felt(), "asked once, not for ever"
    w.stage("c", keys)
    assert relieve(w, "a") == {old}
    assert w.stage("c", keys).outcomes == (StageOutcome.GRANTED,)
    assert young in w.directory.sessions["b"].reads_open


def test_nothing_is_revoked_when_that_makes_no_room(shell: MakeShell) -> None:
    """What another reader holds as well, or what is too small, helps nobody."""
    w = shell(pages=4, fetch_fraction=1.0)
    for session in "ab":
        w.join(session)
    w.join("big", (row(3),))
    shared = reads(w, "a", "shared", 2)
    w.lookup("b", alone("shared", 2))
    assert w.stage("big", chain("z", 1)).outcomes == (StageOutcome.NO_ROOM,)
    assert relieve(w, "a") == set()
    assert w.stage("big", chain("z", 1)).outcomes == (StageOutcome.NO_ROOM,)
    assert relieve(w, "a", "b") == set(), "two pages are not three"
    assert shared in w.directory.sessions["a"].reads_open


def test_a_reader_of_many_leases_counts_once(shell: MakeShell) -> None:
    """Two reads of one engine hold the same chunks: both must end."""
    w = squeezed(shell, pages=2)
    keys = alone("x", 2)
    w.store("a", keys)
    both = {w.lookup("a", keys).lease, w.lookup("a", keys).lease}
    w.stage("b", alone("new"))
    assert relieve(w, "a") == both
    assert w.directory.slots.reserved_bytes == 0


def test_a_younger_pending_lookup_gives_way_too(shell: MakeShell) -> None:
    """What it holds already is a read like any other; it is answered, not left waiting."""
    w = shell(pages=4, fetch_fraction=1.0, fetches_per_backend=1, backends=2)
    w.join("a")
    w.join("b")
    ticket, keys = waits(w, "a", "wanted", 3)
    local = alone("x", 3)
    w.store("b", local[:3])
    w.put(local, 1)
    younger = w.ask("b", local)
    w.bring(keys[1])
    assert w.waits(ticket)
    assert w.waits(younger)
    assert len(relieve(w)) == 1
    assert w.hit(younger).reasons == (Reason.REVOKED,) * 3
    w.bring()
    assert w.hit(ticket).chunks == 3
