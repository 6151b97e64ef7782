"""Fetches against deadlines and limits: late I/O, no room, prefixes longer than L1, far ones."""

import pytest
from tests.core.build import PAGE, alone, chain, row
from tests.core.conftest import MakeShell

from kvkeep.core import events as ev
from kvkeep.types import NO_LEASE, GroupKind, IoOutcome, Reason, SlotState

MISS, TIMEOUT, NO_ROOM = Reason.L2_MISS, Reason.L2_TIMEOUT, Reason.NO_ROOM
STAGING = SlotState.STAGING

# ---- the lookup's deadline


def test_the_deadline_answers_with_what_is_there(shell: MakeShell) -> None:
    w = shell(fetches_per_backend=2)
    w.join("s")
    keys = chain("a", 4)
    w.put(keys)
    ticket = w.ask("s", keys, wait_s=0.2)
    assert w.alarms[ticket] == w.now_s + 0.2
    w.bring(keys[1])  # now 2 and 3 are under way, 4 waits for its turn
    w.ring(ticket)
    hit = w.hit(ticket)
    assert (hit.chunks, hit.tiers, hit.reasons) == (1, b"\1", (TIMEOUT, TIMEOUT, NO_ROOM))
    assert w.did(ev.Expire(ticket)) == 0
    w.bring()  # nobody waits, but the bytes are good
    assert w.resident(keys) == [True, True, True, False]
    again = w.ask("s", keys)
    w.bring()
    assert w.hit(again).tiers == bytes([0, 0, 0, 1])


def test_without_a_word_the_servers_limit_holds(shell: MakeShell) -> None:
    w = shell(lookup_wait_s=0.7)
    w.join("s")
    keys = chain("a", 1)
    w.put(keys)
    assert w.alarms[w.ask("s", keys)] == w.now_s + 0.7


def test_an_alarm_that_rings_early_is_set_again(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 1)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.now_s = w.alarms[ticket] - 0.001
    assert w.did(ev.Expire(ticket)) == 0
    assert w.effects == [ev.Alarm(ticket, w.alarms[ticket])]
    assert w.waits(ticket)


def test_the_deadline_of_one_is_not_that_of_the_other(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    hasty, patient = w.ask("s", keys, wait_s=0.01), w.ask("s", keys, wait_s=5.0)
    w.ring(hasty)
    assert w.hit(hasty).reasons == (TIMEOUT, TIMEOUT)
    assert w.waits(patient)
    w.bring()
    assert w.hit(patient).chunks == 2


def test_the_deadline_passes_before_the_backends_have_answered(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 2)
    w.store("s", keys[:2])
    w.put(keys)
    ticket = w.ask("s", keys, wait_s=0.1, probe=False)
    question = w.probes.pop(ticket)
    assert question.deadline_s == w.now_s + 0.1
    w.now_s += 0.1
    assert w.did(ev.Expire(ticket)) == 1
    assert w.hit(ticket).chunks == 1
    assert w.did(ev.Probed(ticket, (1,))) == 0
    assert not w.fetches


def test_what_an_engine_committed_before_the_deadline_counts(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    staged = w.stage("s", keys, 0, 1)
    ticket = w.ask("s", keys)
    w.commit("s", staged.leases)
    w.ring(ticket)
    assert (w.hit(ticket).chunks, w.hit(ticket).reasons) == (1, (TIMEOUT,))


# ---- the deadline of the I/O


@pytest.mark.parametrize("outcome", [IoOutcome.OK, IoOutcome.TIMEOUT])
def test_late_memory_is_free_only_when_its_io_has_returned(
    shell: MakeShell, outcome: IoOutcome
) -> None:
    w = shell(pages=4, fetch_fraction=1.0)
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.bring(keys[1])
    slow = w.fetches[keys[2]]
    w.late(keys[2])
    assert (w.hit(ticket).chunks, w.hit(ticket).reasons) == (1, (TIMEOUT,))
    assert w.did(ev.FetchLate(slow.id)) == 0
    w.end("s", w.hit(ticket).lease)
    w.do(ev.Clear())
    w.now_s += 1000.0
    w.do(ev.Tick())
    assert w.bytes_in(STAGING) == PAGE
    others = alone("x", 4)
    granted = w.stage("s", others)
    assert len(granted.leases) == 3, "the late one's page is not given to anybody"
    w.bring(keys[2], outcome=outcome)
    assert not w.resident(keys)[1], "what was cleared meanwhile stays away"
    assert len(w.stage("s", others, 3).leases) == 1


@pytest.mark.parametrize("outcome", [IoOutcome.OK, IoOutcome.ERROR])
def test_late_bytes_are_published_for_the_next(shell: MakeShell, outcome: IoOutcome) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 1)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.late(keys[1])
    w.bring(keys[1], outcome=outcome)
    assert w.hit(ticket).reasons == (TIMEOUT,)
    assert w.bytes_in(STAGING) == 0
    assert w.resident(keys) == [outcome is IoOutcome.OK]


@pytest.mark.parametrize("limit", [{"fetches_per_backend": 1}, {"fetch_bytes": PAGE}])
def test_late_ones_count_against_their_backend_only(
    shell: MakeShell, limit: dict[str, int]
) -> None:
    w = shell(backends=2, **limit)
    w.join("s")
    one, two, three = alone("1"), alone("2"), alone("3")
    w.put(one, 0)
    w.put(two, 0)
    w.put(three, 1)
    w.ask("s", one)
    w.late(one[1])
    blocked = w.ask("s", two)
    assert two[1] not in w.fetches
    going = w.ask("s", three)
    assert three[1] in w.fetches
    w.bring(three[1])
    assert w.hit(going).tiers == bytes([2])
    assert w.waits(blocked)
    w.bring(one[1])
    assert two[1] in w.fetches
    w.bring()
    assert w.hit(blocked).chunks == 1


def test_a_lookup_of_a_chunk_that_is_late(shell: MakeShell) -> None:
    """One fetch per chunk: there is no second one, and it is not said that L2 has nothing."""
    w = shell()
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    w.ask("s", keys)
    w.late(keys[1])
    ticket = w.ask("s", keys)
    if w.waits(ticket):
        w.ring(ticket)
    assert w.hit(ticket).reasons[0] is TIMEOUT


# ---- room


def test_what_finds_no_room_goes_on_after_an_end(shell: MakeShell) -> None:
    w = shell(pages=4, fetch_fraction=1.0)
    for session in "ab":
        w.join(session)
    full, keys = alone("x", 3), chain("a", 2)
    w.store("a", full)
    lease = w.lookup("a", full).lease
    w.put(keys)
    ticket = w.ask("b", keys)
    assert list(w.fetches) == [keys[1]]
    w.bring()
    assert w.waits(ticket)
    assert list(w.fetches) == []
    w.end("a", lease)
    assert list(w.fetches) == [keys[2]]
    w.bring()
    assert w.hit(ticket).chunks == 2


def test_what_finds_no_room_until_the_deadline(shell: MakeShell) -> None:
    w = shell(pages=3, fetch_fraction=1.0)
    for session in "ab":
        w.join(session)
    full, keys = alone("x", 2), chain("a", 3)
    w.store("a", full)
    w.lookup("a", full)
    w.put(keys)
    ticket = w.ask("b", keys)
    w.bring()
    w.ring(ticket)
    assert (w.hit(ticket).chunks, w.hit(ticket).reasons) == (1, (NO_ROOM, NO_ROOM))


def test_nobody_overtakes_who_waits_for_room(shell: MakeShell) -> None:
    w = shell(pages=4, fetch_fraction=1.0)
    for session in ("reader", "large", "small"):
        w.join(session, (row(2),) if session == "large" else (row(1),))
    full = alone("x", 3)
    w.store("reader", full)
    lease = w.lookup("reader", full).lease
    large, small = alone("large"), alone("small")
    w.put([*large, *small])
    w.ask("large", large)
    w.ask("small", small)
    w.do(ev.Tick())
    assert not w.fetches
    w.end("reader", lease)
    assert set(w.fetches) == {large[1], small[1]}


def test_a_burst_makes_room_by_evicting(shell: MakeShell) -> None:
    w = shell(pages=8, fetch_fraction=1.0)
    w.join("s")
    w.store("s", alone("x", 7))
    keys = chain("a", 6)
    w.put(keys)
    ticket = w.ask("s", keys)
    assert list(w.fetches) == keys[1:]
    w.bring()
    assert w.hit(ticket).chunks == 6


@pytest.mark.parametrize("limit", [{"fetch_bytes": 2 * PAGE}, {"fetch_fraction": 2 / 8}])
def test_a_prefix_beyond_the_fetch_bound_comes_in_turns(
    shell: MakeShell, limit: dict[str, float]
) -> None:
    w = shell(pages=8, **limit)
    w.join("s")
    keys = chain("a", 8)
    w.put(keys)
    ticket = w.ask("s", keys)
    turns = 0
    while w.fetches:
        assert len(w.fetches) <= 2
        w.bring(next(iter(w.fetches)))
        turns += 1
    assert (w.hit(ticket).chunks, turns) == (8, 8)


def test_a_chunk_larger_than_the_fetch_bound_comes_alone(shell: MakeShell) -> None:
    w = shell(fetch_bytes=PAGE)
    w.join("s", (row(2),))
    keys = chain("a", 2)
    w.put(keys)
    ticket = w.ask("s", keys)
    assert list(w.fetches) == [keys[1]]
    w.bring()
    assert w.hit(ticket).chunks == 2


@pytest.mark.parametrize(("pages", "share"), [(4, 1.0), (8, 0.5)])
def test_a_prefix_beyond_the_cap_is_used_as_far_as_it_fits(
    shell: MakeShell, pages: int, share: float
) -> None:
    w = shell(pages=pages, session_reserve_fraction=share, fetch_fraction=1.0)
    w.join("s")
    keys = chain("a", 6)
    w.store("s", keys[:2])
    w.put(keys)
    ticket = w.ask("s", keys)
    assert list(w.fetches) == keys[2:5]
    w.bring()
    hit = w.hit(ticket)
    assert (hit.chunks, hit.tiers) == (4, bytes([0, 1, 1, 1]))
    assert hit.reasons == (NO_ROOM, NO_ROOM)


def test_what_two_lookups_of_a_session_want_counts_once(shell: MakeShell) -> None:
    w = shell(pages=8, session_reserve_fraction=0.5, fetch_fraction=1.0)
    w.join("s")
    keys, other = chain("a", 4), alone("x")
    w.put([*keys, *other])
    first, second = w.ask("s", keys), w.ask("s", keys)
    third = w.ask("s", other)  # the four under way fill the cap
    assert w.hit(third).reasons == (NO_ROOM,)
    w.bring()
    assert w.hit(first).chunks == w.hit(second).chunks == 4
    assert w.directory.sessions["s"].reserved_bytes == 4 * PAGE


def test_far_beyond_the_cap_and_then_near(shell: MakeShell) -> None:
    w = shell(pages=8, session_reserve_fraction=0.25, fetch_fraction=1.0)
    w.join("s")
    keys = chain("a", 4)
    w.store("s", keys[:2])
    w.put(keys[:4])
    far = w.ask("s", keys, near=False)
    assert w.hit(far) == ev.Hit(NO_LEASE, 3, (), (MISS,))
    assert not w.fetches
    near = w.ask("s", keys)
    w.bring()
    assert (w.hit(near).chunks, w.hit(near).reasons) == (2, (NO_ROOM, MISS))


def test_far_under_the_cap_is_reserved(shell: MakeShell) -> None:
    w = shell()
    w.join("s")
    keys = chain("a", 2)
    w.put(keys)
    ticket = w.ask("s", keys, near=False)
    w.bring()
    assert w.hit(ticket).chunks == 2
    assert w.hit(ticket).lease != NO_LEASE


def test_a_window_beyond_the_cap(shell: MakeShell) -> None:
    w = shell(pages=8, session_reserve_fraction=0.25, fetch_fraction=1.0)
    w.join("s", (row(1, GroupKind.SLIDING_WINDOW, 2),))
    keys = chain("a", 6)
    w.put(keys)
    ticket = w.ask("s", keys)
    assert list(w.fetches) == keys[5:]
    w.bring()
    assert w.hit(ticket).chunks == 6


def test_fetches_do_not_use_up_what_engines_may_stage(shell: MakeShell) -> None:
    w = shell(pages=8, staging_fraction=0.5, fetch_fraction=0.5)
    w.join("s")
    keys, other = chain("a", 4), alone("x", 4)
    w.put(keys)
    w.ask("s", keys)
    assert len(w.fetches) == 4
    assert len(w.stage("s", other).leases) == 4


def test_growing_gives_room(shell: MakeShell) -> None:
    w = shell(pages=1, fetch_fraction=1.0)
    for session in "ab":
        w.join(session)
    full, keys = alone("x"), chain("a", 1)
    w.store("a", full)
    w.lookup("a", full)
    w.put(keys)
    ticket = w.ask("b", keys)
    assert not w.fetches
    w.do(ev.Grown(2 * PAGE))
    w.bring()
    assert w.hit(ticket).chunks == 1


def test_a_hit_that_waited_for_l2_was_used_too(shell: MakeShell) -> None:
    w = shell(pages=4, fetch_fraction=1.0)
    w.join("s")
    keys, other = chain("a", 2), alone("x", 2)
    w.store("s", keys[:2])
    w.store("s", other)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.bring()
    w.end("s", w.hit(ticket).lease)
    w.store("s", alone("y"))
    assert w.resident(keys) == [True, True]
    assert w.resident(other) == [True, False]
