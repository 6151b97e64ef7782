"""The service without sockets: what it refuses, records and warns of."""

from itertools import count
from typing import Any

import msgspec
import pytest

from kvkeep.core.directory import Directory
from kvkeep.core.keys import extend_chain
from kvkeep.server.service import Service
from kvkeep.types import (
    ChunkHash,
    EndOutcome,
    Epoch,
    GroupKind,
    PeerId,
    Role,
    RowSpec,
    StageOutcome,
)
from kvkeep.wire import messages as m

MIB = 1 << 20
CHUNK_BYTES = 64 << 10
ROOT = ChunkHash(bytes(32))
FINGERPRINT = bytes(range(32))


class Link:
    """Collects what the service sends."""

    def __init__(self) -> None:
        self.sent: list[m.ServerMessage] = []

    def send(self, message: m.ServerMessage) -> None:
        self.sent.append(message)


class World:
    """One service with an operator."""

    def __init__(self, capacity_bytes: int = 8 * MIB) -> None:
        ids = count(1)
        self.lines: list[tuple[str, dict[str, object]]] = []
        self.service = Service(
            Directory([0] * 256, new_id=lambda: next(ids)),
            epoch=Epoch(1),
            capacity_bytes=capacity_bytes,
            clock=lambda: 5.0,
            log=lambda event, **fields: self.lines.append((event, fields)),
            wall_clock=lambda: 60.0,
        )
        self.service.grown(capacity_bytes)
        self.operator = self.join("operator", Role.OPERATOR)

    def join(
        self, session: str, role: Role = Role.BOTH, chunk_bytes: int = CHUNK_BYTES
    ) -> tuple[PeerId, Link]:
        link = Link()
        rows = () if role is Role.OPERATOR else (RowSpec(0, GroupKind.FULL_ATTENTION, chunk_bytes),)
        hello = m.Hello(m.VERSIONS, session, role, rows=rows, fingerprint=FINGERPRINT)
        welcome = self.service.hello(hello, link, pid=1)
        assert isinstance(welcome, m.Welcome)
        return PeerId(welcome.peer), link

    def ask(self, who: tuple[PeerId, Link], message: m.ClientMessage) -> Any:
        self.service.receive(who[0], message)
        return who[1].sent[-1]

    def explain(self, request: str = "") -> dict[str, Any]:
        answer = self.ask(self.operator, m.Query(1, "explain", request))
        assert isinstance(answer, m.Answer), answer
        told: dict[str, Any] = msgspec.json.decode(answer.body)
        return told

    def events(self, request: str) -> list[str]:
        return [item["event"] for item in self.explain(request)["timeline"]]


def keys(chunks: int) -> bytes:
    return b"".join(extend_chain(ROOT, range(chunks * 256), 256))


def stored(world: World, who: tuple[PeerId, Link], request: str, chunks: int) -> None:
    granted = world.ask(who, m.Stage(1, (m.StageItem(request, ROOT, keys(chunks)),)))
    assert world.ask(who, m.Commit(2, granted.leases)).outcomes == bytes(chunks)


def test_what_was_stored_is_told() -> None:
    world = World()
    who = world.join("s")
    stored(world, who, "r", 2)
    assert world.events("r") == ["stage: 2 granted", "stored 2 chunks"]
    world.ask(who, m.Stage(3, (m.StageItem("q", ROOT, keys(3)),)))
    assert world.events("q") == ["stage: 1 granted, 2 resident"]


def test_a_refused_chunk_is_told() -> None:
    world = World()  # of 8 MiB a session may stage 1 MiB: 16 chunks
    who = world.join("s")
    granted = world.ask(who, m.Stage(1, (m.StageItem("r", ROOT, keys(18)),)))
    assert granted.outcomes.count(StageOutcome.OVER_CAP) == 2
    assert world.events("r") == ["stage: 16 granted, 2 over_cap"]


def test_nothing_to_store_is_not_told() -> None:
    world = World()
    who = world.join("s")
    stored(world, who, "r", 2)
    world.ask(who, m.Stage(3, (m.StageItem("q", ROOT, keys(2)),)))
    assert world.explain()["request"] == "r"


def test_a_hit_that_the_device_had_too() -> None:
    world = World()
    who = world.join("s")
    stored(world, who, "w", 2)
    found = world.ask(who, m.Lookup(3, "r", keys(2), prompt_tokens=600))
    assert world.explain("r")["computed_tokens"] is None
    world.service.receive(
        who[0], m.End(found.lease, (0,), EndOutcome.UNUSED, "r", device_tokens=512)
    )
    told = world.explain("r")
    assert told["timeline"][-1]["event"] == "in L1, not needed: the engine's own cache had it"
    assert told["computed_tokens"] == 88
    assert told["session"] == "s"
    assert told["at"] == "1970-01-01T00:01:00.000+00:00"


def test_a_hit_that_was_given_back_for_another_reason() -> None:
    world = World()
    who = world.join("s")
    stored(world, who, "w", 2)
    found = world.ask(who, m.Lookup(3, "r", keys(2)))
    world.service.receive(who[0], m.End(found.lease, (0,), EndOutcome.UNUSED, "r"))
    assert world.events("r")[-1] == "released: unused"


def test_sessions_do_not_share_a_request() -> None:
    world = World()
    first, second = world.join("a"), world.join("b")
    world.ask(first, m.Lookup(1, "r", keys(1), prompt_tokens=1))
    world.ask(second, m.Lookup(1, "r", keys(1), prompt_tokens=2))
    told = world.explain("r")
    assert (told["session"], told["prompt_tokens"], len(told["timeline"])) == ("b", 2, 1)


def test_lookups_of_an_operator_are_not_recorded() -> None:
    world = World()
    world.ask(world.operator, m.Lookup(1, "r", keys(1)))
    assert isinstance(world.ask(world.operator, m.Query(2, "explain", "")), m.Failed)


@pytest.mark.parametrize(
    "message",
    [
        m.Lookup(7, "r", bytes(33)),
        m.Stage(7, (m.StageItem("r", ROOT, bytes(32)), m.StageItem("r", ROOT, bytes(31)))),
    ],
    ids=["lookup", "stage"],
)
def test_half_a_hash_is_refused(message: m.Lookup | m.Stage) -> None:
    world = World()
    answer = world.ask(world.join("s"), message)
    assert isinstance(answer, m.Failed)
    assert answer.seq == 7
    assert "multiple of 32" in answer.text


def test_clear_takes_no_other_word() -> None:
    world = World()
    stored(world, world.join("s"), "r", 1)
    answer = world.ask(world.operator, m.Query(1, "clear", "forec"))
    assert isinstance(answer, m.Failed)
    assert "'forec'" in answer.text
    assert len(world.service.directory.residents.index) == 1
    for argument in ("", "force"):
        assert isinstance(world.ask(world.operator, m.Query(1, "clear", argument)), m.Answer)


def test_a_chunk_that_can_never_be_staged_is_a_problem() -> None:
    world = World(capacity_bytes=64 * MIB)
    peer, _ = world.join("big\n", chunk_bytes=47 * MIB // 4)  # 11.75 MiB
    (problem,) = world.service.problems.values()
    assert problem == (
        r"one chunk of session big\x0a takes 11.7MiB and a session may stage 8MiB: "
        "set l1.size to 94MiB or more, or raise l1.session_staging_fraction"
    )
    assert [f["level"] for e, f in world.lines if e == "chunk_too_large"] == ["warning"]
    world.service.tick()
    assert world.service.problems
    world.service.gone(peer, confirmed=True)
    world.service.closed(peer)
    world.service.tick()
    assert world.service.problems == {}


def test_a_chunk_that_just_fits_is_none() -> None:
    world = World(capacity_bytes=64 * MIB)
    world.join("s", chunk_bytes=8 * MIB)
    assert world.service.problems == {}
