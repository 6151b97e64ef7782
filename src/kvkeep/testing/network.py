"""Connections without sockets: bytes arrive in order, later, cut at any point.

A closed end may lose the tail of what it sent, at any byte. Nothing is ever reordered within one
direction; two connections are independent of each other.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

_MOST_CUTS = 3


@dataclass(slots=True)
class Conditions:
    """How the network behaves now; the same object is seen by every connection."""

    delay_s: float = 0.001  # the most that one piece is late
    cut: float = 0.3  # how often a message arrives in several pieces


class Pipe:
    """One direction. `reader` gets each piece, then None when the other side has ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        conditions: Conditions,
        reader: Callable[[bytes | None], None],
    ) -> None:
        self._loop = loop
        self._rng = rng
        self._conditions = conditions
        self._reader = reader
        self._pieces: deque[bytes | None] = deque()
        self._last_s = 0.0  # when the newest piece arrives
        self._ended = False

    def write(self, data: bytes) -> None:
        """Bytes that will arrive unless the pipe is cut."""
        if self._ended:
            return
        points = [0, len(data)]
        if self._rng.random() < self._conditions.cut:
            cuts = self._rng.randint(1, _MOST_CUTS)
            points += [self._rng.randint(0, len(data)) for _ in range(cuts)]
        points.sort()
        for start, end in pairwise(points):
            if end > start:
                self._put(data[start:end])

    def end(self, *, cut: bool) -> None:
        """No more bytes; `cut`: what is under way is lost from a random byte on."""
        if self._ended:
            return
        self._ended = True
        if cut and self._pieces:
            sent = b"".join(piece for piece in self._pieces if piece is not None)
            self._pieces.clear()
            self._pieces.append(sent[: self._rng.randint(0, len(sent))])
        self._put(None)

    def _put(self, piece: bytes | None) -> None:
        late_s = self._rng.random() * self._conditions.delay_s
        self._last_s = max(self._last_s, self._loop.time() + late_s)
        self._pieces.append(piece)
        self._loop.call_at(self._last_s, self._arrive)

    def _arrive(self) -> None:
        if self._pieces:  # a cut leaves more timers than pieces
            self._reader(self._pieces.popleft())


class End:
    """One end of a connection; its owner sets `on_data` and `on_end`."""

    def __init__(self) -> None:
        self.open = True
        self.on_data: Callable[[bytes], None] = _ignore
        self.on_end: Callable[[], None] = _ignore_end
        self.descriptors: object = None  # what rode along with the welcome
        self._out: Pipe

    def attach(self, out: Pipe) -> None:
        """Where this end writes."""
        self._out = out

    def send(self, data: bytes) -> None:
        """Write, if the connection is still open here."""
        if self.open:
            self._out.write(data)

    def close(self, *, cut: bool = False) -> None:
        """End it from this side; `on_end` is not called here, but on the other side."""
        if self.open:
            self.open = False
            self._out.end(cut=cut)

    def arrived(self, piece: bytes | None) -> None:
        """The other side's bytes, or its end."""
        if not self.open:
            return
        if piece is None:
            self.close()
            self.on_end()
        else:
            self.on_data(piece)


def connection(
    loop: asyncio.AbstractEventLoop, rng: random.Random, conditions: Conditions
) -> tuple[End, End]:
    """Two ends of a new connection."""
    left, right = End(), End()
    left.attach(Pipe(loop, rng, conditions, right.arrived))
    right.attach(Pipe(loop, rng, conditions, left.arrived))
    return left, right


def _ignore(_: bytes) -> None:
    pass


def _ignore_end() -> None:
    pass
