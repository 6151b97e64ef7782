"""The header page: what is written is read, any change is noticed, each mismatch has a word."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvkeep.backends.base import HEADER_BYTES
from kvkeep.backends.header import (
    CHECKSUM_BYTES,
    MAX_U32,
    MODEL_MAX_BYTES,
    Header,
    HeaderProblem,
    Verdict,
    decode,
    encode,
    file_stem,
    fingerprint_label,
    label,
    parse_stem,
    salt_digest,
    verdict,
)
from kvkeep.types import ChunkHash, Fingerprint, IoOutcome, Namespace, ObjectKey

U32 = st.integers(0, MAX_U32)
KEYS = st.builds(ObjectKey, st.binary(min_size=32, max_size=32).map(ChunkHash), U32, U32, U32)
HEADERS = st.builds(
    Header,
    fingerprint=st.binary(min_size=32, max_size=32).map(Fingerprint),
    salt_digest=st.none() | st.binary(min_size=32, max_size=32),
    key=KEYS,
    length=st.integers(0, (1 << 64) - 1),
    checksum=st.binary(min_size=16, max_size=16),
    depth=U32,
    model=st.text(st.characters(codec="utf-8"), max_size=MODEL_MAX_BYTES // 4),
    created_s=st.floats(allow_nan=False),
)
SPACE = Namespace(Fingerprint(b"\x11" * 32), "salt", "a model")
KEY = ObjectKey(ChunkHash(bytes(range(32))), 4, 3, 2)
LENGTH = 12_345
HEADER = Header(SPACE.fingerprint, salt_digest("salt"), KEY, LENGTH, b"c" * 16, 7, "a model", 1e9)


def page_of(header: Header) -> memoryview:
    page = memoryview(bytearray(b"\xff" * HEADER_BYTES))
    encode(page, header)
    return page


def sealed(page: memoryview) -> memoryview:
    """The page with a right checksum over what is in it now."""
    page[-CHECKSUM_BYTES:] = xxh3_128_digest(page[:-CHECKSUM_BYTES])
    return page


def asked(page: memoryview, size: int = LENGTH, length: int = LENGTH) -> Verdict:
    return verdict(page, SPACE, KEY, length=length, size=size)


@given(HEADERS)
def test_what_is_written_is_read(header: Header) -> None:
    assert decode(page_of(header)) == header


def test_a_flip_of_any_bit_of_any_byte_is_noticed() -> None:
    page = page_of(HEADER)
    chosen = random.Random(1)
    for byte in range(HEADER_BYTES):
        page[byte] ^= 1 << chosen.randrange(8)
        expected = HeaderProblem.BAD_MAGIC if byte < 8 else HeaderProblem.HEADER_CHECKSUM
        assert asked(page) == Verdict(IoOutcome.CORRUPT, expected), f"byte {byte}"
        encode(page, HEADER)
    assert asked(page) == Verdict(IoOutcome.OK, None, HEADER)


@given(st.binary(max_size=HEADER_BYTES))
def test_anything_else_is_no_header(data: bytes) -> None:
    found = decode(memoryview(data.ljust(HEADER_BYTES, b"\0")))
    assert found in (HeaderProblem.BAD_MAGIC, HeaderProblem.HEADER_CHECKSUM)


def test_a_part_of_a_page_is_cut() -> None:
    assert decode(page_of(HEADER)[:-1]) is HeaderProblem.TRUNCATED


@pytest.mark.parametrize("place", [8, 10])
def test_a_newer_version_or_codec_is_not_corrupt(place: int) -> None:
    page = page_of(HEADER)
    page[place] += 2  # one more than plain is the codec of a sealed object
    assert asked(page).problem is HeaderProblem.HEADER_CHECKSUM
    assert asked(sealed(page)) == Verdict(IoOutcome.LAYOUT_MISMATCH, HeaderProblem.VERSION)


@pytest.mark.parametrize(
    "key",
    [
        KEY._replace(chunk=ChunkHash(b"x" * 32)),
        KEY._replace(world=5),
        KEY._replace(rank=2),
        KEY._replace(group=1),
    ],
)
def test_each_part_of_the_key_counts(key: ObjectKey) -> None:
    found = asked(page_of(replace(HEADER, key=key)))
    assert found == Verdict(IoOutcome.CORRUPT, HeaderProblem.WRONG_KEY)


@pytest.mark.parametrize("salt", [None, "", "other"])
def test_another_salt_is_another_key(salt: str | None) -> None:
    found = asked(page_of(replace(HEADER, salt_digest=salt_digest(salt))))
    assert found.problem is HeaderProblem.WRONG_KEY


def test_another_layout_is_named_as_such() -> None:
    other = replace(HEADER, fingerprint=Fingerprint(b"\x12" * 32))
    expected = Verdict(IoOutcome.LAYOUT_MISMATCH, HeaderProblem.OTHER_FINGERPRINT)
    assert asked(page_of(other)) == expected
    both = replace(other, key=KEY._replace(chunk=ChunkHash(b"x" * 32)), length=1)
    assert asked(page_of(both)) == expected


@pytest.mark.parametrize(
    ("size", "length", "problem"),
    [
        (LENGTH - 1, LENGTH, HeaderProblem.TRUNCATED),
        (0, LENGTH, HeaderProblem.TRUNCATED),
        (LENGTH + 1, LENGTH, HeaderProblem.TOO_LONG),
        (LENGTH + 1, LENGTH + 1, HeaderProblem.TOO_LONG),
        (LENGTH - 1, LENGTH - 1, HeaderProblem.TRUNCATED),
        (LENGTH, LENGTH + 1, HeaderProblem.OTHER_LENGTH),
        (LENGTH, LENGTH, None),
    ],
)
def test_sizes(size: int, length: int, problem: HeaderProblem | None) -> None:
    assert asked(page_of(HEADER), size, length).problem is problem


def test_what_ends_inside_its_header_is_cut() -> None:
    assert asked(memoryview(bytes(HEADER_BYTES)), size=0).problem is HeaderProblem.TRUNCATED


def test_a_long_model_name_is_cut_between_characters() -> None:
    found = decode(page_of(replace(HEADER, model="x" + "ü" * MODEL_MAX_BYTES)))
    assert isinstance(found, Header)
    assert found.model == "x" + "ü" * ((MODEL_MAX_BYTES - 1) // 2)


def test_no_salt_is_not_the_empty_salt() -> None:
    labels = [label(Namespace(SPACE.fingerprint, salt)) for salt in (None, "", "a", "\ud800")]
    assert len(set(labels)) == 4
    assert labels[0] == fingerprint_label(SPACE) == "11" * 16
    assert all(text.startswith(f"{labels[0]}-") and len(text) == 49 for text in labels[1:])


def test_the_header_knows_its_label() -> None:
    assert HEADER.label == label(SPACE)
    assert replace(HEADER, salt_digest=None).label == fingerprint_label(SPACE)


@given(KEYS)
def test_stems_go_both_ways(key: ObjectKey) -> None:
    assert parse_stem(file_stem(key)) == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a" * 64,
        "A" * 64 + ".1-0.0",
        "a" * 63 + ".1-0.0",
        "a" * 64 + ".01-0.0",
        "a" * 64 + ".1-0.0\n",
        "a" * 64 + ".1-0.0.kv",
        "a" * 64 + ".1--0.0",
        "a" * 64 + ".+1-0.0",
        "a" * 64 + ".1-0.٣",
        "a" * 64 + f".{MAX_U32 + 1}-0.0",
        "a" * 64 + ".1-0.99999999999",
    ],
)
def test_other_texts_are_no_stems(text: str) -> None:
    assert parse_stem(text) is None
