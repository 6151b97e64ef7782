"""A tenant at its limit loses its own coldest chunks; whoever cannot, is refused and counted."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace
from tests.core.build import NO_CAPS, PAGE, World, chain, row
from tests.core.conftest import MakeShell

from kvkeep.core import events as ev
from kvkeep.core import quota
from kvkeep.core.eviction import PrefixLRU
from kvkeep.types import (
    Amount,
    ChunkHash,
    CommitOutcome,
    IoOutcome,
    LeaseId,
    Reason,
    StageOutcome,
    StorePolicy,
)

GRANTED, OVER = StageOutcome.GRANTED, StageOutcome.OVER_QUOTA


def set_quota(world: World, salt: str | None, amount: Amount | None) -> None:
    assert isinstance(world.do(ev.SetQuota(salt, amount)), ev.Done)


def of(world: World, salt: str | None) -> int:
    """Pages that the tenant has."""
    return world.directory.quotas.used_bytes(salt) // PAGE


def names(salt: str | None, *prompts: str) -> list[list[ChunkHash]]:
    return [chain(prompt, 1, salt) for prompt in prompts]


def store(world: World, salt: str | None, *prompts: str) -> list[StageOutcome]:
    """Prompts of one chunk each, one after the other."""
    outcomes: list[StageOutcome] = []
    for hashes in names(salt, *prompts):
        outcomes += world.store("s", hashes, salt=salt)
    return outcomes


def there(world: World, salt: str | None, prompts: str) -> str:
    return "".join(p for p in prompts if all(world.resident(chain(p, 1, salt))))


@pytest.fixture
def world() -> World:
    made = World(32)
    made.join("s")
    return made


def test_its_own_coldest_goes_and_nobody_elses(world: World) -> None:
    set_quota(world, "t", 3 * PAGE)
    assert store(world, "u", *"ab") == [GRANTED] * 2  # older than all of "t"
    assert store(world, None, *"ab") == [GRANTED] * 2
    assert store(world, "t", *"abcde") == [GRANTED] * 5
    assert there(world, "t", "abcde") == "cde"
    assert there(world, "u", "ab") == "ab"
    assert there(world, None, "ab") == "ab"
    quotas = world.directory.quotas
    assert (quotas.evicted["t"], quotas.refused["t"], of(world, "t")) == (2, 0, 3)


def test_what_was_used_lately_stays(world: World) -> None:
    set_quota(world, "t", 3 * PAGE)
    store(world, "t", *"abc")
    hit = world.lookup("s", chain("a", 1, "t"), salt="t")
    world.end("s", hit.lease)
    store(world, "t", "d")
    assert there(world, "t", "abcd") == "acd"


def test_without_a_limit_of_its_own_a_tenant_has_the_default() -> None:
    world = World(32, limits=replace(NO_CAPS, default_quota=Fraction(1, 8)))
    world.join("s")
    set_quota(world, "big", Fraction(1, 2))
    for salt in ("x", "y", None):
        assert store(world, salt, *"abcdef") == [GRANTED] * 6
        assert of(world, salt) == 4
    assert store(world, "big", *"abcdefgh") == [GRANTED] * 8
    assert of(world, "big") == 8
    set_quota(world, "big", None)
    world.do(ev.Tick())
    assert of(world, "big") == 4


def test_everything_is_no_limit(world: World) -> None:
    """By default one tenant may fill L1, and others' cold chunks make room for it as ever."""
    store(world, "u", *"ab")
    letters = "abcdefghijklmnopqrstuvwxyzABCDEF"
    assert set(store(world, "t", *letters)) == {GRANTED}
    assert of(world, "t") == 32
    assert of(world, "u") == 0


def test_a_share_grows_with_the_memory() -> None:
    world = World(8)
    world.join("s")
    set_quota(world, "t", Fraction(1, 4))
    store(world, "t", *"abc")
    assert of(world, "t") == 2
    world.do(ev.Grown(16 * PAGE))
    store(world, "t", *"defgh")
    assert of(world, "t") == 4


def test_staged_chunks_count_until_they_are_given_back(world: World) -> None:
    set_quota(world, "t", 2 * PAGE)
    staged = world.stage("s", chain("abcd", 4, "t"), salt="t")
    assert staged.outcomes == (GRANTED, GRANTED, OVER, OVER)
    assert world.directory.quotas.refused["t"] == 2
    assert world.counters["stage_over_quota"] == 2
    assert of(world, "t") == 2
    world.abort("s", staged.leases)
    assert of(world, "t") == 0
    assert world.stage("s", chain("xy", 2, "t"), salt="t").outcomes == (GRANTED, GRANTED)


def test_memory_of_a_lost_owner_counts_for_nobody(world: World) -> None:
    set_quota(world, "t", 2 * PAGE)
    staged = world.stage("s", chain("ab", 2, "t"), salt="t")
    world.abort("s", staged.leases, confirmed=False)
    assert of(world, "t") == 0
    assert world.stage("s", chain("cd", 2, "t"), salt="t").outcomes == (GRANTED, GRANTED)


def test_what_is_read_stays_and_the_tenant_alone_is_refused(world: World) -> None:
    set_quota(world, "t", 2 * PAGE)
    store(world, "t", "a", "b")
    leases = [world.lookup("s", chain(p, 1, "t"), salt="t").lease for p in "ab"]
    assert store(world, "t", "c") == [OVER]
    assert store(world, "u", *"abc") == [GRANTED] * 3
    assert there(world, "t", "abc") == "ab"
    world.end("s", leases[0])
    assert store(world, "t", "c") == [GRANTED]
    assert there(world, "t", "abc") == "bc"


def test_a_prompt_longer_than_the_limit_keeps_its_beginning(world: World) -> None:
    set_quota(world, "t", 3 * PAGE)
    store(world, "t", "x")
    hashes = chain("abcdef", 6, "t")
    for position in range(3):
        staged = world.stage("s", hashes, position, position + 1, salt="t")
        assert world.commit("s", staged.leases).outcomes == (CommitOutcome.COMMITTED,)
    assert world.stage("s", hashes, 3, salt="t").outcomes == (OVER,) * 3
    assert world.resident(hashes) == [True, True, True, False, False, False]


def test_a_chunk_larger_than_the_limit_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "MOST_AT_ONCE", 1)
    world = World(32)
    world.join("s", (row(4),))
    set_quota(world, "t", 8 * PAGE)
    store(world, "t", "a", "b")
    set_quota(world, "t", 3 * PAGE)
    assert store(world, "t", "c") == [OVER]
    assert there(world, "t", "ab") == "ab"
    set_quota(world, "t", 0)
    assert store(world, "t", "c") == [OVER]


def test_a_lower_limit_is_reached_a_part_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "MOST_AT_ONCE", 4)
    store(world, "t", *"abcdefghijklmnop")
    set_quota(world, "t", 2 * PAGE)
    assert of(world, "t") == 16  # not in the operator's callback
    assert store(world, "t", "q") == [GRANTED]
    assert of(world, "t") == 13
    world.do(ev.Tick())
    assert of(world, "t") == 9
    for _ in range(3):
        world.do(ev.Tick())
    assert of(world, "t") == 2
    assert there(world, "t", "abcdefghijklmnopq") == "pq"


def test_a_lower_limit_waits_for_readers(world: World) -> None:
    store(world, "t", *"abcd")
    leases = [world.lookup("s", chain(p, 1, "t"), salt="t").lease for p in "abc"]
    set_quota(world, "t", PAGE)
    world.do(ev.Tick())
    assert there(world, "t", "abcd") == "abc"
    for lease in leases:
        world.end("s", lease)
    world.do(ev.Tick())
    assert there(world, "t", "abcd") == "c"


def test_forgetting_dropping_and_clearing_give_room(world: World) -> None:
    set_quota(world, "t", 2 * PAGE)
    for event in (ev.Clear(), ev.Forget("s")):
        assert store(world, "t", "a", "b") == [GRANTED] * 2
        world.do(event)
        assert of(world, "t") == 0
    store(world, "t", "a", "b")
    world.do(ev.Drop("s", chain("a", 1, "t")[1]))
    assert of(world, "t") == 1


def test_the_policy_keeps_candidates_of_those_who_need_it_only(world: World) -> None:
    policy = world.directory.residents.policy
    assert isinstance(policy, PrefixLRU)
    store(world, "free", "a")
    assert set(policy._salts) == set()
    set_quota(world, "t", 2 * PAGE)
    store(world, "t", "a")
    assert set(policy._salts) == {"t"}
    world.do(ev.Clear())
    assert set(policy._salts) == set()
    staged = world.stage("s", chain("a", 1, "t"), salt="t")
    world.do(ev.Tick())
    assert set(policy._salts) == {"t"}
    world.abort("s", staged.leases)
    world.do(ev.Tick())
    assert set(policy._salts) == set()
    store(world, "t", "a")
    set_quota(world, "t", None)
    world.do(ev.Tick())
    assert set(policy._salts) == set()


def test_refusals_of_very_many_tenants_are_counted_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "MOST_COUNTED", 2)
    for n in (0, 1, 2, 3, 0):
        set_quota(world, f"t{n}", 0)
        assert store(world, f"t{n}", "a") == [OVER]
    assert world.directory.quotas.refused == Counter({"t0": 2, "t1": 1, quota.OTHERS: 2})


def test_setting_a_limit_says_whether_it_changed(world: World) -> None:
    assert world.do(ev.SetQuota("t", Fraction(1))) == ev.Done(0)
    assert world.do(ev.SetQuota("t", PAGE)) == ev.Done(1)
    assert world.do(ev.SetQuota("t", PAGE)) == ev.Done(0)
    assert world.do(ev.SetQuota("t", None)) == ev.Done(1)
    assert world.do(ev.SetQuota("t", None)) == ev.Done(0)


# ---- with L2


def test_a_fetch_evicts_the_tenants_own(shell: MakeShell) -> None:
    world = shell(32)
    world.join("s")
    set_quota(world, None, 2 * PAGE)
    store(world, "u", "a", "b")
    store(world, None, "x", "y")
    wanted = chain("a", 1)
    world.put(wanted[1:])
    ticket = world.ask("s", wanted)
    assert there(world, None, "xy") == "y"
    assert of(world, None) == 2  # one is on its way
    world.bring(wanted[1])
    assert world.hit(ticket).chunks == 1
    assert there(world, "u", "ab") == "ab"
    world.end("s", world.hit(ticket).lease)


def test_a_fetch_over_the_limit_is_lost_and_holds_up_nobody(shell: MakeShell) -> None:
    world = shell(32)
    world.join("s")
    world.join("o")
    set_quota(world, None, 2 * PAGE)
    long, other = chain("abcd", 4), chain("o", 1, "u")
    world.put(long[1:])
    world.put(other[1:])
    ticket = world.ask("s", long)
    world.bring()
    hit = world.hit(ticket)
    assert hit.chunks == 2
    assert hit.reasons[0] is Reason.OVER_QUOTA
    assert world.directory.quotas.refused[None] == 1
    event = ev.Lookup("o", "r", other[1], "u")
    reply = world.do(event)
    assert isinstance(reply, ev.Pending)
    world.answer(reply.ticket)
    world.bring()
    assert world.hit(reply.ticket).chunks == 1
    assert of(world, None) == 2


def test_a_fetch_that_fails_gives_its_room_back(shell: MakeShell) -> None:
    world = shell(32)
    world.join("s")
    set_quota(world, None, PAGE)
    wanted = chain("a", 1)
    for outcome in (IoOutcome.ERROR, IoOutcome.MISSING, IoOutcome.CORRUPT):
        world.put(wanted[1:])
        world.ask("s", wanted)
        assert of(world, None) == 1
        world.bring(wanted[1], outcome=outcome)
        assert of(world, None) == 0


def test_full_for_one_tenant_is_not_full_for_the_others(shell: MakeShell) -> None:
    """A put that a backend refuses for a tenant's limit ends that job alone: no pause, no retry."""
    world = shell(32, store_policy=StorePolicy.WRITE_THROUGH, persists_per_backend=1)
    world.join("s")
    store(world, "full", "a")
    store(world, "u", "a", "b")
    world.kept(outcome=IoOutcome.FULL)
    world.kept()
    world.kept()
    assert world.holds[0] == {chain(p, 1, "u")[1] for p in "ab"}
    assert world.counters["persisted_full"] == 1
    assert world.counters["persisted_ok"] == 2
    assert world.persists == {}


# ---- any order

SALTS: list[str | None] = [None, "t", "u", "v"]
PROMPTS = ["aaaa", "aabb", "abcd", "b", "cc", "dddd", "de"]
AMOUNTS: list[Amount | None] = [
    None, 0, PAGE, 3 * PAGE, 7 * PAGE, Fraction(1, 8), Fraction(1, 2), Fraction(1),
]  # fmt: skip


class QuotaMachine(RuleBasedStateMachine):
    """Tenants store, read, abort and are limited, in any order; the audit runs after each event."""

    @initialize(pages=st.sampled_from([16, 40]), default=st.sampled_from(AMOUNTS[3:]))
    def start(self, pages: int, default: Amount) -> None:
        self.world = World(pages, limits=replace(NO_CAPS, default_quota=default))
        self.world.join("s")
        self.staged: list[LeaseId] = []
        self.reads: list[LeaseId] = []

    @rule(salt=st.sampled_from(SALTS), prompt=st.sampled_from(PROMPTS), commits=st.booleans())
    def stage(self, salt: str | None, prompt: str, commits: bool) -> None:
        others = self._others(salt)
        used, limit = self._used(salt), self.world.directory.quotas.limit_bytes(salt)
        refused = self.world.directory.quotas.refused[salt]
        staged = self.world.stage("s", chain(prompt, len(prompt), salt), salt=salt)
        granted = staged.outcomes.count(GRANTED)
        assert self._used(salt) <= max(limit, used)
        if OVER in staged.outcomes or self._is_limited(salt):
            room = self.world.directory.arena.free_bytes
            went = others - self._others(salt)
            # Somebody else's may go only where L1 itself is full.
            assert not went or room == 0 or not granted
        over = staged.outcomes.count(OVER)
        assert self.world.directory.quotas.refused[salt] == refused + over
        if commits:
            self.world.commit("s", staged.leases)
        else:
            self.staged += staged.leases

    @rule(confirmed=st.booleans(), most=st.integers(1, 4))
    def abort(self, confirmed: bool, most: int) -> None:
        some, self.staged = self.staged[:most], self.staged[most:]
        self.world.abort("s", some, confirmed)

    @rule(most=st.integers(1, 4))
    def commit(self, most: int) -> None:
        some, self.staged = self.staged[:most], self.staged[most:]
        self.world.commit("s", some)

    @rule(salt=st.sampled_from(SALTS), prompt=st.sampled_from(PROMPTS))
    def read(self, salt: str | None, prompt: str) -> None:
        hit = self.world.lookup("s", chain(prompt, len(prompt), salt), salt=salt)
        if hit.lease:
            self.reads.append(hit.lease)

    @rule(most=st.integers(1, 9))
    def end(self, most: int) -> None:
        some, self.reads = self.reads[:most], self.reads[most:]
        for lease in some:
            self.world.end("s", lease)

    @rule(salt=st.sampled_from(SALTS), amount=st.sampled_from(AMOUNTS))
    def limit(self, salt: str | None, amount: Amount | None) -> None:
        set_quota(self.world, salt, amount)

    @rule()
    def tick(self) -> None:
        free = {salt: self._mine(salt) for salt in SALTS if not self._is_limited(salt)}
        for _ in range(16):  # by and by
            self.world.do(ev.Tick())
        assert free == {salt: self._mine(salt) for salt in free}
        for salt in SALTS:
            over = self._used(salt) - self.world.directory.quotas.limit_bytes(salt)
            assert not self._is_limited(salt) or over <= self._kept_bytes(salt)

    @rule()
    def clear(self) -> None:
        self.world.do(ev.Clear())

    def _is_limited(self, salt: str | None) -> bool:
        return self.world.directory.quotas.amount(salt) != Fraction(1)

    def _used(self, salt: str | None) -> int:
        return self.world.directory.quotas.used_bytes(salt)

    def _mine(self, salt: str | None) -> set[ChunkHash]:
        return {c.hash for c in self.world.directory.residents.index.values() if c.salt == salt}

    def _others(self, salt: str | None) -> set[ChunkHash]:
        return {c.hash for c in self.world.directory.residents.index.values() if c.salt != salt}

    def _kept_bytes(self, salt: str | None) -> int:
        """Of the tenant, what may not go: it is read or staged, or before something that is."""
        d = self.world.directory
        stays = {c.hash for c in d.residents.unlinked if c.salt == salt}
        index = d.residents.index
        roots = [c for c in index.values() if c.salt == salt and not d.residents.idle(c)]
        parents = [c.parent for c in roots]
        parents += [w.parent for s in d.sessions.values() for w in s.writes_open.values()]
        stays |= {c.hash for c in roots}
        while parents:
            chunk = index.get(parents.pop())
            if chunk is not None and chunk.salt == salt and chunk.hash not in stays:
                stays.add(chunk.hash)
                parents.append(chunk.parent)
        return len(stays) * PAGE + d.quotas.staged_bytes[salt]

    @invariant()
    def sums_are_exact(self) -> None:
        if hasattr(self, "world"):
            d = self.world.directory
            leases = [w for s in d.sessions.values() for w in s.writes_open.values()]
            for salt in SALTS:
                resident = [*d.residents.index.values(), *d.residents.unlinked]
                pages = sum(c.salt == salt for c in resident)
                pages += sum(w.space.salt == salt for w in leases)
                assert self._used(salt) == pages * PAGE


TestQuotas = QuotaMachine.TestCase
TestQuotas.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=25)


@given(st.fractions(0, 1), st.integers(0, 1 << 50))
def test_a_share_is_never_more_than_its_part(share: Fraction, capacity_bytes: int) -> None:
    size = quota.in_bytes(share, capacity_bytes)
    assert 0 <= size <= share * capacity_bytes < size + 1
    assert quota.in_bytes(7, capacity_bytes) == 7
