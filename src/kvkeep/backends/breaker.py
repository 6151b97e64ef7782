"""When to stop asking a backend that does not work, and when to ask again.

A pure machine on the caller's clock. CLOSED: calls go through, and enough failures in a row open
it. OPEN: nothing is sent until a delay has passed. HALF_OPEN: one probe is under way; its success
closes the breaker and resets the delay, its failure opens it again for twice as long. A call that
began before the last change of state says nothing about the present one and is not counted.
"""

from enum import Enum
from typing import NewType

Turn = NewType("Turn", int)  # counts changes of state


class State(Enum):
    """What the breaker lets through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One backend's breaker; times are seconds on any clock that does not run backwards."""

    def __init__(
        self, *, failures: int = 5, open_s: float = 5.0, open_most_s: float = 60.0
    ) -> None:
        assert failures >= 1
        assert 0 < open_s <= open_most_s
        self._limit = failures
        self._first_s = open_s
        self._most_s = open_most_s
        self._delay_s = open_s
        self._retry_at_s = 0.0
        self._turn = Turn(0)
        self.state = State.CLOSED
        self.failures_in_row = 0

    @property
    def closed(self) -> bool:
        """Whether calls may be sent."""
        return self.state is State.CLOSED

    def enter(self) -> Turn:
        """A call is about to be sent; give the turn back when it has ended."""
        assert self.closed, "nothing is sent while the breaker is open"
        return self._turn

    def succeeded(self, turn: Turn) -> None:
        """A call was answered."""
        if turn == self._turn:
            self.failures_in_row = 0

    def failed(self, turn: Turn, now_s: float) -> bool:
        """A call failed. Returns whether this opened the breaker."""
        if turn != self._turn:
            return False
        self.failures_in_row += 1
        if self.failures_in_row < self._limit:
            return False
        self._open(now_s)
        return True

    def retry_in_s(self, now_s: float) -> float:
        """Seconds until a probe is due; 0 unless open."""
        return max(0.0, self._retry_at_s - now_s) if self.state is State.OPEN else 0.0

    def begin_probe(self, now_s: float, *, early: bool = False) -> bool:
        """Whether the one probe may start now; `early` does not wait for the delay."""
        if self.state is not State.OPEN or (self.retry_in_s(now_s) > 0 and not early):
            return False
        self._change(State.HALF_OPEN)
        return True

    def end_probe(self, now_s: float, *, worked: bool) -> None:
        """The probe ended: closed again, or open for longer."""
        assert self.state is State.HALF_OPEN, "a probe ended that never began"
        if worked:
            self.failures_in_row = 0
            self._delay_s = self._first_s
            self._change(State.CLOSED)
            return
        self.failures_in_row += 1
        self._delay_s = min(2 * self._delay_s, self._most_s)
        self._open(now_s)

    def _open(self, now_s: float) -> None:
        self._retry_at_s = now_s + self._delay_s
        self._change(State.OPEN)

    def _change(self, state: State) -> None:
        self.state = state
        self._turn = Turn(self._turn + 1)
