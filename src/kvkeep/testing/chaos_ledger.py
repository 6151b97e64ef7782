"""What client processes did, in memory that outlives them: one row of counters for each place.

A row belongs to one process at a time, so a count is one store of eight bytes, and right even when
its process is killed in the middle of everything. Sentences about what went wrong go to a file that
every process appends to.
"""

import mmap
import os
import time
from enum import IntEnum
from pathlib import Path

from kvkeep.types import CommitOutcome, Reason, StageOutcome

_WORD_BYTES = 8


class Count(IntEnum):
    """The words of a row. Those of outcomes are found by `staged`, `committed` and `missed`."""

    OPERATIONS = 0
    AWAY = 1  # operations that found no server: all misses
    STORES = 2
    LOOKUPS = 3  # sent
    ANSWERED = 4  # of them
    PENDING = 5  # of them, those that waited for L2
    HIT_CHUNKS = 6
    L2_CHUNKS = 7  # of them, those that L2 brought
    RIGHT_CHUNKS = 8  # read, generation unchanged, every byte compared
    LOST_CHUNKS = 9  # read, generation changed: a failed load
    READ_BYTES = 10
    WRITTEN_BYTES = 11
    COMMITTED_BYTES = 12
    LOADED_TOKENS = 13
    ENDED = 14
    ABORTED_CHUNKS = 15
    WRONG_BYTES = 16
    FAILED = 17
    FORKS = 18
    CONNECTS = 19
    FORGETS = 20
    CANCELS = 21
    LONGEST_NS = 22  # of an operation, with the time for which its process was stopped
    SINCE_NS = 23  # when the running operation began; 0: none runs
    DESCRIPTORS = 24  # now
    _OUTCOMES = 25


_STAGED = int(Count._OUTCOMES)
_COMMITTED = _STAGED + len(StageOutcome) + 1
_MISSED = _COMMITTED + len(CommitOutcome) + 1
_WORDS = _MISSED + max(Reason) + 1


def staged(outcome: int) -> int:
    """The word for chunks that were asked to be staged and got this answer."""
    return _STAGED + StageOutcome(outcome)


def committed(outcome: int) -> int:
    """The word for chunks of a commit that got this answer."""
    return _COMMITTED + CommitOutcome(outcome)


def missed(reason: int) -> int:
    """The word for looked-up chunks beyond the hit that had this reason."""
    return _MISSED + Reason(reason)


class Row:
    """The counters of one place."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, word: int) -> int:
        return int(self._words[word])

    def __setitem__(self, word: int, value: int) -> None:
        self._words[word] = value

    def add(self, word: int, count: int = 1) -> None:
        """Count."""
        self._words[word] += count

    def begin(self) -> None:
        """An operation begins."""
        self._words[Count.SINCE_NS] = time.monotonic_ns()

    def end(self) -> None:
        """It is over."""
        took_ns = time.monotonic_ns() - self._words[Count.SINCE_NS]
        self._words[Count.SINCE_NS] = 0
        self._words[Count.OPERATIONS] += 1
        self._words[Count.LONGEST_NS] = max(took_ns, self._words[Count.LONGEST_NS])


class Ledger:
    """All rows, shared with every process that is forked later."""

    def __init__(self, places: int) -> None:
        self._memory = mmap.mmap(-1, places * _WORDS * _WORD_BYTES)
        words = memoryview(self._memory).cast("Q")
        self.rows = [Row(words[n * _WORDS : (n + 1) * _WORDS]) for n in range(places)]

    def total(self, word: int) -> int:
        """The sum over all places."""
        return sum(row[word] for row in self.rows)

    def most(self, word: int) -> int:
        """The largest of all places."""
        return max(row[word] for row in self.rows)

    def outcomes(self) -> dict[str, int]:
        """Chunks by outcome, under the names that the server's counters have."""
        found = {f"stage_{o.name.lower()}": self.total(staged(o)) for o in StageOutcome}
        found |= {f"commit_{o.name.lower()}": self.total(committed(o)) for o in CommitOutcome}
        return found | {f"miss_{o.name.lower()}": self.total(missed(o)) for o in Reason}


class Story:
    """Sentences about what went wrong, from every process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def tell(self, text: str) -> None:
        """Append one line; whole, whoever else writes."""
        line = " | ".join(text.strip().splitlines())[:3000] + "\n"
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, line.encode(errors="replace"))
        finally:
            os.close(file)

    def lines(self) -> list[str]:
        """Everything told so far."""
        return self._path.read_text().splitlines()
