"""write_back, skip_l1 and draining: what is written before it goes, what leaves L1 after that."""

import pytest
from tests.core.build import PAGE, alone, chain, row
from tests.core.conftest import MakeShell
from tests.core.shell import Shell

from kvkeep.core import events as ev
from kvkeep.types import ChunkHash, IoOutcome, StorePolicy

BACK, SKIP = StorePolicy.WRITE_BACK, StorePolicy.SKIP_L1


def under_way(w: Shell) -> list[ChunkHash]:
    return [persist.chunk for persist in w.persists.values()]


# ---- write_back


def test_write_back_waits_until_room_is_short(shell: MakeShell) -> None:
    w = shell(pages=10, low_water_fraction=0.4)
    w.join("s")
    first, second = chain("a", 3), alone("x", 3)
    w.store("s", first)
    w.do(ev.Tick())
    assert not w.persists
    w.store("s", second)
    assert not w.persists  # 4 of 10 pages are free: not less
    w.store("s", alone("y"))
    w.do(ev.Tick())
    assert under_way(w)[:3] == first[:0:-1]  # the coldest, the end of a prompt before its beginning
    w.kept()
    w.kept()
    w.do(ev.Tick())
    assert not w.persists
    w.store("s", alone("z", 4))
    assert w.counters.get("persist_lost", 0) == 0


def test_write_back_writes_what_only_one_backend_has(shell: MakeShell) -> None:
    w = shell(pages=2, backends=2, low_water_fraction=1.0)
    w.join("s")
    keys = chain("a", 1)
    w.put(keys, 1)
    ticket = w.ask("s", keys)
    w.bring()
    w.end("s", w.hit(ticket).lease)
    w.do(ev.Tick())
    assert [(p.backend, p.chunk) for p in w.persists.values()] == [(0, keys[1])]


def test_write_back_passes_over_what_is_read(shell: MakeShell) -> None:
    w = shell(pages=2, low_water_fraction=1.0)
    w.join("s")
    keys = chain("a", 1)
    w.store("s", keys)
    lease = w.lookup("s", keys).lease
    w.do(ev.Tick())
    assert not w.persists  # it cannot be evicted now
    w.end("s", lease)
    w.do(ev.Tick())
    assert under_way(w) == keys[1:]


def test_write_back_counts_what_is_lost(shell: MakeShell) -> None:
    w = shell(pages=2)
    w.join("s")
    w.store("s", alone("x", 2))
    w.store("s", alone("y", 2))
    assert w.counters["persist_lost"] == 2


def test_a_chunk_lost_from_the_queue_is_lost_once(shell: MakeShell) -> None:
    w = shell(pages=2, low_water_fraction=1.0, persists_per_backend=1)
    w.join("s")
    w.store("s", alone("x", 2))
    w.do(ev.Tick())
    assert len(w.persists) == 1  # the other one is queued
    w.store("s", alone("y"))
    w.kept()
    w.do(ev.Tick())
    assert w.counters["persist_lost"] == 1


@pytest.mark.timeout(10)
def test_parents_that_go_in_a_circle(shell: MakeShell) -> None:
    """No honest client says this; the server must go on."""
    w = shell(pages=4, low_water_fraction=1.0)
    w.join("s")
    a, b, c = alone("a")[1], alone("b")[1], alone("c")[1]
    for parent, key in ((b, a), (a, b), (a, c)):
        w.commit("s", w.stage("s", [parent, key]).leases)
    w.do(ev.Tick())
    assert c in under_way(w)


# ---- skip_l1


def test_skip_l1_leaves_when_it_is_written(shell: MakeShell) -> None:
    w = shell(store_policy=SKIP)
    w.join("s")
    keys = chain("a", 2)
    w.store("s", keys)
    assert under_way(w) == keys[1:]
    w.kept()
    assert w.resident(keys) == [False, False]
    ticket = w.ask("s", keys)
    w.bring()
    hit = w.hit(ticket)
    assert (hit.chunks, hit.tiers) == (2, b"\1\1")
    assert w.resident(keys) == [True, True]
    w.end("s", hit.lease)
    assert w.resident(keys) == [False, False]
    assert not w.persists


def test_skip_l1_waits_for_the_last_reader(shell: MakeShell) -> None:
    w = shell(store_policy=SKIP)
    w.join("s")
    keys = chain("a", 1)
    w.store("s", keys)
    leases = [w.lookup("s", keys).lease for _ in range(2)]
    w.kept()
    w.end("s", leases[0])
    assert w.resident(keys) == [True]
    w.end("s", leases[1])
    assert w.resident(keys) == [False]


def test_skip_l1_waits_for_the_last_rank(shell: MakeShell) -> None:
    w = shell(store_policy=SKIP)
    for rank in (None, 0, 1):
        w.join_rank("s", rank, 2)
    keys = chain("a", 1)
    w.store("s", keys)
    lease = w.lookup("s", keys).lease
    w.kept()
    w.end("s", lease, (0,))
    assert w.resident(keys) == [True]
    w.end("s", lease, (1,))
    assert w.resident(keys) == [False]


def test_skip_l1_waits_for_every_backend(shell: MakeShell) -> None:
    w = shell(store_policy=SKIP, backends=2)
    w.join("s")
    keys = chain("a", 1)
    w.store("s", keys)
    one, two = w.persists
    w.kept(one)
    assert w.resident(keys) == [True]
    w.kept(two)
    assert w.resident(keys) == [False]


def test_skip_l1_one_backend_gives_up(shell: MakeShell) -> None:
    w = shell(store_policy=SKIP, backends=2, persist_tries=1)
    w.join("s")
    keys = chain("a", 1)
    w.store("s", keys)
    one, two = w.persists
    w.kept(one)
    w.kept(two, outcome=IoOutcome.FULL)
    assert w.resident(keys) == [False]


def test_skip_l1_keeps_what_l2_could_not_take(shell: MakeShell) -> None:
    w = shell(store_policy=SKIP, persist_tries=1)
    w.join("s")
    keys = chain("a", 1)
    w.store("s", keys)
    w.kept(outcome=IoOutcome.FULL)
    assert w.resident(keys) == [True]
    w.touch("s", keys)
    assert w.resident(keys) == [True]


# ---- drain


@pytest.mark.parametrize("policy", [StorePolicy.WRITE_THROUGH, BACK])
def test_drain_writes_all_that_l2_lacks(shell: MakeShell, policy: StorePolicy) -> None:
    w = shell(store_policy=policy, persists_per_backend=2, persist_queue_bytes=PAGE, pages=16)
    w.join("s", (row(1), row(1)))
    keys, other = chain("a", 3), alone("x", 2)
    w.put(other)
    ticket = w.ask("s", other)
    w.bring()
    w.end("s", w.hit(ticket).lease)
    w.store("s", keys)
    w.do(ev.Drain())
    while w.persists:
        assert len(w.persists) <= 2
        w.kept()
    assert w.holds[0] >= set(keys[1:])
    assert w.directory.persister.idle
    assert w.counters["persists"] == 3
    w.do(ev.Drain())
    assert not w.persists


def test_drain_waits_out_a_pause(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    w.store("s", chain("a", 1))
    w.do(ev.Drain())
    w.kept(outcome=IoOutcome.ERROR)
    assert not w.directory.persister.idle
    w.now_s += 1.0
    w.do(ev.Tick())
    w.kept()
    assert w.directory.persister.idle
