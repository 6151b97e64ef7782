"""What is written to L2, when, and what becomes of it when that fails."""

from typing import Any

import pytest
from tests.core.build import FULL, PAGE, alone, chain, row
from tests.core.conftest import MakeShell
from tests.core.shell import Shell

from kvkeep.core import events as ev
from kvkeep.types import ChunkHash, CommitOutcome, IoOutcome, SlotState, StorePolicy, TransferId

THROUGH, BACK, SKIP = StorePolicy.WRITE_THROUGH, StorePolicy.WRITE_BACK, StorePolicy.SKIP_L1
OK, ERROR = IoOutcome.OK, IoOutcome.ERROR


@pytest.fixture
def through(shell: MakeShell) -> Any:
    """A shell with one session and write_through."""

    def make(*args: Any, **kwargs: Any) -> Shell:
        w = shell(*args, **{"store_policy": THROUGH, **kwargs})
        w.join("s")
        return w

    return make


def under_way(w: Shell) -> list[ChunkHash]:
    return [persist.chunk for persist in w.persists.values()]


def outcomes(w: Shell) -> list[tuple[str, int, IoOutcome]]:
    """What requests were told, in order."""
    told = [effect for effect in w.told if isinstance(effect, ev.ChunkPersisted)]
    return [(effect.request, effect.backend, effect.outcome) for effect in told]


# ---- write_through


def test_a_commit_is_written_at_once(through: MakeShell) -> None:
    w = through()
    keys = chain("a", 2)
    staged = w.stage("s", keys)
    assert not w.persists
    w.commit("s", staged.leases)
    assert under_way(w) == keys[1:]
    one, two = w.persists.values()
    assert (one.backend, one.depth, two.depth) == (0, 0, 1)
    assert one.objects.rows == ((0, 0, PAGE),)
    slot = w.directory.residents.index[keys[1]].rows[0]
    assert one.offsets == (w.directory.slots.offset[slot],)
    assert not w.directory.persister.idle
    w.kept()
    assert w.directory.persister.idle
    assert outcomes(w) == [("r", 0, OK)] * 2
    assert w.counters["persisted_bytes"] == 2 * PAGE


def test_it_says_how_deep_the_chunk_is(through: MakeShell) -> None:
    w = through()
    keys = chain("a", 3)
    item = ev.StageItem("r", keys[1], b"".join(keys[2:]), None, 7)
    reply = w.do(ev.Stage("s", (item,)))
    assert isinstance(reply, ev.Staged)
    w.commit("s", reply.leases)
    assert [persist.depth for persist in w.persists.values()] == [7, 8]


def test_bytes_are_held_only_while_they_are_written(through: MakeShell) -> None:
    w = through(pages=2, persists_per_backend=1)
    keys = chain("a", 2)
    w.store("s", keys)
    assert under_way(w) == keys[1:2]
    assert w.directory.slots.reserved_bytes == PAGE
    w.store("s", alone("x"))  # the one that waits may go: engines come first
    assert w.resident(keys) == [True, False]
    refused = w.stage("s", alone("y", 2))
    assert len(refused.leases) == 1  # but not the one that is being read
    w.abort("s", refused.leases)
    w.kept()
    assert w.counters["persist_lost"] == 2
    assert w.directory.slots.reserved_bytes == 0
    assert w.counters["persists"] == 1


def test_what_l2_has_is_not_written_again(through: MakeShell) -> None:
    w = through()
    keys = chain("a", 1)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.bring()
    w.end("s", w.hit(ticket).lease)
    w.store("s", keys)  # the engine had it too
    assert not w.persists
    assert w.directory.persister.idle


def test_stored_again_makes_a_failure_good(through: MakeShell) -> None:
    w = through(persist_tries=1)
    keys = chain("a", 1)
    w.store("s", keys)
    w.kept(outcome=ERROR)
    assert outcomes(w) == [("r", 0, ERROR)]
    assert w.counters["persist_failed"] == 1
    assert w.directory.persister.idle
    w.now_s += 60.0
    w.store("s", keys)
    assert under_way(w) == keys[1:]
    w.store("s", keys)  # it is on its way
    assert len(w.persists) == 1
    w.kept()
    w.store("s", keys)
    assert not w.persists


def test_overflow_drops_the_oldest(through: MakeShell) -> None:
    w = through(persists_per_backend=1, persist_queue_bytes=2 * PAGE)
    keys = chain("a", 5)
    w.store("s", keys)
    assert under_way(w) == [keys[1]]
    assert w.counters["persist_overflow"] == 2
    done = []
    while w.persists:
        done += under_way(w)
        w.kept()
    assert done == [keys[1], keys[4], keys[5]]
    assert w.resident(keys) == [True] * 5


def test_two_backends_each_get_it(through: MakeShell) -> None:
    w = through(backends=2, persists_per_backend=1)
    keys = chain("a", 2)
    w.store("s", keys)
    assert [(p.backend, p.chunk) for p in w.persists.values()] == [(0, keys[1]), (1, keys[1])]
    (slow, fast) = w.persists
    w.kept(fast)
    assert [(p.backend, p.chunk) for p in w.persists.values()] == [(0, keys[1]), (1, keys[2])]
    assert w.directory.residents.index[keys[1]].stored == 0b10
    w.kept(slow, outcome=ERROR)
    assert 0 not in [p.backend for p in w.persists.values()]  # this one pauses, that one does not
    w.kept()
    assert w.directory.residents.index[keys[2]].stored == 0b10


def test_overflow_takes_from_the_backend_that_is_behind(through: MakeShell) -> None:
    w = through(backends=2, persists_per_backend=1, persist_queue_bytes=3 * PAGE)
    all_keys = chain("a", 4)
    w.store("s", all_keys[:3])  # one under way and one waiting for each
    fast = next(t for t, p in w.persists.items() if p.backend == 1)
    w.kept(fast)
    w.store("s", all_keys)
    assert w.counters["persist_overflow"] == 2
    while w.persists:
        w.kept()
    assert w.holds[0] == {all_keys[1], all_keys[4]}
    assert w.holds[1] == set(all_keys[1:])


@pytest.mark.parametrize("most", [1, 3])
def test_each_backend_has_its_own_limit(through: MakeShell, most: int) -> None:
    w = through(backends=2, persists_per_backend=most)
    w.store("s", chain("a", 5))
    assert [p.backend for p in w.persists.values()].count(0) == most
    assert [p.backend for p in w.persists.values()].count(1) == most


# ---- failures


def test_a_failure_pauses_longer_each_time(through: MakeShell) -> None:
    w = through(persist_tries=4)
    w.store("s", chain("a", 1))
    for pause_s in (0.5, 1.0, 2.0):
        w.kept(outcome=ERROR)
        assert not w.persists
        w.now_s += pause_s - 0.01
        w.do(ev.Tick())
        assert not w.persists
        w.now_s += 0.02
        w.do(ev.Tick())
        assert len(w.persists) == 1
        assert outcomes(w) == []
    w.kept(outcome=IoOutcome.TIMEOUT)
    assert outcomes(w) == [("r", 0, IoOutcome.TIMEOUT)]
    assert w.counters["persist_failed"] == 1
    assert w.directory.persister.idle


def test_failures_of_one_burst_count_once(through: MakeShell) -> None:
    w = through(persists_per_backend=4)
    w.store("s", chain("a", 4))
    w.kept(outcome=ERROR)
    w.now_s += 0.51
    w.do(ev.Tick())
    assert len(w.persists) == 4


def test_a_backend_that_is_full_holds_nobody_up(through: MakeShell) -> None:
    w = through(persists_per_backend=1)
    keys = chain("a", 2)
    w.store("s", keys)
    w.kept(outcome=IoOutcome.FULL)
    assert under_way(w) == keys[2:], "no second try, and no pause"
    assert w.directory.persister.missing() == 2
    w.kept()
    assert w.directory.persister.missing() == 1


def test_a_success_ends_the_pauses(through: MakeShell) -> None:
    w = through()
    w.store("s", chain("a", 1))
    for outcome in (ERROR, ERROR, OK):
        w.kept(outcome=outcome)
        w.now_s += 10.0
        w.do(ev.Tick())
    w.store("s", chain("b", 1))
    w.kept(outcome=ERROR)
    w.now_s += 0.51
    w.do(ev.Tick())
    assert len(w.persists) == 1


def test_a_backend_that_was_not_asked_costs_no_try(through: MakeShell) -> None:
    w = through(persist_tries=1)
    w.store("s", chain("a", 1))
    for _ in range(3):
        w.kept(outcome=IoOutcome.REFUSED)
        w.now_s += 60.0
        w.do(ev.Tick())
    w.kept()
    assert outcomes(w) == [("r", 0, OK)]


def test_a_full_backend_is_told_and_the_chunk_stays(through: MakeShell) -> None:
    w = through(persist_tries=1)
    keys = chain("a", 1)
    w.store("s", keys)
    w.kept(outcome=IoOutcome.FULL)
    assert outcomes(w) == [("r", 0, IoOutcome.FULL)]
    assert w.lookup("s", keys).chunks == 1


def test_one_row_of_two_fails(through: MakeShell) -> None:
    w = through(persist_tries=1)
    w.join("s", (row(1), row(1)))
    keys = chain("a", 1)
    w.store("s", keys)
    (persist,) = w.persists.values()
    w.persists.clear()
    w.do(ev.Persisted(persist.id, (OK, ERROR)))
    assert outcomes(w) == [("r", 0, ERROR)]
    assert not w.directory.residents.index[keys[1]].stored


def test_evicted_while_it_waits_for_another_try(through: MakeShell) -> None:
    w = through(pages=1)
    w.store("s", chain("a", 1))
    w.kept(outcome=ERROR)
    w.store("s", chain("b", 1))
    w.now_s += 1.0
    w.do(ev.Tick())
    assert w.counters["persist_lost"] == 1
    assert under_way(w) == chain("b", 1)[1:]


# ---- taken away meanwhile


@pytest.mark.parametrize("outcome", [OK, ERROR])
def test_forget_while_it_is_written(through: MakeShell, outcome: IoOutcome) -> None:
    w = through(persists_per_backend=1)
    keys = chain("a", 2)
    w.store("s", keys)
    w.do(ev.Forget("s"))
    assert w.counters["persist_forgotten"] == 1
    assert w.bytes_in(SlotState.RESIDENT) == PAGE  # it is being read
    w.kept(outcome=outcome)
    discards = [effect for effect in w.told if isinstance(effect, ev.Discard)]
    assert [(d.hashes, d.broken) for d in discards] == [(keys[1], False)]
    assert w.bytes_in(SlotState.RESIDENT) == 0
    w.now_s += 60.0
    w.do(ev.Tick())
    assert w.directory.persister.idle


def test_forget_leaves_another_layout_alone(through: MakeShell) -> None:
    w = through(persists_per_backend=1)
    for rank in (None, 0):
        w.join_rank("other", rank, 1)
    w.store("s", chain("a", 2))
    w.do(ev.Forget("other"))
    w.kept()
    assert len(w.persists) == 1


def test_a_chunk_dropped_while_it_is_written_does_not_stay_in_l2(through: MakeShell) -> None:
    """Its bytes failed to load, and so would what L2 gets now."""
    w = through()
    keys = chain("a", 1)
    w.store("s", keys)
    w.do(ev.Drop("s", keys[1]))
    w.told.clear()
    w.kept()
    assert [d.hashes for d in w.told if isinstance(d, ev.Discard)] == [keys[1]]
    assert w.bytes_in(SlotState.RESIDENT) == 0


def test_cleared_while_it_is_written(through: MakeShell) -> None:
    w = through()
    keys = chain("a", 1)
    w.store("s", keys)
    w.do(ev.Clear())
    assert w.resident(keys) == [False]
    assert w.bytes_in(SlotState.RESIDENT) == PAGE
    w.kept()
    assert w.directory.arena.free_bytes == w.directory.arena.populated_bytes
    assert outcomes(w) == [("r", 0, OK)]


def test_a_reader_and_a_writer_to_l2_hold_it_both(through: MakeShell) -> None:
    w = through()
    keys = chain("a", 1)
    w.store("s", keys)
    lease = w.lookup("s", keys).lease
    w.do(ev.Clear())
    w.kept()
    assert w.bytes_in(SlotState.RESIDENT) == PAGE
    w.end("s", lease)
    assert w.bytes_in(SlotState.RESIDENT) == 0


def test_without_l2_nothing_is_written(shell: MakeShell) -> None:
    w = shell(backends=0, store_policy=THROUGH)
    w.join("s")
    w.store("s", chain("a", 2))
    w.do(ev.Drain())
    w.do(ev.Drop("s", chain("a", 1)[1]))
    w.do(ev.Forget("s"))
    assert not [effect for effect in w.told if isinstance(effect, ev.IoEffect)]
    assert w.directory.persister.idle


def test_what_is_already_resident_belongs_to_its_first_request(through: MakeShell) -> None:
    w = through()
    keys = chain("a", 1)
    first = w.stage("s", keys)
    w.now_s += 5.0
    second = w.stage("s", keys)
    w.commit("s", first.leases)
    assert w.commit("s", second.leases).outcomes == (CommitOutcome.ALREADY_RESIDENT,)
    assert len(w.persists) == 1
    assert FULL[0].object_bytes == PAGE
    assert w.did(ev.Persisted(TransferId(55), (OK,))) == 0
