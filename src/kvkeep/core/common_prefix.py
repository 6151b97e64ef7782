"""Decides how long a hit is when several (kv_rank, group) rows must agree.

Rows are KV groups of ranks, columns are chunks. A length L is usable when every row holds what it
needs at L: full attention every chunk before L, a sliding window the last `window_chunks` of them,
recurrent state the chunk that ends at L (DESIGN section 4).
"""

from collections.abc import Sequence

from kvkeep.types import GroupKind, RowSpec


def need_at(spec: RowSpec, length: int) -> int:
    """How many chunks before `length` this row must hold, counted back from `length`."""
    match spec.kind:
        case GroupKind.FULL_ATTENTION:
            return length
        case GroupKind.SLIDING_WINDOW:
            return min(length, spec.window_chunks)
        case GroupKind.RECURRENT:
            return min(length, 1)


def common_prefix(rows: Sequence[RowSpec], held: Sequence[Sequence[bool]], chunks: int) -> int:
    """The largest usable length in 0..chunks.

    `held[r][c]` says whether row r holds chunk c. O(rows x chunks).
    """
    usable = [True] * (chunks + 1)
    for spec, row in zip(rows, held, strict=True):
        run = 0  # chunks held in a row, ending at this column
        for length in range(1, chunks + 1):
            run = run + 1 if row[length - 1] else 0
            if run < need_at(spec, length):
                usable[length] = False
    return max(length for length in range(chunks + 1) if usable[length])
