"""Carries on what the core does in slices, and answers those who wait for its end.

Clearing, forgetting and draining look at every chunk: a slice of about a millisecond at a time, and
between two slices the loop serves everybody. Without a loop (`later`) all of it happens at once.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvkeep.core import events as ev
from kvkeep.core.directory import Directory
from kvkeep.core.leases import Session
from kvkeep.server.operators import Client
from kvkeep.server.overview import Log
from kvkeep.server.watchdog import Watchdog
from kvkeep.types import Fingerprint, Namespace, PeerId
from kvkeep.wire import messages as m

SLICE = 1_000  # looks at chunks in one slice
MOST_WAITING = 64  # calls that wait for the end of a forget, per layout

Later = Callable[[Callable[[], None]], object]


class Served(Protocol):
    """What the sweeps go through."""

    directory: Directory
    watchdog: Watchdog
    backends: tuple[str, ...]
    counters: Counter[str]

    @property
    def clients(self) -> Mapping[PeerId, Client]:
        """Every connection."""

    def apply(self, event: ev.Event) -> ev.Reply:
        """Hand an event to the core."""


@dataclass(slots=True)
class _Forget:
    """One call that waits until L1 and L2 have forgotten."""

    client: Client
    seq: int
    chunks: int | None = None  # that were in L1, once they have left
    done: bool | None = None  # whether L2 could, once that is known


class Sweeps:
    """Orders under way, of one server epoch."""

    def __init__(
        self, served: Served, log: Log, *, later: Later | None, rested: Callable[[], None]
    ) -> None:
        """`later` runs something when the loop has served what is ready. `rested`: all is done."""
        self.slice = SLICE
        self._served = served
        self._log = log
        self._later = later
        self._rested = rested
        self._scheduled = False
        self._then: dict[int, Callable[[int], None]] = {}  # by sweep
        self._forgetting: dict[Fingerprint, list[_Forget]] = {}

    # ---- slices

    @property
    def sliced(self) -> bool:
        """Whether work is done in slices at all."""
        return self._later is not None

    def carry_on(self) -> None:
        """Have the next slice run, if there is one."""
        if self._later is not None and not self._scheduled and self._served.directory.busy:
            self._scheduled = True
            self._later(self._slice)

    def _slice(self) -> None:
        self._scheduled = False
        with self._served.watchdog.entry("sweep"):
            if self._served.apply(ev.Sweep(self.slice)) == ev.Done(0):
                self._rested()

    def swept(self, effect: ev.Swept) -> None:
        """An order is through."""
        then = self._then.pop(effect.sweep, None)
        if then is not None:
            then(effect.chunks)

    # ---- orders

    def clear(self, *, force: bool, then: Callable[[int], None]) -> None:
        """Empty L1; `then` gets the number of chunks, now or later."""
        self._begin(ev.Clear(force, self.sliced), then)

    def _begin(self, event: ev.Clear | ev.Forget, then: Callable[[int], None]) -> None:
        reply = self._served.apply(event)
        if isinstance(reply, ev.Sweeping):
            self._then[reply.sweep] = then
        else:
            assert isinstance(reply, ev.Done)
            then(reply.changed)

    def forget(self, client: Client, message: m.Forget, session: Session | None) -> None:
        """The answer comes when L1 and L2 have forgotten, or L2 could not."""
        ready = session is not None and session.ready
        waiting = self._forgetting.get(session.fingerprint, ()) if session is not None else ()
        if session is None or not ready or len(waiting) >= MOST_WAITING:
            self._served.counters["forget_refused"] += ready
            client.link.send(m.Forgotten(message.seq, 0, done=False))
            return
        asked = _Forget(client, message.seq)
        self._forgetting.setdefault(session.fingerprint, []).append(asked)

        def counted(chunks: int) -> None:
            self._log("forgotten", session=client.session, chunks=chunks)
            asked.chunks = chunks
            self._answer(asked)

        space = session.space(None)
        self._begin(ev.Forget(client.session, self.sliced), counted)
        if not self._served.backends:
            self.forgotten(space, True)

    def forgotten(self, space: Namespace, done: bool) -> None:
        """L2 has forgotten the layout, or could not."""
        for asked in self._forgetting.pop(space.fingerprint, ()):
            asked.done = done
            self._answer(asked)

    def _answer(self, asked: _Forget) -> None:
        if asked.chunks is None or asked.done is None:
            return
        if asked.client.peer in self._served.clients:
            asked.client.link.send(m.Forgotten(asked.seq, asked.chunks, asked.done))
