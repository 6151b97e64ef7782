"""Tenants that differ by salt learn nothing of each other through the API, and names stay names.

The same questions are put twice about the same tokens under one salt: once where another tenant has
stored these tokens under its salt, once where it has stored as many others. Every message (but for
where in memory a chunk of one's own lies), the virtual time at which it comes and the number of
calls into L2 must be the same. So nothing shows whether somebody else has, had, or is just storing
the tokens of a prompt.
"""

import asyncio
import re
from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import PurePosixPath
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.l2_world import BYTES, World, content

from kvkeep.backends.fs_scan import object_path
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.header import MAX_U32, label
from kvkeep.core import events as ev
from kvkeep.core.directory import Limits
from kvkeep.core.keys import extend_chain, root_hash
from kvkeep.testing import virtual_loop
from kvkeep.testing.faulty_backend import FaultyBackend
from kvkeep.types import (
    ChunkHash,
    EndOutcome,
    Fingerprint,
    Namespace,
    ObjectKey,
    PeerId,
    Role,
)
from kvkeep.wire import messages as m

CHUNKS = 3
SHARED, OTHER = range(CHUNKS * 256), range(10_000, 10_000 + CHUNKS * 256)
FINGERPRINT = Fingerprint(bytes(range(32)))
PAIRS = (("a", "b"), ("a", None), (None, "b"), (None, ""), ("", None), ("a", "a\0"))
STATES = ("staging", "resident", "in_l2", "in_both", "cleared", "aborted", "dropped", "late")
OPS = (
    "lookup",
    "lookup_l1",
    "lookup_soon",
    "stage",
    "commit",
    "abort",
    "end",
    "drop",
    "note",
    "explain",
    "status",
    "wait",
)


def chain(tokens: range, salt: str | None) -> list[ChunkHash]:
    return extend_chain(root_hash(FINGERPRINT, salt), tokens, 256)


def without_places(message: Any) -> Any:
    """The message with lengths instead of handles; which memory is free depends on everybody."""
    if not isinstance(message, m.Found | m.Resolved | m.Granted):
        return message
    columns = tuple(
        ev.Columns(*(bytes([len(part) // 8]) for part in (c.slots, c.offsets, c.generations)))
        for c in message.columns
    )
    return msgspec.structs.replace(message, columns=columns)


@dataclass(frozen=True, slots=True)
class Seen:
    """All that a tenant can see, and what happened below."""

    messages: list[tuple[float, bytes]]  # when, what
    calls: Counter[str]


class Tenant:
    """An engine whose requests all have one salt."""

    def __init__(self, world: World, session: str, salt: str | None) -> None:
        self._world = world
        self._seq = count(1)
        self._salt = salt
        self.peer, self.link = world.join(session)
        self.seen: list[tuple[float, bytes]] = []
        self._leases: list[int] = []
        self._reads: list[int] = []
        plain = self.link.send

        def send(message: m.ServerMessage) -> None:
            at_s = asyncio.get_running_loop().time()
            self.seen.append((at_s, msgspec.msgpack.encode(without_places(message))))
            if isinstance(message, m.Found | m.Resolved) and message.lease:
                self._reads.append(message.lease)
            if isinstance(message, m.Granted):
                self._leases += [lease for lease in message.leases if lease]
                self._fill(message)
            plain(message)

        self.link.send = send  # type: ignore[method-assign]
        self._keys: list[ChunkHash] = []

    def _fill(self, granted: m.Granted) -> None:
        for column in granted.columns:
            for offset in memoryview(column.offsets).cast("Q"):
                self._world.arena[offset : offset + BYTES] = content(self._keys[0])

    def do(self, op: str, keys: list[ChunkHash]) -> None:
        """One message to the server."""
        self._keys = keys
        message = self._message(op, b"".join(keys))
        if message is not None:
            self._world.service.receive(PeerId(self.peer), message)

    def _message(self, op: str, hashes: bytes) -> Any:
        seq, salt = next(self._seq), self._salt
        leases, self_reads = tuple(self._leases), self._reads
        match op:
            case "lookup":
                return m.Lookup(seq, "r", hashes, salt, wait_ms=5_000.0)
            case "lookup_l1":
                return m.Lookup(seq, "r", hashes, salt, fetch=False)
            case "lookup_soon":
                return m.Lookup(seq, "r", hashes, salt, near=False, wait_ms=0.0)
            case "stage":
                parent = root_hash(FINGERPRINT, salt)
                return m.Stage(seq, (m.StageItem("r", parent, hashes, salt),))
            case "commit":
                self._leases = []
                return m.Commit(seq, leases)
            case "abort":
                self._leases = []
                return m.Abort(leases)
            case "end" if self_reads:
                return m.End(self_reads.pop(), (0,), EndOutcome.USED, "r")
            case "drop":
                return m.Drop(hashes)
            case "note":
                return m.Note("r", "seen")
            case "explain" | "status":
                return m.Query(seq, op, "r" if op == "explain" else "")
        return None


async def scene(
    salts: tuple[str | None, str | None], state: str, script: list[str], stored: range
) -> Seen:
    """A tenant's view of `SHARED` while another one has stored other tokens, or the same."""
    raw = FaultyBackend(later=True)
    world = World([raw], Limits(), GuardSettings())
    await world.io.open()
    owner, curious = Tenant(world, "owner", salts[0]), Tenant(world, "curious", salts[1])
    operator = world.join("op", Role.OPERATOR)
    theirs = chain(stored, salts[0])
    owner.do("stage", theirs)
    if state == "aborted":
        owner.do("abort", theirs)
    elif state != "staging":
        owner.do("commit", theirs)
    if state in ("in_l2", "in_both", "cleared", "late"):
        assert (await world.persisted(operator))["done"]
    if state in ("in_l2", "cleared"):
        await world.ask(operator, m.Answer, lambda seq: m.Query(seq, "clear"))
    if state in ("cleared", "dropped"):
        owner.do("drop", theirs)
    if state == "late":
        owner.do("lookup", theirs)
    await asyncio.sleep(1.0)
    before = raw.calls.copy()
    for op in script:
        curious.do(op, chain(SHARED, salts[1]))
        await asyncio.sleep(1.0 if op == "wait" else 0.001)
    await asyncio.sleep(60.0)
    await world.io.close()
    return Seen(curious.seen, raw.calls - before)


def views(salts: tuple[str | None, str | None], state: str, script: list[str]) -> tuple[Seen, Seen]:
    """With the same tokens stored by the other, and with others."""
    with_same = virtual_loop.run(scene(salts, state, script, SHARED))
    with_others = virtual_loop.run(scene(salts, state, script, OTHER))
    return with_same, with_others


@pytest.mark.parametrize(
    ("salts", "state"),
    [(PAIRS[0], state) for state in STATES] + [(salts, "in_both") for salts in PAIRS[1:]],
    ids=repr,
)
def test_another_tenants_tokens_are_as_if_never_stored(
    salts: tuple[str | None, str | None], state: str
) -> None:
    script = [
        "lookup",
        "lookup_l1",
        "stage",
        "lookup",
        "commit",
        "lookup",
        "end",
        "explain",
        "drop",
    ]
    same, others = views(salts, state, [*script, "lookup_soon", "wait", "lookup", "status"])
    assert same == others
    assert len(same.messages) >= 9
    assert same.calls["contains"] > 0


@given(
    st.sampled_from(PAIRS),
    st.sampled_from(STATES),
    st.lists(st.sampled_from(OPS), min_size=1, max_size=12),
)
@settings(max_examples=25, deadline=None)
def test_whatever_is_asked(
    salts: tuple[str | None, str | None], state: str, script: list[str]
) -> None:
    same, others = views(salts, state, script)
    assert same == others


def test_the_comparison_would_notice() -> None:
    """Under one salt the tokens are found: by message, by reason and by the calls into L2."""
    for state in ("staging", "resident", "in_l2"):
        same, others = views(("a", "a"), state, ["lookup", "stage"])
        assert same.messages != others.messages, state
    assert same.calls != others.calls


# ---- names

U32 = st.integers(0, MAX_U32)
TEXT = (
    st.none() | st.text("xyz./~\\\0\n\xe9", max_size=12) | st.sampled_from(["..", "../x", "\ud800"])
)
SPACES = st.builds(
    Namespace, st.binary(min_size=32, max_size=32).map(Fingerprint), TEXT, TEXT.map(str)
)
KEYS = st.builds(ObjectKey, st.binary(min_size=32, max_size=32).map(ChunkHash), U32, U32, U32)


@given(SPACES, KEYS)
def test_no_name_leads_out_of_the_directory(space: Namespace, key: ObjectKey) -> None:
    """Whatever the model, the salt and the key are called, only digests and numbers are names."""
    path = object_path(label(space), key)
    assert re.fullmatch(r"[0-9a-f-]+/[0-9a-f]{2}/[0-9a-f]{64}\.[0-9]+-[0-9]+\.[0-9]+\.kv", path)
    parts = PurePosixPath(path).parts
    assert len(parts) == 3
    assert not {".", "..", "/"} & set(parts)
    assert all(len(part) <= 255 for part in parts)
    for text in (space.salt, space.model):
        assert not text or len(text) < 5 or text not in path


@given(SPACES, SPACES, KEYS, KEYS)
def test_two_objects_never_share_a_name(
    first: Namespace, second: Namespace, one: ObjectKey, other: ObjectKey
) -> None:
    is_same = (first.fingerprint, first.salt, one) == (second.fingerprint, second.salt, other)
    assert (object_path(label(first), one) == object_path(label(second), other)) == is_same
