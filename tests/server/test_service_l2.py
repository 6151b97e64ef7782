"""What clients and operators are told of lookups and stores that L2 takes part in."""

from functools import partial

import msgspec
from tests.server.l2_world import NEVER, ROOT, Link, chunks, filled, virtual, world

from kvkeep.backends.base import Usage
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Switched
from kvkeep.types import EndOutcome, Role, StorePolicy
from kvkeep.wire import messages as m


@virtual
async def test_wait_persisted_answers_when_everything_is_there() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
        raw.plan = Switched(NEVER, operation="put")
        await w.store(engine, chunks(2))
        w.tell(operator, m.Query(5, "wait_persisted", "15"))
        w.service.tick()
        assert not [s for s in operator[1].sent if isinstance(s, m.Answer)]
        raw.plan = Switched()
        raw.unstick()
        answer = await operator[1].next(m.Answer)
        assert answer.seq == 5
        assert msgspec.json.decode(answer.body)["done"] is True


@virtual
async def test_wait_persisted_ends_with_its_time() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
        raw.plan = Switched(NEVER, operation="put")
        await w.store(engine, chunks(1))
        w.tell(operator, m.Query(6, "wait_persisted", "0"))
        answer = await operator[1].next(m.Answer)
        body = msgspec.json.decode(answer.body)
        assert (body["done"], body["running"]) == (False, 1)


@virtual
async def test_wait_persisted_writes_what_write_back_would_keep() -> None:
    raw = FaultyBackend()
    async with world(raw, store_policy=StorePolicy.WRITE_BACK) as w:
        engine, operator = w.join("s"), w.join("op", Role.OPERATOR)
        await w.store(engine, chunks(3))
        assert not raw.objects
        body = await w.persisted(operator)
        assert (body["done"], body["missing_chunks"]) == (True, 0)
        assert len(raw.objects) == 3


@virtual
async def test_wait_persisted_without_any_l2_is_an_error() -> None:
    async with world() as w:
        operator = w.join("op", Role.OPERATOR)
        w.tell(operator, m.Query(6, "wait_persisted", "1"))
        said = operator[1].sent[-1]
        assert isinstance(said, m.Failed)
        assert "no L2" in said.text


@virtual
async def test_a_stopping_server_takes_operators_only() -> None:
    async with world(FaultyBackend()) as w:
        w.join("s")
        w.service.stop()
        w.join("op", Role.OPERATOR)
        hello = m.Hello(m.VERSIONS, "late", Role.SCHEDULER)
        refused = w.service.hello(hello, Link(), pid=1)
        assert isinstance(refused, m.Refused)
        assert "stopping" in refused.text
        assert any("stopping" in problem for problem in w.service.status()["problems"])


@virtual
async def test_what_may_serve_later_is_no_hit_yet() -> None:
    raw = FaultyBackend()
    async with world(raw, session_reserve_fraction=0.05) as w:
        engine, keys = await filled(w)
        far = await w.ask(engine, m.Found, lambda n: m.Lookup(n, "r", b"".join(keys), near=False))
        assert far.chunks > 0
        assert far.lease == 0
        assert w.service.counts().get("hit_chunks", 0) == 0
        events = [event["event"] for event in w.service.timeline.explain("r")["timeline"]]
        assert any("may serve" in event for event in events), events


@virtual
async def test_wait_persisted_wants_a_number() -> None:
    async with world(FaultyBackend()) as w:
        operator = w.join("op", Role.OPERATOR)
        w.tell(operator, m.Query(6, "wait_persisted", "soon"))
        assert isinstance(operator[1].sent[-1], m.Failed)


@virtual
async def test_a_client_that_went_meanwhile_leaves_nothing() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(NEVER, operation="get")
        w.tell(engine, m.Lookup(1, "r", b"".join(keys)))
        assert isinstance(await engine[1].next(m.Pending), m.Pending)
        w.service.closed(engine[0])
        w.service.gone(engine[0])
        raw.plan = Switched()
        raw.unstick()
        await w.until(lambda: not w.directory.fetcher.flights.fetches)
        assert not [s for s in engine[1].sent if isinstance(s, m.Resolved)]
        assert w.directory.slots.reserved_bytes == 0
        assert w.service._pending == {}
        assert w.service._early == {}


@virtual
async def test_cancel_of_another_session_changes_nothing() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        other = w.join("t")
        raw.plan = Switched(NEVER, operation="get")
        w.tell(engine, m.Lookup(1, "r", b"".join(keys)))
        ticket = (await engine[1].next(m.Pending)).ticket
        w.tell(other, m.Cancel(ticket))
        raw.plan = Switched()
        raw.unstick()
        assert (await engine[1].next(m.Resolved)).chunks == 3


@virtual
async def test_a_cancelled_lookup_is_not_resolved() -> None:
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(NEVER, operation="get")
        w.tell(engine, m.Lookup(1, "r", b"".join(keys)))
        w.tell(engine, m.Cancel((await engine[1].next(m.Pending)).ticket))
        raw.plan = Switched()
        raw.unstick()
        await w.until(lambda: len(w.directory.residents.index) == 3)
        assert not [s for s in engine[1].sent if isinstance(s, m.Resolved)]
        assert w.directory.slots.reserved_bytes == 0


@virtual
async def test_explain_says_which_backend_it_came_from() -> None:
    async with world(FaultyBackend(name="disk")) as w:
        engine, keys = await filled(w)
        found = await w.find(engine, keys)
        w.tell(engine, m.End(found.lease, (0,), EndOutcome.USED, "r", loaded_tokens=768))
        told = w.service.timeline.explain("r", w.service.backends)
        assert [chunk["tier"] for chunk in told["chunks"]] == ["l2:disk"] * 3
        assert told["timeline"][1]["event"] == "lookup: 3 of 3 chunks (3 from disk)"
        stored = w.service.timeline.explain("w", w.service.backends)["timeline"]
        assert stored[-1]["event"] == "3 persisted to disk"


@virtual
async def test_a_client_of_the_first_protocol_never_waits() -> None:
    """It does not know Pending: L1 alone is its answer."""
    async with world(FaultyBackend()) as w:
        _, keys = await filled(w)
        old = w.join("s", versions=(1,))
        found = await w.find(old, keys)
        assert isinstance(found, m.Found)
        assert (found.chunks, len(found.reasons)) == (0, 3)


@virtual
async def test_forget_says_when_a_backend_could_not() -> None:
    """Nothing of the layout is served from it before it could."""
    raw = FaultyBackend()
    async with world(raw) as w:
        engine, keys = await filled(w)
        raw.plan = Switched(Fault(Kind.ERROR), operation="forget")
        told = await w.ask(engine, m.Forgotten, m.Forget)
        assert (told.chunks, told.done) == (0, False)
        assert len(raw.objects) == 3
        assert (await w.find(engine, keys)).chunks == 0
        raw.plan = Switched()
        await w.until(lambda: not raw.objects)
        again = await w.ask(engine, m.Forgotten, m.Forget)
        assert again.done


@virtual
async def test_an_empty_salt_is_none_at_all() -> None:
    async with world(FaultyBackend()) as w:
        who, keys = w.join("s"), chunks(2)
        for key, salt in zip(keys, (None, ""), strict=True):
            item = m.StageItem("r", ROOT, key, salt)
            granted = await w.ask(who, m.Granted, partial(_stage, item))
            await w.ask(who, m.Committed, partial(_commit, granted.leases))
        assert w.directory.quotas.tenants() == {None}
        lookup = m.Lookup(next(w.seq), "r", keys[0], "", fetch=False)
        w.tell(who, lookup)
        assert (await who[1].next(m.Found)).chunks == 1


def _stage(item: m.StageItem, seq: int) -> m.Stage:
    return m.Stage(seq, (item,))


def _commit(leases: tuple[int, ...], seq: int) -> m.Commit:
    return m.Commit(seq, leases)


@virtual
async def test_wait_persisted_says_what_l2_has_evicted() -> None:
    async with world(Evicting(), Evicting(name="b")) as w:
        operator = w.join("op", Role.OPERATOR)
        body = await w.persisted(operator)
        assert (body["done"], body["evicted_objects"]) == (True, 6)


class Evicting(FaultyBackend):
    """It had no room for three objects."""

    def usage(self) -> Usage:
        return Usage(evicted_objects=3)
