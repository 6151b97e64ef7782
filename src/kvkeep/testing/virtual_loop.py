"""An asyncio event loop whose clock is a number.

Nothing waits: when no callback is ready, time jumps to the next timer. No sockets, threads or wall
clock, so a run depends on its inputs alone. When nothing is ready and no timer is set, nothing can
ever happen again: that is a `Deadlock`, raised at once instead of hanging.
"""

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvkeep.errors import KVKeepError

T = TypeVar("T")

_RESOLUTION_S = 1e-9  # timers closer than this run together; the machine's own must not matter


class Deadlock(KVKeepError):
    """Something is awaited and nothing is scheduled that could end the wait."""


class _Clock:
    """Stands where the loop expects a selector: instead of waiting it moves the time."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            names = sorted(task.get_name() for task in asyncio.all_tasks(self._loop))
            raise Deadlock(f"nothing is scheduled, and these wait: {', '.join(names) or 'nobody'}")
        self._loop.advance(timeout_s)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop; `time()` starts at 0 and moves only when everything that is due has run."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        self._clock_resolution = _RESOLUTION_S
        self._selector = _Clock(self)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Move the time; only the loop itself calls this."""
        assert by_s >= 0.0
        if by_s > 0.0:  # far from 0 a short step would be lost in rounding, and time stand still
            self._now_s = max(self._now_s + by_s, math.nextafter(self._now_s, math.inf))
            self._clock_resolution = max(_RESOLUTION_S, 2 * math.ulp(self._now_s))

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list, "there is no input or output here"

    def _write_to_self(self) -> None:
        """A wake-up from a signal handler: the loop never sleeps, so there is nothing to wake."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on a fresh virtual loop; tasks it leaves are cancelled. Raises Deadlock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
