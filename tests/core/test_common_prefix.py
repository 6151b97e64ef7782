"""The common prefix against the sentence of DESIGN section 4, tried for every length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.core.common_prefix import common_prefix, need_at
from kvkeep.types import GroupKind, RowSpec

FULL = RowSpec(0, GroupKind.FULL_ATTENTION, 4096)
STATE = RowSpec(1, GroupKind.RECURRENT, 4096)


def window(chunks: int) -> RowSpec:
    return RowSpec(2, GroupKind.SLIDING_WINDOW, 4096, chunks)


def serves(spec: RowSpec, held: list[bool], length: int) -> bool:
    """What the design says, word by word."""
    if length == 0:
        return True
    if spec.kind is GroupKind.FULL_ATTENTION:
        return all(held[:length])
    if spec.kind is GroupKind.SLIDING_WINDOW:
        return all(held[max(0, length - spec.window_chunks) : length])
    return held[length - 1]


def oracle(rows: list[RowSpec], held: list[list[bool]], chunks: int) -> int:
    for length in range(chunks, -1, -1):
        if all(serves(spec, row, length) for spec, row in zip(rows, held, strict=True)):
            return length
    raise AssertionError("zero is always usable")


specs = st.one_of(st.just(FULL), st.just(STATE), st.builds(window, st.integers(1, 5)))


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[RowSpec], list[list[bool]], int]:
    """Groups of several ranks, each row holding most chunks."""
    groups = draw(st.lists(specs, min_size=1, max_size=3))
    rows = groups * draw(st.integers(1, 3))
    chunks = draw(st.integers(0, 10))
    lost = st.sets(st.integers(0, 9), max_size=3)
    held = [[c not in gone for c in range(chunks)] for gone in (draw(lost) for _ in rows)]
    return rows, held, chunks


@given(tables())
def test_it_is_the_largest_usable_length(
    table: tuple[list[RowSpec], list[list[bool]], int],
) -> None:
    rows, held, chunks = table
    assert common_prefix(rows, held, chunks) == oracle(rows, held, chunks)


@given(st.lists(specs, min_size=1, max_size=4), st.lists(st.booleans(), max_size=12))
def test_any_row_of_full_attention_means_the_leading_run(
    others: list[RowSpec], held: list[bool]
) -> None:
    """The shortcut of a lookup: when all rows hold the same chunks, one full row decides."""
    rows = [*others, FULL]
    run = held.index(False) if False in held else len(held)
    assert common_prefix(rows, [held] * len(rows), len(held)) == run


Y, N = True, False


@pytest.mark.parametrize(
    ("rows", "held", "expected"),
    [
        # chunk 3 resident, chunk 2 lost
        ([FULL], [[Y, N, Y]], 1),
        ([FULL], [[N, Y, Y]], 0),
        ([FULL], [[Y, Y, Y]], 3),
        # a sliding window needs its last chunks only
        ([window(2)], [[N, Y, Y]], 3),
        ([window(2)], [[Y, N, Y]], 1),
        ([window(1)], [[N, N, Y, N]], 3),
        ([window(5)], [[Y, Y, N]], 2),
        # recurrent state needs the one at the end
        ([STATE], [[N, N, Y, N]], 3),
        ([STATE], [[N, N, N, N]], 0),
        # all rows must agree on one length
        ([FULL, STATE], [[Y, Y, Y], [N, Y, N]], 2),
        ([FULL, window(2)], [[Y, Y, Y, Y], [N, Y, Y, N]], 3),
        ([window(2), STATE], [[N, N, Y, Y], [Y, Y, Y, N]], 0),
        # one rank is short
        ([FULL, FULL], [[Y, Y, Y], [Y, Y, N]], 2),
        ([STATE, STATE], [[Y, Y, N], [Y, N, Y]], 1),
    ],
)
def test_examples(rows: list[RowSpec], held: list[list[bool]], expected: int) -> None:
    assert common_prefix(rows, held, len(held[0])) == expected


def test_nothing_asked_is_a_hit_of_nothing() -> None:
    assert common_prefix([FULL, STATE], [[], []], 0) == 0


def test_need_never_exceeds_the_length() -> None:
    assert [need_at(FULL, 3), need_at(window(2), 3), need_at(STATE, 3)] == [3, 2, 1]
    assert [need_at(spec, 0) for spec in (FULL, window(2), STATE)] == [0, 0, 0]
    assert need_at(window(5), 3) == 3
