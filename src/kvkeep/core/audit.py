"""Verifies the invariants of DESIGN section 5 on a directory; raises AssertionError on the first.

Run after every event in tests and the simulator, and when idle in production. O(objects).
Invariants 6, 7 and 9 need bytes or an engine: the simulator's model checks them.
"""

from collections import Counter

from kvkeep.core.directory import Directory
from kvkeep.core.eviction import Chunk
from kvkeep.core.tickets import Place
from kvkeep.types import SlotId, SlotState


def check(directory: Directory) -> None:
    """Raise AssertionError when any invariant is broken."""
    _bytes(directory)
    _extents(directory)
    _reservations(directory)
    _staging(directory)
    _tree(directory)
    _transfers(directory)


def _bytes(d: Directory) -> None:
    """1: every populated byte is in exactly one state, and the sums agree."""
    at = 0
    free = 0
    for offset, size, taken in d.arena.extents():
        assert offset == at, f"hole or overlap at {at}"
        at += size
        free += 0 if taken else size
    assert at == d.arena.populated_bytes
    assert free == d.arena.free_bytes
    used = Counter[SlotState]()
    for slot, state in enumerate(d.slots.state):
        if state is not SlotState.FREE:
            used[state] += d.slots.size[slot]
    for state in SlotState:
        assert d.slots.bytes_in[state] == (used[state]), f"bytes in {state.name}"
    assert free + used.total() == d.arena.populated_bytes


def _extents(d: Directory) -> None:
    """2: live slots and taken extents are the same set, one slot each."""
    taken = {offset: size for offset, size, is_taken in d.arena.extents() if is_taken}
    for slot, state in enumerate(d.slots.state):
        if state is not SlotState.FREE:
            size = taken.pop(d.slots.offset[slot])
            assert size == d.slots.size[slot]
    assert not taken, f"extents nobody owns: {taken}"


def _reservations(d: Directory) -> None:
    """3: readers of a slot = live lease parts listing it; sessions' own counts agree."""
    readers: Counter[SlotId] = Counter()
    for session in d.sessions.values():
        held: Counter[Chunk] = Counter()
        for lease in session.reads_open.values():
            assert lease.live_ranks, "a lease without live parts is not removed"
            held.update(lease.chunks)
            for chunk in lease.chunks:
                for slot, rank in zip(chunk.rows, session.row_ranks, strict=True):
                    readers[slot] += rank in lease.live_ranks
            assert not lease.ticket or lease.ticket in d.fetcher.tickets, "a lease nobody will see"
        assert held == Counter(session.held.counts())
        sizes = sum(chunk.size_bytes for chunk in held)
        assert sizes == session.reserved_bytes
    for job in d.persister.running.values():
        readers.update(job.chunk.rows)
    readers_of = d.slots.readers[: len(d.slots.state)]
    for index, count in enumerate(readers_of):
        assert readers[SlotId(index)] == count, f"slot {index}: readers and leases differ"
        assert not count or d.slots.state[index] is SlotState.RESIDENT
    reserved = sum(d.slots.size[s] for s, n in enumerate(readers_of) if n)
    assert reserved == d.slots.reserved_bytes


def _staging(d: Directory) -> None:
    """4: staged and orphaned extents have exactly one known owner."""
    owners: Counter[SlotId] = Counter()
    for session in d.sessions.values():
        leases = session.writes_open.values()
        assert session.staging_bytes == len(leases) * session.chunk_bytes
        for lease in leases:
            for slot, writer in zip(lease.slots, lease.writers, strict=True):
                assert d.slots.state[slot] is SlotState.STAGING
                assert writer in d.peers, "staged for a writer that is gone"
                owners[slot] += 1
    for peer in d.peers.values():
        for slot in peer.orphans:
            assert d.slots.state[slot] is SlotState.ORPHANED
            assert not peer.gone
            owners[slot] += 1
    for fetch in d.fetcher.flights.fetches.values():
        for slot in fetch.slots:
            assert d.slots.state[slot] is SlotState.STAGING
            owners[slot] += 1
    for _, slot in d.quarantine:
        assert d.slots.state[slot] is SlotState.QUARANTINED
        owners[slot] += 1
    waiting = (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED)
    for index, state in enumerate(d.slots.state):
        assert owners[SlotId(index)] == (state in waiting), f"slot {index} in {state.name}"


def _tree(d: Directory) -> None:
    """5, 8: resident chunks own their slots, children counts and per-salt usage are exact."""
    chunks = [*d.residents.index.values(), *d.residents.unlinked]
    owned = Counter(slot for chunk in chunks for slot in chunk.rows)
    assert d.residents.objects == sum(len(chunk.rows) for chunk in d.residents.index.values())
    usage: Counter[str | None] = Counter()
    children = Counter(chunk.parent for chunk in d.residents.index.values())
    children.update(w.parent for s in d.sessions.values() for w in s.writes_open.values())
    for chunk in chunks:
        usage[chunk.salt] += chunk.size_bytes
        if chunk.linked:
            assert chunk.children == children.pop(chunk.hash, 0), "children of a chunk"
            assert not (chunk.queued and chunk.children), "a parent would go before its children"
            could_go = chunk.children == 0 and d.residents.idle(chunk)
            assert chunk.queued or not could_go, "a chunk that could be evicted never comes up"
        else:
            assert not d.residents.idle(chunk), "an unlinked chunk without readers is not freed"
    assert children == Counter(dict(d.residents.absent)), "children of absent chunks"
    assert usage == Counter(d.residents.usage_bytes)
    staged: Counter[str | None] = Counter()
    for session in d.sessions.values():
        for lease in session.writes_open.values():
            staged[lease.space.salt] += session.chunk_bytes
    for fetch in d.fetcher.flights.fetches.values():
        staged[fetch.space.salt] += fetch.size_bytes
    assert staged == d.quotas.staged_bytes, "staged bytes of a tenant"
    for slot, state in enumerate(d.slots.state):
        assert owned[SlotId(slot)] == (state is SlotState.RESIDENT), f"slot {slot} resident once"


def _transfers(d: Directory) -> None:
    """6: one fetch per chunk, within its bounds; every waiter waits for something."""
    flights = d.fetcher.flights
    fetches = list(flights.fetches.values())
    assert {f.hash for f in fetches} == set(flights.by_hash)
    assert len(fetches) == len(flights.by_hash), "two fetches of one chunk"
    assert flights.staged_bytes == sum(f.size_bytes for f in fetches)
    share = flights.most_bytes() // max(1, d.limits.backends)
    for backend in range(d.limits.backends):
        sizes = [f.size_bytes for f in fetches if f.backend == backend]
        assert sum(sizes) <= share or len(sizes) == 1, "more is on its way than may be"
    for fetch in fetches:
        assert not (fetch.late and fetch.waiters)
        for ticket, position in fetch.waiters.items():
            assert d.fetcher.tickets.get(ticket.id) is ticket
            assert ticket.places[position] is Place.WANTED
    wanted: Counter[tuple[str, bytes]] = Counter()
    for ticket in d.fetcher.tickets.values():
        assert ticket.lease is None or ticket.lease.id in ticket.session.reads_open
        for position in ticket.wanted():
            fetch_of = flights.by_hash.get(ticket.hashes[position])
            awaited = fetch_of is not None and ticket in fetch_of.waiters
            assert awaited != (position in ticket.queue), "wanted, and nobody brings it"
            wanted[ticket.session.id, ticket.hashes[position]] += 1
    for session in d.sessions.values():
        for chunk_hash, count in session.wanted.items():
            assert wanted.pop((session.id, chunk_hash)) == count
    assert not wanted
    queued = [job for queue in d.persister.queues for job in queue.values()]
    assert d.persister.queued_bytes == sum(job.chunk.size_bytes for job in queued)
    assert all(job.chunk.linked for job in queued), "queued, and not in L1 any more"
    nowhere = sum(not chunk.stored for chunk in d.residents.index.values())
    assert d.persister.missing() == nowhere, "chunks that no backend has"
