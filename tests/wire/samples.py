"""Values of every message: random ones for hypothesis, and one fixed one of each type."""

import types
from enum import IntEnum
from typing import Any, get_args, get_origin

import msgspec
from hypothesis import strategies as st

from kvkeep.types import EndOutcome, GroupKind, Role, RowSpec
from kvkeep.wire import messages as m

CLIENT_TYPES: tuple[type[Any], ...] = get_args(m.ClientMessage)
SERVER_TYPES: tuple[type[Any], ...] = get_args(m.ServerMessage)

_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**64 - 1),
    str: st.text(max_size=40),
    bytes: st.binary(max_size=100),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type that messages are made of."""
    if kind in _SCALARS:
        return _SCALARS[kind]
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=4).map(tuple)
    if isinstance(kind, types.UnionType):
        return st.one_of(*map(values, get_args(kind)))
    if issubclass(kind, IntEnum):
        return st.sampled_from(kind)
    fields = {field.name: values(field.type) for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **fields)


def messages(kinds: tuple[type[Any], ...]) -> st.SearchStrategy[Any]:
    """Any message of one direction, each type equally often."""
    return st.sampled_from(kinds).flatmap(values)


_ROW = RowSpec(2, GroupKind.SLIDING_WINDOW, 65536, 3)
_COLUMNS = m.Columns(b"\x01" * 8, b"\x02" * 8, b"\x03" * 8)

SAMPLES: tuple[tuple[Any, str], ...] = (
    (
        m.Hello(
            (1, 2),
            "s",
            Role.WORKER,
            rank=1,
            world=2,
            rows=(_ROW,),
            fingerprint=b"\xff" * 4,
            model="m",
            writes=False,
            dma=True,
            recompute=False,
            wants_arena=False,
            confirms=2**64 - 1,
            client="c",
            chunk_tokens=256,
        ),
        (
            "35000000dc0010a568656c6c6f920102a17301010291940201ce0001000003c404ffffffffa16dc2"
            "c3c2c2cfffffffffffffffffa163cd0100"
        ),
    ),
    (
        m.Lookup(
            1,
            "r",
            b"\xaa" * 4,
            "salt",
            near=False,
            prompt_tokens=300,
            fetch=False,
            wait_ms=2.5,
        ),
        "2400000099a66c6f6f6b757001a172c404aaaaaaaaa473616c74c2cd012cc2cb4004000000000000",
    ),
    (m.Cancel(2**63), "1100000092a663616e63656ccf8000000000000000"),
    (
        m.Stage(2, (m.StageItem("r", b"p", b"h", None, 3),)),
        "1400000093a57374616765029195a172c40170c40168c003",
    ),
    (m.Commit(3, (1, 2**63)), "1400000093a6636f6d6d6974039201cf8000000000000000"),
    (m.Abort((7,), confirmed=False), "0a00000093a561626f72749107c2"),
    (
        m.End(7, (0, 1), EndOutcome.FAILED, "r", 10, 20, 1.5, 2.5),
        "2000000099a3656e640792000102a1720a14cb3ff8000000000000cb4004000000000000",
    ),
    (m.Drop(b"h"), "0900000092a464726f70c40168"),
    (m.Forget(6), "0900000092a6666f7267657406"),
    (m.Note("r", "e", 7), "0b00000094a46e6f7465a172a16507"),
    (m.Ping(4, 0.5), "1000000093a470696e6704cb3fe0000000000000"),
    (m.Query(5, "explain", "r"), "1200000094a5717565727905a76578706c61696ea172"),
    (m.Bye(), "0500000091a3627965"),
    (
        m.Welcome(
            1,
            2**63,
            3,
            1 << 31,
            1 << 21,
            64,
            True,
            False,
            "0.1.0",
            ("disk",),
            250.0,
        ),
        (
            "360000009ca777656c636f6d6501cf800000000000000003ce80000000ce0020000040c3c2a5302e"
            "312e3091a46469736bcb406f400000000000"
        ),
    ),
    (m.Refused("no"), "0c00000092a772656675736564a26e6f"),
    (
        m.Found(6, 9, 1, (_COLUMNS,), b"\x01\x02", b"\x01"),
        (
            "3100000097a5666f756e640609019193c4080101010101010101c4080202020202020202c4080303"
            "030303030303c4020102c40101"
        ),
    ),
    (m.Pending(7, 2**63), "1300000093a770656e64696e6707cf8000000000000000"),
    (
        m.Granted(7, b"\x00\x01", (9,), (_COLUMNS,), 4096),
        (
            "3300000096a76772616e74656407c402000191099193c4080101010101010101c408020202020202"
            "0202c4080303030303030303cd1000"
        ),
    ),
    (m.Committed(8, b"\x00"), "0f00000093a9636f6d6d697474656408c40100"),
    (m.Forgotten(6, 4, done=False), "0e00000094a9666f72676f7474656e0604c2"),
    (m.Pong(9), "0700000092a4706f6e6709"),
    (m.Answer(10, "{}"), "0c00000093a6616e737765720aa27b7d"),
    (m.Failed(11, "why"), "0d00000093a66661696c65640ba3776879"),
    (m.Ready(b"f", 1, (_ROW,)), "1500000094a57265616479c401660191940201ce0001000003"),
    (m.Unready("left"), "0e00000092a7756e7265616479a46c656674"),
    (m.Grown(1 << 21), "0c00000092a567726f776ece00200000"),
    (
        m.Resolved(2**63, 9, 1, (_COLUMNS,), b"\x01\x02", b"\x01"),
        (
            "3c00000097a87265736f6c766564cf800000000000000009019193c4080101010101010101c40802"
            "02020202020202c4080303030303030303c4020102c40101"
        ),
    ),
    (m.Revoked(9), "0a00000092a77265766f6b656409"),
    (m.Problem("p"), "0b00000092a770726f626c656da170"),
)

# As they were sent before L2: the fields that came later are missing at the end.
OLD: tuple[tuple[Any, str], ...] = (
    (m.Note("r", "e"), "0a00000093a46e6f7465a172a165"),
    (m.Forgotten(6, 4), "0d00000093a9666f72676f7474656e0604"),
    (
        m.Hello(
            (1, 2),
            "s",
            Role.WORKER,
            rank=1,
            world=2,
            rows=(_ROW,),
            fingerprint=b"\xff" * 4,
            model="m",
            writes=False,
            dma=True,
            recompute=False,
            wants_arena=False,
            confirms=2**64 - 1,
            client="c",
        ),
        (
            "300000009fa568656c6c6f920102a17301010291940201ce0001000003c404ffffffffa16dc2c3c2"
            "c2cfffffffffffffffffa163"
        ),
    ),
    (
        m.Lookup(1, "r", b"\xaa" * 4, "salt", near=False, prompt_tokens=300),
        "1a00000097a66c6f6f6b757001a172c404aaaaaaaaa473616c74c2cd012c",
    ),
    (
        m.Stage(2, (m.StageItem("r", b"p", b"h", None),)),
        "1300000093a57374616765029194a172c40170c40168c0",
    ),
    (
        m.Welcome(1, 2**63, 3, 1 << 31, 1 << 21, 64, True, False, "0.1.0"),
        "270000009aa777656c636f6d6501cf800000000000000003ce80000000ce0020000040c3c2a5302e312e30",
    ),
    (
        m.Found(6, 9, 1, (_COLUMNS,), b"\x01\x02"),
        (
            "2e00000096a5666f756e640609019193c4080101010101010101c4080202020202020202c4080303"
            "030303030303c4020102"
        ),
    ),
)
