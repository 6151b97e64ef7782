"""Any order of events: the invariants hold after each, and the naive model agrees with every reply.

Sessions of one and two ranks, with one or two groups, of several sizes, with and without DMA,
recompute and writing join, rejoin, close and die in any order.
"""

from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.core.build import PAGE
from tests.core.machine_engines import ENGINES, FULL
from tests.core.model import Model, split

from kvkeep.core import events as ev
from kvkeep.core.audit import check
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.keys import chunk_hash, root_hash
from kvkeep.types import (
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    LeaseId,
    PeerId,
    Reason,
    Role,
    RowSpec,
    SlotState,
    StageOutcome,
    TicketId,
)

seats = st.integers(0, 2)  # which of the machine's three sessions
prompts = st.sampled_from(["aaaaaaa", "aaaa", "aaab", "aabbbb", "ab", "b", "bbbbb", "abab"])
salts = st.sampled_from([None, None, None, "tenant"])
picks = st.integers(0, 1 << 16)
rarely = st.sampled_from([False] * 7 + [True])
EMPTY = ev.Done(0)
PLAIN = ev.SessionReady | ev.SessionUnready | ev.LeaseRevoked


class DirectoryMachine(RuleBasedStateMachine):
    """One directory and its model; `do` is the only way events go in."""

    @initialize(
        pages=st.sampled_from([24, 60, 120]),
        slots=st.sampled_from([500, 500, 14]),
        caps=st.sampled_from([(0.5, 0.25, 0.5), (2.0, 1.0, 1.0), (2.0, 1.0, 0.5), (1.0, 0.5, 0.2)]),
        cast=st.permutations(sorted(ENGINES)),
    )
    def start(
        self, pages: int, slots: int, caps: tuple[float, float, float], cast: list[str]
    ) -> None:
        self.seed(cast, slots)
        self.begin(Limits(*caps))
        self.do(ev.Grown(pages * PAGE))

    def seed(self, cast: list[str], slots: int) -> None:
        self.cast = cast[:3]
        self.ids = count(1000)
        self.generations = [0] * slots

    def begin(self, limits: Limits) -> None:
        self.directory = Directory(self.generations, lambda: next(self.ids), limits=limits)
        self.model = self.make_model(limits)
        self.now_s = 50.0
        self.roots: dict[str, Fingerprint] = {}
        self.reads: list[tuple[str, LeaseId]] = []
        self.writes: list[tuple[str, LeaseId]] = []

    def make_model(self, limits: Limits) -> Model:
        return Model(self.generations, limits)

    # ---- in and out

    def do(self, event: ev.Event) -> ev.Reply:
        self.now_s += 0.01
        before = self.snapshot()
        reply, effects = self.directory.handle(event, self.now_s)
        check(self.directory)
        self.model.now_s = self.now_s
        plain: list[ev.Effect] = [e for e in effects if isinstance(e, PLAIN)]
        of_l2: list[ev.Effect] = [e for e in effects if not isinstance(e, PLAIN)]
        self.before_l2(of_l2)
        self.explain(event, reply, plain)
        self.after_l2(event, of_l2)
        if refused(event, reply) and not of_l2 and not self.model.disturbed:
            assert self.snapshot() == before, "a refused call changed something"
        for effect in effects:
            if isinstance(effect, ev.SessionReady):
                self.roots[effect.session] = effect.fingerprint
        self.compare()
        return reply

    def before_l2(self, effects: list[ev.Effect]) -> None:
        """What L2 did before the event itself had its effect."""
        assert effects == []

    def after_l2(self, event: ev.Event, effects: list[ev.Effect]) -> None:
        """What it did after that."""

    def snapshot(self) -> tuple[object, ...]:
        d = self.directory
        sessions = [(s.id, set(s.reads_open), set(s.writes_open)) for s in d.sessions.values()]
        slots = (list(d.slots.state), list(d.slots.readers), list(self.generations))
        peers = [(p.id, p.open, set(p.orphans)) for p in d.peers.values()]
        index = [(c.hash, c.children) for c in d.residents.index.values()]
        return d.arena.extents(), slots, sessions, peers, index, list(d.quarantine)

    def explain(self, event: ev.Event, reply: ev.Reply, effects: list[ev.Effect]) -> None:
        """Let the model follow; it raises where it would have answered otherwise."""
        left = list(effects)
        match event, reply:
            case ev.Lookup(), ev.Hit():
                self.model.lookup(event, reply)
            case ev.End(), ev.Done():
                self.model.end(event, reply)
            case ev.Stage(), ev.Staged():
                self.model.stage(event, reply)
            case ev.Commit(), ev.Committed():
                self.model.commit(event, reply)
            case ev.Abort(), ev.Done():
                self.model.abort(event, reply)
            case ev.Tick(), ev.Done():
                self.model.tick(reply)
            case ev.Grown(), ev.Done():
                self.model.memory.grow(event.populated_bytes // PAGE)
            case ev.Join(), _:
                self.model.join(event, reply, left)
                left = []
            case ev.PeerClosed(), ev.Done():
                assert reply.changed == self.model.closed(event.peer, left)
            case ev.PeerGone(), ev.Done():
                assert reply.changed == self.model.gone(event.peer, event.confirmed, left)
            case ((ev.Drop() | ev.Clear() | ev.Revoke() | ev.Relieve()), ev.Done()):
                self.explain_removal(event, reply, left)
                left = []
            case _:
                self.explain_l2(event, reply)
        assert left == [], "effects nobody expected"

    def explain_l2(self, event: ev.Event, reply: ev.Reply) -> None:
        raise AssertionError(f"{reply} is no answer to {event}")

    def explain_removal(
        self,
        event: ev.Drop | ev.Clear | ev.Revoke | ev.Relieve,
        reply: ev.Done,
        effects: list[ev.Effect],
    ) -> None:
        model = self.model
        revocable = {k: r for k, r in model.reads.items() if model.members[r.session].recompute}
        ended: set[int]
        match event:
            case ev.Revoke():
                ended = {lease for lease in revocable if lease == event.lease}
                assert reply.changed == len(ended)
            case ev.Relieve():
                ended = {e.lease for e in effects if isinstance(e, ev.LeaseRevoked)}
                assert reply.changed == len(ended)
                self.may_end(event, ended)
            case ev.Clear():
                ended = set(revocable) if event.force else set()
                hashes = list(model.resident)
                assert model.most_left(reply.changed, len(hashes))
            case ev.Drop():
                ended = set()
                known = event.session in model.members
                hashes = [h for h in dict.fromkeys(split(event.hashes)) if h in model.resident]
                hashes = hashes if known else []
                assert reply.changed == len(hashes)
        told = {(e.session, e.lease) for e in effects if isinstance(e, ev.LeaseRevoked)}
        assert told == {(revocable[lease].session, lease) for lease in ended}
        assert len(told) == len(effects)
        for lease in ended:
            model.reads[lease].live.clear()
        model.forget_reads()
        if not isinstance(event, ev.Revoke | ev.Relieve):
            for chunk in hashes:
                model.unlink(chunk)

    def may_end(self, event: ev.Relieve, ended: set[int]) -> None:
        """Under pressure only stopped engines lose their reads, where nobody waits for L2."""
        assert {self.model.reads[lease].session for lease in ended} <= event.stopped

    def compare(self) -> None:
        """Both accounts agree on every sum."""
        d, model = self.directory, self.model
        model.nothing_moved()
        assert set(d.residents.index) == set(model.resident)
        assert d.arena.free_bytes == sum(model.memory.free) * PAGE
        used = d.slots.bytes_in
        staged = [e for w in model.writes.values() for e in w.extents]
        resident = [e for c in [*model.resident.values(), *model.unlinked] for e in c.extents]
        for state, extents in (
            (SlotState.STAGING, staged + model.fetching()),
            (SlotState.RESIDENT, resident),
            (SlotState.ORPHANED, [e for e, _ in model.stuck]),
            (SlotState.QUARANTINED, [e for e, _ in model.quarantine]),
        ):
            assert used[state] == sum(len(e.pages) for e in extents) * PAGE, state.name
        assert d.counters["end_again"] == model.ended_again
        assert set(d.sessions) == set(model.members)
        assert set(d.peers) == set(model.peers)

    # ---- words

    def chain(self, name: str, prompt: str, salt: str | None) -> list[ChunkHash]:
        hashes = [root_hash(self.roots.get(name, Fingerprint(b"?" * 32)), salt)]
        for letter in prompt:
            hashes.append(chunk_hash(hashes[-1], letter.encode()))
        return hashes

    def hello(self, name: str, rank: int | None, layout: int, confirms: PeerId) -> ev.Join:
        engine = ENGINES[name]
        role = Role.BOTH if engine.both else Role.SCHEDULER if rank is None else Role.WORKER
        peer = PeerId(next(self.ids))
        rows = () if role is Role.SCHEDULER else engine.layouts[layout % len(engine.layouts)]
        mark = Fingerprint(repr(rows).encode()) if rows else Fingerprint(b"")
        says = (engine.writes, engine.dma, engine.recompute, confirms)
        return ev.Join(name, peer, role, rank or 0, engine.world, rows, mark, *says)

    # ---- rules

    @rule(seat=seats, layout=st.integers(0, 1))
    def bring_up(self, seat: int, layout: int) -> None:
        self.complete(self.cast[seat], layout)

    def complete(self, name: str, layout: int = 0) -> None:
        """Whoever is missing joins."""
        engine, member = ENGINES[name], self.model.members.get(name)
        missing: list[int | None] = [
            r for r in range(engine.world) if member is None or r not in member.workers
        ]
        if not engine.both and (member is None or member.scheduler is None):
            missing.append(None)
        for rank in missing:
            self.do(self.hello(name, rank, layout, PeerId(0)))

    @rule(seat=seats, rank=st.sampled_from([None, 0, 1]), layout=picks, old=picks)
    def rejoin(self, seat: int, rank: int | None, layout: int, old: int) -> None:
        """One more connection for a place that may be taken; half of them confirm an older one."""
        name = self.cast[seat]
        mine = sorted(p for p, person in self.model.peers.items() if person.session == name)
        confirms = PeerId(mine[old % len(mine)]) if mine and old % 2 else PeerId(0)
        self.do(self.hello(name, rank, layout, confirms))

    @rule(seat=seats, fault=st.sampled_from(["world", "rank", "rows", "peer", "bytes"]), pick=picks)
    def bad_join(self, seat: int, fault: str, pick: int) -> None:
        name = self.cast[seat]
        peer = PeerId(next(self.ids))
        if fault == "peer" and self.model.peers:
            peer = PeerId(sorted(self.model.peers)[pick % len(self.model.peers)])
        world = ENGINES[name].world + (fault == "world" and name in self.model.members)
        rank = world if fault == "rank" else 0
        rows = () if fault == "rows" else (RowSpec(0, FULL, 0 if fault == "bytes" else 100),)
        event = ev.Join(name, peer, Role.WORKER, rank, world, rows, Fingerprint(b"f" * 32))
        if self.model._bad(event):
            assert isinstance(self.do(event), ev.JoinRefused)

    @rule(pick=picks, dies=st.sampled_from([False, True]), confirmed=st.booleans())
    def close(self, pick: int, dies: bool, confirmed: bool) -> None:
        """A connection ends, and often its process with it."""
        peer = self.some_peer(pick)
        self.do(ev.PeerClosed(peer))
        if dies:
            self.do(ev.PeerGone(peer, confirmed))

    @rule(pick=picks, really=rarely, confirmed=st.booleans())
    def die(self, pick: int, really: bool, confirmed: bool) -> None:
        """A process ends before its connection is seen to close."""
        self.do(ev.PeerGone(self.some_peer(pick) if really else PeerId(7), confirmed))

    def some_peer(self, pick: int) -> PeerId:
        alive = sorted(self.model.peers)
        return PeerId(alive[pick % len(alive)]) if alive else PeerId(7)

    @rule(
        seat=seats,
        prompt=prompts,
        start=st.sampled_from([0, 0, 0, 1, 3]),
        salt=salts,
        publish=st.booleans(),
        alone=rarely,
    )
    def stage(
        self, seat: int, prompt: str, start: int, salt: str | None, publish: bool, alone: bool
    ) -> None:
        name = self.cast[seat]
        if not alone:
            self.complete(name)
        chain = self.chain(name, prompt, salt)
        first = min(start, len(prompt) - 1)
        item = ev.StageItem("r", chain[first], b"".join(chain[first + 1 :]), salt)
        self.staged(name, (item,), publish)

    @rule(seat=seats, other=seats, one=prompts, two=prompts, publish=st.booleans())
    def stage_two(self, seat: int, other: int, one: str, two: str, publish: bool) -> None:
        """Two requests in one step; the second may lie about its layout."""
        name, lie = self.cast[seat], self.cast[other]
        chains = self.chain(name, one, None), self.chain(lie, two, None)
        items = tuple(ev.StageItem("r", c[0], b"".join(c[1:])) for c in chains)
        self.staged(name, items, publish)

    def staged(self, name: str, items: tuple[ev.StageItem, ...], publish: bool) -> None:
        reply = self.do(ev.Stage(name, items))
        assert isinstance(reply, ev.Staged)
        if publish and reply.leases:
            self.do(ev.Commit(name, reply.leases))
        else:
            self.writes += [(name, lease) for lease in reply.leases]

    @rule(seat=seats, prompt=prompts, reads=st.integers(1, 2), ends=st.sampled_from([False, True]))
    def serve(self, seat: int, prompt: str, reads: int, ends: bool) -> None:
        """What an engine does for one request: store it, and find it again."""
        name = self.cast[seat]
        self.complete(name)
        chain = self.chain(name, prompt, None)
        self.staged(name, (ev.StageItem("r", chain[0], b"".join(chain[1:])),), True)
        for _ in range(reads):
            self.look_up(name, chain)
        if ends and self.reads:
            self.do(ev.End(*self.reads[-1], tuple(range(ENGINES[name].world))))

    @rule(seat=seats, other=seats, prompt=prompts, backwards=st.booleans())
    def race(self, seat: int, other: int, prompt: str, backwards: bool) -> None:
        """Two write the same chunks, the second after the first took too long."""
        granted = []
        for name in (self.cast[seat], self.cast[other]):
            self.complete(name)
            chain = self.chain(self.cast[seat], prompt[:2], None)
            reply = self.do(ev.Stage(name, (ev.StageItem("r", chain[0], b"".join(chain[1:])),)))
            assert isinstance(reply, ev.Staged)
            granted.append((name, reply.leases))
            self.now_s += self.model.limits.in_progress_after_s
        for name, leases in reversed(granted) if backwards else granted:
            self.do(ev.Commit(name, leases))

    @rule(pick=picks, many=st.integers(1, 4), wrong=rarely)
    def commit(self, pick: int, many: int, wrong: bool) -> None:
        name, leases = self.some_writes(pick, many)
        self.do(ev.Commit(self.cast[0] if wrong else name, leases))

    @rule(pick=picks, many=st.integers(1, 4), confirmed=st.booleans(), wrong=rarely)
    def abort(self, pick: int, many: int, confirmed: bool, wrong: bool) -> None:
        name, leases = self.some_writes(pick, many)
        self.do(ev.Abort("nobody" if wrong else name, leases, confirmed))

    def some_writes(self, pick: int, many: int) -> tuple[str, tuple[LeaseId, ...]]:
        """Leases of one session, the last ones first; some of them ended long ago."""
        if not self.writes:
            return "plain", (LeaseId(5),)
        name = self.writes[-1 - pick % len(self.writes)][0]
        mine = [lease for owner, lease in self.writes if owner == name]
        return name, tuple(mine[::-1][:many])

    @rule(seat=seats, other=seats, prompt=prompts, salt=salts, near=st.booleans(), lie=rarely)
    def lookup(
        self, seat: int, other: int, prompt: str, salt: str | None, near: bool, lie: bool
    ) -> None:
        name = self.cast[seat]
        if prompt != "b":
            self.complete(name)
        chain = self.chain(self.cast[other] if lie else name, prompt, salt)
        self.look_up(name, chain, salt, near)

    def look_up(
        self, name: str, chain: list[ChunkHash], salt: str | None = None, near: bool = True
    ) -> None:
        reply = self.do(ev.Lookup(name, "r", b"".join(chain[1:]), salt, near))
        if isinstance(reply, ev.Pending):
            self.pending(name, reply.ticket)
        elif isinstance(reply, ev.Hit) and reply.lease:
            self.reads.append((name, reply.lease))

    def pending(self, name: str, ticket: TicketId) -> None:
        raise AssertionError("nobody can be waited for")

    @rule(
        pick=picks,
        ranks=st.sampled_from([(0,), (1,), (0, 1), (0, 0), (1, 5)]),
        outcome=st.sampled_from(EndOutcome),
        wrong=rarely,
    )
    def end(self, pick: int, ranks: tuple[int, ...], outcome: EndOutcome, wrong: bool) -> None:
        name, lease = self.some_read(pick)
        self.do(ev.End(self.cast[0] if wrong else name, lease, ranks, outcome))

    def some_read(self, pick: int) -> tuple[str, LeaseId]:
        """Mostly a late one; it may have ended."""
        return self.reads[-1 - pick % len(self.reads)] if self.reads else ("plain", LeaseId(3))

    @rule(seat=seats, pick=picks, many=st.integers(1, 2))
    def drop(self, seat: int, pick: int, many: int) -> None:
        """Chunks that are there, and one that is not."""
        there = list(self.model.resident)
        chosen = there[pick % len(there) :][:many] if there else []
        self.do(ev.Drop(self.cast[seat], b"".join([*chosen, ChunkHash(b"?" * 32)])))

    @rule(seat=seats, prompt=prompts, lost=st.integers(0, 3))
    def look_over_a_hole(self, seat: int, prompt: str, lost: int) -> None:
        name = self.cast[seat]
        chain = self.chain(name, prompt, None)
        self.do(ev.Drop(name, b"".join(chain[1 + lost :][:1])))
        self.look_up(name, chain)

    @rule(pick=picks)
    def revoke(self, pick: int) -> None:
        live = list(self.model.reads)
        self.do(ev.Revoke(LeaseId(live[pick % len(live)]) if live else LeaseId(3)))

    @rule(stopped=st.sets(seats))
    def relieve(self, stopped: set[int]) -> None:
        self.do(ev.Relieve(frozenset(self.cast[seat] for seat in stopped)))

    @rule(force=st.booleans(), really=rarely)
    def clear(self, force: bool, really: bool) -> None:
        if really:
            self.do(ev.Clear(force))

    @rule(passed_s=st.sampled_from([0.0, 0.5, 2.0, 5.0]))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.do(ev.Tick())

    @rule(pages=st.integers(0, 12))
    def grow(self, pages: int) -> None:
        if self.directory.arena.populated_bytes < 200 * PAGE:
            self.do(ev.Grown(self.directory.arena.populated_bytes + pages * PAGE))

    def end_l2(self) -> None:
        """Let everything end that is under way to and from L2."""

    # ---- liveness: when all is over nothing is left, and the server is as good as new

    def teardown(self) -> None:
        if not hasattr(self, "directory"):
            return
        for peer in sorted(self.model.peers):
            self.do(ev.PeerGone(PeerId(peer)))
        self.end_l2()
        self.now_s += 1000.0
        self.do(ev.Tick())
        used = self.directory.slots.bytes_in
        for state in (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED):
            assert used[state] == 0
        assert self.directory.slots.reserved_bytes == 0
        assert self.directory.sessions == {}
        assert self.directory.residents.unlinked == set()
        self.do(ev.Clear())
        assert self.directory.arena.largest_free_bytes() == self.directory.arena.populated_bytes
        self.do(self.hello("plain", 0, 0, PeerId(0)))
        chain = self.chain("plain", "a", None)
        reply = self.do(ev.Stage("plain", (ev.StageItem("r", chain[0], chain[1]),)))
        assert isinstance(reply, ev.Staged)
        assert reply.outcomes == (StageOutcome.GRANTED,)
        self.do(ev.Commit("plain", reply.leases))
        hit = self.do(ev.Lookup("plain", "r", chain[1]))
        assert isinstance(hit, ev.Hit)
        assert hit.chunks == 1 or hit.reasons == (Reason.NO_ROOM,)


def refused(event: ev.Event, reply: ev.Reply) -> bool:
    """Whether the answer says that nothing was done."""
    match reply:
        case ev.JoinRefused():
            return True
        case ev.Hit():
            return not reply.lease
        case ev.Staged():
            return not {StageOutcome.GRANTED, StageOutcome.NO_ROOM} & set(reply.outcomes)
        case ev.Committed():
            return set(reply.outcomes) <= {CommitOutcome.UNKNOWN_LEASE}
        case ev.Done():  # these may do something and still count nothing
            does = isinstance(event, ev.PeerGone | ev.Grown) or event == ev.Clear(force=True)
            return reply == EMPTY and not does
    return False


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=3 * settings().max_examples // 2)
