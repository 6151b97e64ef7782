"""Columns of unsigned numbers with a fixed end: packed, and paid for only as far as they are used.

A column is anonymous private memory of its full length. Pages that nothing was written to take no
memory, and nothing is ever copied because a column grows: no call pays for a table's size.
"""

import mmap
from typing import Literal

_WIDTHS = {"B": 1, "I": 4, "Q": 8}


def column(kind: Literal["B", "I", "Q"], length: int) -> memoryview:
    """`length` zeros: bytes, 32-bit or 64-bit words."""
    size_bytes = max(1, length) * _WIDTHS[kind]
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(memory).cast(kind)
