"""Names of chunks: frozen values, no ambiguous encoding, and the same in every process."""

import os
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core import keys
from kvkeep.core.keys import (
    ExtraKey,
    Scalar,
    chunk_hash,
    combine_ranks,
    encode_field,
    extend_chain,
    root_hash,
    token_bytes,
)
from kvkeep.types import ChunkHash, Fingerprint

SRC = Path(keys.__file__).resolve().parents[2]
LAYOUT = Fingerprint(bytes(range(32)))
OTHER = Fingerprint(bytes(32))
ROOT = root_hash(LAYOUT)

# Frozen: a change here makes every stored chunk unfindable. Then raise PROTOCOL_GENERATION too.
GOLDEN = {
    "root": "9ab2271b3f8e1703ae97d854ba4a27a9b8a3435f8eb804860980cc4e177086a7",
    "root, salt": "9d24f8b6dfce24e1eaf834324000af473e39e784e82cea478449aeb6a2889f3c",
    "root, empty salt": "b8dce522656edbee5b4161fa28f586480f08bdb061d2610d2f3a78731b8c4c52",
    "root, adapter": "c25ac4887be389b1106ab78085c4a7359c5b9f013b93bdb7691746ac687080f5",
    "root, salt and adapter": "94a4ae8a71e0023e69d5256f959ea719a2d2fe2a38598c78d4c1b83181c83039",
    "chunk": "375d2867187ae903615674f96ec452f4d9f263c081e45650a6eb559d4540910e",
    "chunk, no tokens": "faa5e1e67ffcde63cb75ec57e467bb227ee4124a8505d54def372a42796e7b4d",
    "chunk, largest id": "47e400f8991a359a2c34c323600ccb82b918f184d852f9280d85eae8233f9a3c",
    "chunk, extra keys": "efae8bce599dac01a28d9f3f63098b75402227483225d3683aed698d93f4dc51",
    "second chunk": "00a797fdda0526724239f132322a8f34e4af4cea56920d1a945ae788c4fbddd1",
    "two ranks": "03cd4e4762446c6640323885088ea886f1baafc0f562e845d6cdfc7ac6bbb2d9",
}
EXTRA: tuple[ExtraKey, ...] = (("image", b"\x01\x02"), ("position", 7), ("lora", "x"), ("n", None))


def vectors() -> dict[str, str]:
    """The values that GOLDEN freezes, computed now."""
    first = chunk_hash(ROOT, token_bytes([1, 2, 3, 4]))
    values: dict[str, bytes] = {
        "root": ROOT,
        "root, salt": root_hash(LAYOUT, "tenant-a"),
        "root, empty salt": root_hash(LAYOUT, ""),
        "root, adapter": root_hash(LAYOUT, None, "lora-1"),
        "root, salt and adapter": root_hash(LAYOUT, "tenant-a", "lora-1"),
        "chunk": first,
        "chunk, no tokens": chunk_hash(ROOT, b""),
        "chunk, largest id": chunk_hash(ROOT, token_bytes([2**32 - 1, 0])),
        "chunk, extra keys": chunk_hash(ROOT, token_bytes([1, 2, 3, 4]), EXTRA),
        "second chunk": chunk_hash(first, token_bytes([5, 6, 7, 8])),
        "two ranks": combine_ranks([LAYOUT, OTHER]),
    }
    return {name: value.hex() for name, value in values.items()}


def test_golden_vectors() -> None:
    assert vectors() == GOLDEN


def test_golden_vectors_differ_from_each_other() -> None:
    assert len(set(GOLDEN.values())) == len(GOLDEN)


def test_chains_in_other_processes_are_the_same() -> None:
    code = (
        "from kvkeep.core.keys import *\n"
        f"root = root_hash({bytes(LAYOUT)!r}, 'tenant-a', 'lora-1')\n"
        f"extra = chunk_hash(root, token_bytes([1, 2]), {EXTRA!r})\n"
        "print(b''.join([root, extra, *extend_chain(root, range(64), 16)]).hex())\n"
    )
    root = root_hash(LAYOUT, "tenant-a", "lora-1")
    extra = chunk_hash(root, token_bytes([1, 2]), EXTRA)
    here = b"".join([root, extra, *extend_chain(root, range(64), 16)]).hex()
    for seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(SRC)}
        there = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert there.stdout.strip() == here


# ---- boundaries between fields


def roots(*pairs: tuple[str | None, str | None]) -> list[bytes]:
    return [root_hash(LAYOUT, salt, adapter) for salt, adapter in pairs]


def with_extra(*extras: tuple[ExtraKey, ...]) -> list[bytes]:
    return [chunk_hash(ROOT, token_bytes([1]), extra) for extra in extras]


BOUNDARIES: dict[str, list[bytes]] = {
    "salt and adapter": roots(("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("abc", None)),
    "no salt and empty salt": roots((None, None), ("", None), (None, ""), ("", "")),
    "salt or adapter": roots(("x", None), (None, "x")),
    "kinds of values": [encode_field(v) for v in (None, "", b"", 0, "0", b"0", "None", b"N")],
    "numbers and digits": [encode_field(v) for v in (1, "1", b"1", b"\x01", -1, "-1", 11)],
    "extra key and value": with_extra((("ab", "c"),), (("a", "bc"),), (("abc", ""),)),
    "extra keys side by side": with_extra(
        (("a", "b"), ("c", "d")), (("c", "d"), ("a", "b")), (("a", "bc"), ("", "d"))
    ),
    "types of an extra value": with_extra(
        (), (("k", None),), (("k", ""),), (("k", b""),), (("k", 1),), (("k", "1"),), (("k", b"1"),)
    ),
    "parent and tokens": [
        chunk_hash(ChunkHash(b"a" * 32), b"b" * 4),
        chunk_hash(ChunkHash(b"a" * 31), b"ab" + b"b" * 3),
        chunk_hash(ChunkHash(b"a" * 32 + b"b" * 4), b""),
    ],
    "tokens and extra keys": [
        chunk_hash(ROOT, b"\x01\0\0\0" + encode_field("k") + encode_field("v")),
        chunk_hash(ROOT, b"\x01\0\0\0", (("k", "v"),)),
    ],
    "ranks": [combine_ranks(f) for f in ([LAYOUT, OTHER], [OTHER, LAYOUT], [LAYOUT], [])],
    "domains": [ROOT, combine_ranks([LAYOUT]), chunk_hash(ChunkHash(LAYOUT), b"")],
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_field_boundaries(name: str) -> None:
    for one, other in combinations(BOUNDARIES[name], 2):
        assert one != other


def test_half_of_a_surrogate_pair_in_a_salt_is_a_name_too() -> None:
    assert len({*roots(("\ud83d", None), ("\ude00", None), ("?", None))}) == 3


scalars = st.one_of(st.none(), st.text(), st.binary(), st.integers())
fields = st.lists(scalars, max_size=4)


def typed(values: list[Scalar]) -> list[tuple[type, Scalar]]:
    return [(type(value), value) for value in values]


@given(fields, fields)
def test_no_two_lists_of_fields_have_one_encoding(one: list[Scalar], other: list[Scalar]) -> None:
    same = b"".join(map(encode_field, one)) == b"".join(map(encode_field, other))
    assert same == (typed(one) == typed(other))


@given(fields, st.integers(0, 3))
def test_an_encoding_splits_only_one_way(values: list[Scalar], keep: int) -> None:
    """A list is told from its own beginning and end, so lengths are in the encoding."""
    whole = b"".join(map(encode_field, values))
    for part in (values[:keep], values[len(values) - keep :]):
        encoded = b"".join(map(encode_field, part))
        assert (encoded == whole) == (len(part) == len(values))


# ---- chains


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.integers(1, 8),
    st.sampled_from([None, "s"]),
)
def test_a_chain_is_one_chunk_hash_after_another(
    token_ids: list[int], step: int, salt: str | None
) -> None:
    parent = root_hash(LAYOUT, salt)
    expected = []
    for start, end in pairwise(range(0, len(token_ids) + 1, step)):
        parent = chunk_hash(parent, token_bytes(token_ids[start:end]))
        expected.append(parent)
    assert extend_chain(root_hash(LAYOUT, salt), token_ids, step) == expected


def test_a_chain_names_whole_chunks_only() -> None:
    full = extend_chain(ROOT, list(range(32)), 16)
    assert len(full) == 2
    assert extend_chain(ROOT, list(range(31)), 16) == full[:1]
    assert extend_chain(ROOT, list(range(15)), 16) == []


def test_a_chain_can_be_continued() -> None:
    whole = extend_chain(ROOT, list(range(64)), 16)
    assert extend_chain(whole[1], list(range(32, 64)), 16) == whole[2:]


def test_the_first_token_changes_every_later_hash() -> None:
    one = extend_chain(ROOT, list(range(64)), 16)
    other = extend_chain(ROOT, [99, *range(1, 64)], 16)
    assert not set(one) & set(other)


def test_token_ids_are_little_endian_u32() -> None:
    assert token_bytes([1, 2**32 - 1, 258]).hex() == "01000000ffffffff02010000"


@pytest.mark.parametrize("token_id", [2**32, -1, 2**40])
def test_an_id_that_is_no_u32_is_an_error(token_id: int) -> None:
    with pytest.raises(OverflowError):
        token_bytes([1, token_id])
    with pytest.raises(OverflowError):
        extend_chain(ROOT, [token_id] * 16, 16)
