"""Measures how long the event loop is held: by each entry of our code, and as a whole.

An entry is one callback of the loop: what came on a connection, a tick, the end of an I/O, a
scrape. Time is wall time; on a busy machine an entry also waits for its turn, so the thread's own
CPU time can be measured beside it. Whatever else the loop does shows in the beat: a timer, and how
late it rings. Decides nothing; an entry costs well under a microsecond, with CPU time up to three.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvkeep.server.overview import Log

BOUNDS_S = (0.0001, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
_SHORT_S = BOUNDS_S[0]
LONG_S = 0.05  # then a line is logged
LOG_EVERY_S = 60.0
BEAT_S = 0.05


class Seen:
    """The entries of one kind."""

    __slots__ = ("buckets", "longest_cpu_s", "longest_s", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = self.longest_s = self.longest_cpu_s = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.buckets)


class Watchdog:
    """The entries of one loop. Entries nest: the outermost counts."""

    def __init__(
        self,
        log: Log | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] | None = None,
    ) -> None:
        """`cpu_clock`: of the loop's thread (`time.thread_time`); None: it is not looked at."""
        self.seen: dict[str, Seen] = {}
        self.bounds_s = BOUNDS_S
        self.longest_lag_s = 0.0
        self._log = log or _silent
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._inside = False
        self._cpu_began_s = 0.0
        self._said_s = float("-inf")
        self._long = 0  # entries over LONG_S since the last line

    @contextmanager
    def entry(self, what: str) -> Iterator[None]:
        """For callbacks that are not many; `begin` and `end` are quicker."""
        began_s = self.begin()
        try:
            yield
        finally:
            self.end(what, began_s)

    def begin(self) -> float:
        """An entry begins; 0 inside of another one. Hand it to `end`."""
        if self._inside:
            return 0.0
        self._inside = True
        if self._cpu_clock is not None:
            self._cpu_began_s = self._cpu_clock()
        return self._clock()

    def end(self, what: str, began_s: float) -> None:
        """It is over."""
        if not began_s:
            return
        took_s = self._clock() - began_s
        self._inside = False
        try:
            seen = self.seen[what]
        except KeyError:
            seen = self.seen[what] = Seen()
        seen.sum_s += took_s
        seen.buckets[0 if took_s <= _SHORT_S else bisect_left(BOUNDS_S, took_s)] += 1
        if took_s > seen.longest_s:
            seen.longest_s = took_s
        if self._cpu_clock is not None:
            cpu_s = self._cpu_clock() - self._cpu_began_s
            seen.longest_cpu_s = max(seen.longest_cpu_s, cpu_s)
        if took_s > LONG_S:
            self._say(what, took_s)

    def lagged(self, late_s: float) -> None:
        """The beat came so late."""
        self.longest_lag_s = max(self.longest_lag_s, late_s)

    def _say(self, what: str, took_s: float) -> None:
        self._long += 1
        now_s = self._clock()
        if now_s - self._said_s < LOG_EVERY_S:
            return
        self._log(
            "loop_held",
            level="warning",
            by=what,
            took_ms=round(took_s * 1e3, 1),
            times=self._long,
        )
        self._said_s, self._long = now_s, 0

    def status(self) -> dict[str, Any]:
        """The part `loop` of `kvkeep status --json`."""
        longest = max(self.seen.items(), key=lambda item: item[1].longest_s, default=None)
        cpu = self._cpu_clock is not None
        return {
            "longest_ms": _ms(longest[1].longest_s) if longest else 0.0,
            "longest_what": longest[0] if longest else "",
            "longest_cpu_ms": _ms(
                max((seen.longest_cpu_s for seen in self.seen.values()), default=0.0)
            )
            if cpu
            else None,
            "longest_lag_ms": _ms(self.longest_lag_s),
            "entries": {
                what: {
                    "count": seen.count,
                    "sum_ms": _ms(seen.sum_s),
                    "longest_ms": _ms(seen.longest_s),
                    "longest_cpu_ms": _ms(seen.longest_cpu_s) if cpu else None,
                }
                for what, seen in sorted(self.seen.items())
            },
        }


class Beat:
    """A timer that says how late it rings."""

    def __init__(self, watchdog: Watchdog, loop: Any) -> None:  # noqa: ANN401 - uvloop's too
        self._watchdog = watchdog
        self._loop = loop
        self._due_s = loop.time() + BEAT_S
        self._timer = loop.call_at(self._due_s, self._ring)

    def _ring(self) -> None:
        now_s = self._loop.time()
        self._watchdog.lagged(now_s - self._due_s)
        self._due_s = now_s + BEAT_S
        self._timer = self._loop.call_at(self._due_s, self._ring)

    def stop(self) -> None:
        """No more beats."""
        self._timer.cancel()


def _silent(event: str, **fields: object) -> None:
    """Nobody reads it."""


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
