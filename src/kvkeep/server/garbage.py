"""Decides when cyclic garbage is collected, so that no collection holds the loop for long.

A full collection of an index of 100,000 chunks takes 0.2 s. So only what is new is looked at by
itself, 10,000 container objects at a time (half a millisecond), and everything only in idle moments
of a server that holds little. What the server does all day makes no cycles that live longer.
"""

import gc
import time
from collections.abc import Callable

YOUNG = 10_000  # container objects since the last time
NEVER = 1 << 30  # generations that are not collected by themselves
FULL_EVERY_S, FULL_IDLE_S = 3600.0, 10.0
FULL_MOST_CHUNKS = 5_000  # some milliseconds


class Garbage:
    """The collector of this process, while a server runs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._full_s = clock()
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()  # what was there at the start stays
        gc.set_threshold(YOUNG, NEVER, NEVER)

    def collect(self, *, idle_s: float, chunks: int) -> bool:
        """Called now and then; whether everything was looked at."""
        due = self._clock() - self._full_s >= FULL_EVERY_S
        if not due or idle_s < FULL_IDLE_S or chunks > FULL_MOST_CHUNKS:
            return False
        self._full_s = self._clock()
        gc.collect()
        return True

    def stop(self) -> None:
        """As it was."""
        gc.set_threshold(*self._before)
        gc.unfreeze()
