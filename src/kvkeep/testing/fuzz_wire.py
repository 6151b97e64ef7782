"""Fuzz target: frames from strangers to the real service, core, I/O and L2, in virtual time.

An input is a script of what up to four connections send, and when they end. A fifth one is an
engine that behaves: it must get right answers all the time, and lose nothing that it holds. Numbers
of leases are written as places in the list of all that were handed out, to whomever.
"""

import random
from collections.abc import Mapping, Sequence

import msgspec

from kvkeep.core.keys import combine_ranks
from kvkeep.testing import virtual_loop
from kvkeep.testing.fuzz_values import (
    Script,
    Step,
    Value,
    changed_bytes,
    changed_script,
    pack,
    unpack,
)
from kvkeep.testing.fuzz_wire_rig import KINDS, LEASE, Rig
from kvkeep.testing.layouts import Identity
from kvkeep.types import EndOutcome, GroupKind, Role, RowSpec
from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode

_ONE = (RowSpec(0, GroupKind.FULL_ATTENTION, 4000),)
_TWO = (RowSpec(0, GroupKind.FULL_ATTENTION, 4096), RowSpec(1, GroupKind.SLIDING_WINDOW, 3000, 2))
_WHO = 4


class Wire:
    """The target."""

    name = "wire"

    def seeds(self) -> Mapping[str, bytes]:
        """A script for each thing that clients do, with every type of message."""
        return {name: pack(script) for name, script in _scripts().items()}

    def changed(self, rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        """Steps and fields changed; sometimes the bytes of a frame."""
        script = unpack(data)
        if script is None:
            return changed_bytes(rng, data)
        some = [found for found in map(unpack, rng.choices(others, k=2)) if found is not None]
        new = changed_script(rng, script, some, _new_step)
        if rng.random() < 0.3:
            _make_raw(rng, new)
        return pack(new)

    def run(self, data: bytes) -> frozenset[str]:
        """The whole story of one server."""
        script = unpack(data)
        steps: Script = [[0, "raw", data]] if script is None else script
        return virtual_loop.run(_story(steps))

    def close(self) -> None:
        """Nothing was started."""


async def _story(script: Script) -> frozenset[str]:
    rig = Rig()
    await rig.begin()
    for number, step in enumerate(script):
        await rig.take(step)
        if number % 4 == 3:
            await rig.good.looks()
    await rig.finish()
    return frozenset(rig.seen)


def _new_step(rng: random.Random) -> Step:
    """A valid message, or something that happens to a connection or to L2."""
    who = rng.randrange(_WHO)
    match rng.randrange(12):
        case 0:
            return [who, "end", None]
        case 1:
            return [who, "gone", None]
        case 2:
            return [who, "wait", rng.choice((0.01, 0.3, 3.0))]
        case 3:
            return [who, "disk", rng.randrange(-1, len(KINDS))]
        case 4:
            return [who, "say", said(rng.choice(_hellos()))]
        case _:
            step = list(rng.choice(rng.choice(list(_scripts().values()))))
            step[0] = who
            return step


def _make_raw(rng: random.Random, script: Script) -> None:
    """One message becomes bytes, with some of them changed."""
    places = [n for n, step in enumerate(script) if len(step) == 3 and step[1] == "say"]
    if places:
        at = rng.choice(places)
        try:
            body = msgspec.msgpack.encode(script[at][2])
        except (OverflowError, ValueError, RecursionError):
            return
        frame = len(body).to_bytes(4, "little") + body
        script[at] = [script[at][0], "raw", changed_bytes(rng, frame)]


# ---- valid scripts


def said(message: m.ClientMessage) -> Value:
    """A message as the plain values it is packed from."""
    return msgspec.msgpack.decode(encode(message)[4:])


def hashes(first: int, count: int) -> bytes:
    """Some chunks of the strangers."""
    return b"".join(bytes([n + 1]) * 32 for n in range(first, first + count))


def _engine(session: str, rows: tuple[RowSpec, ...] = _ONE, *, writes: bool = True) -> m.Hello:
    print_ = Identity(session, 1, rows, True, True, True, False, True).fingerprint(0)
    return m.Hello(
        m.VERSIONS,
        session,
        Role.BOTH,
        rows=rows,
        fingerprint=print_,
        model="m",
        writes=writes,
        dma=rows is _TWO,
    )


def _worker(rank: int) -> m.Hello:
    print_ = Identity("w", 2, _ONE, True, True, True, False, True).fingerprint(rank)
    return m.Hello(m.VERSIONS, "w", Role.WORKER, rank, 2, _ONE, print_, recompute=rank == 0)


def _hellos() -> list[m.Hello]:
    return [
        _engine("a"),
        _engine("b", _TWO),
        m.Hello(m.VERSIONS, "w", Role.SCHEDULER, world=2),
        _worker(0),
        _worker(1),
        _engine("a", writes=False),
        m.Hello(m.VERSIONS, "", Role.OPERATOR, wants_arena=False),
        m.Hello((1,), "old", Role.BOTH, rows=_ONE, fingerprint=b"\x07" * 32),
        m.Hello((77,), "new", Role.BOTH),
    ]


def _store(who: int, first: int, count: int, salt: str | None = None) -> Script:
    item = m.StageItem("r", combine_ranks([]), hashes(first, count), salt, first)
    leases = tuple(range(LEASE + count - 1, LEASE - 1, -1))
    return [[who, "say", said(m.Stage(1, (item,)))], [who, "say", said(m.Commit(2, leases))]]


def _begin(who: int, message: m.Hello) -> Step:
    return [who, "say", said(message)]


def _scripts() -> dict[str, Script]:
    a, b, old = _hellos()[0], _hellos()[1], _hellos()[7]
    operator = _hellos()[6]
    lookup = said(m.Lookup(3, "r", hashes(0, 4), None, True, 600))
    later = said(m.Lookup(4, "q", hashes(0, 4), None, False, 600, True, 50.0))
    end = said(m.End(LEASE, (0,), EndOutcome.USED, "r", 0, 512, 1.0, 2.0))
    ask = {what: [3, "say", said(m.Query(5, what, text))] for what, text in _QUESTIONS}
    clear = ask["clear"]
    wait: Step = [0, "wait", 0.3]
    stored: Script = [_begin(0, a), *_store(0, 0, 4), wait]
    half = encode(m.Ping(1))[:-1]
    return {
        "store-and-load": [*stored, [0, "say", lookup], [0, "say", end]],
        "load-from-l2": [*stored, _begin(3, operator), clear, [0, "say", lookup], wait],
        "pending-and-cancelled": [
            *stored,
            _begin(3, operator),
            [0, "disk", 0],
            clear,
            [0, "say", later],
            [0, "say", said(m.Cancel(LEASE))],
        ],
        "abort": [
            _begin(1, b),
            _store(1, 8, 3)[0],
            [1, "say", said(m.Abort((LEASE, LEASE + 1)))],
            [1, "say", said(m.Abort((LEASE + 2,), False))],
            [1, "gone", None],
        ],
        "leave-while-storing": [_begin(1, b), _store(1, 8, 3)[0], [1, "end", None]],
        "leave-while-loading": [*stored, [0, "say", lookup], [0, "end", None]],
        "drop": [*stored, [0, "say", said(m.Drop(hashes(1, 1)))], [0, "say", lookup]],
        "forget": [*stored, [0, "say", said(m.Forget(6))], wait, [0, "say", lookup]],
        "note-and-ping": [
            _begin(0, a),
            [0, "say", said(m.Note("r", "queued", 600))],
            [0, "say", said(m.Ping(7, 0.5))],
        ],
        "questions": [*stored, _begin(3, operator), *ask.values()],
        "under-a-quota": [
            _begin(3, operator),
            ask["quota_set"],
            _begin(0, a),
            *_store(0, 0, 4),
            *_store(0, 4, 2, "salt"),
            ask["quota"],
            ask["quota_unset"],
        ],
        "two-ranks": [*map(_begin, range(3), _hellos()[2:5]), *_store(0, 4, 2), [2, "end", None]],
        "old-protocol": [_begin(0, old), *_store(0, 0, 2, "salt"), [0, "say", lookup]],
        "bye": [*stored, [0, "say", said(m.Bye())], [0, "say", lookup], [0, "end", None]],
        "half-a-frame": [_begin(0, a), [0, "raw", half], [0, "end", None]],
        "again-under-its-name": [*stored, _begin(2, a), *_store(2, 4, 2), [0, "say", lookup]],
    }


_QUESTIONS = (
    ("status", ""),
    ("leases", ""),
    ("explain", ""),
    ("wait_persisted", "2"),
    ("clear", "force"),
    ("nonsense", ""),
    ("quota", ""),
    ("quota_set", '{"salt": "", "l1": "8KiB", "l2": "50%"}'),
    ("quota_unset", '{"salt": ""}'),
)
