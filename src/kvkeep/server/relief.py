"""When readers hold the memory that others need: finds out who is stopped, and tells the core.

Which reads end is decided in core/pressure.py. A process is stopped when the kernel says so; that
is looked at only under pressure, for some sessions at a time.
"""

from collections.abc import Callable, Mapping
from itertools import islice

from kvkeep.core import events as ev
from kvkeep.core.pressure import Pressure
from kvkeep.server.operators import Client
from kvkeep.types import PeerId

EVERY_S = 0.05
_SESSIONS = 16  # looked at in one go
_STOPPED = (b"T", b"t")


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped (SIGSTOP, a debugger); False when nobody can say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            after_name = stat.read().rpartition(b")")[2].split(maxsplit=1)
    except OSError:
        return False
    return after_name[:1] != [] and after_name[0] in _STOPPED


class Relief:
    """Asks the core to end reads, not too often, while somebody lacks memory."""

    def __init__(
        self,
        pressure: Pressure,
        clients: Mapping[PeerId, Client],
        clock: Callable[[], float],
        *,
        stopped: Callable[[int], bool] = is_stopped,
    ) -> None:
        self._pressure = pressure
        self._clients = clients
        self._clock = clock
        self._is_stopped = stopped
        self._asked_s = -EVERY_S
        self._turn = 0

    def order(self) -> ev.Relieve | None:
        """What to tell the core now, if anything."""
        if not self._pressure.felt():
            return None
        now_s = self._clock()
        if now_s - self._asked_s < EVERY_S:
            return None
        self._asked_s = now_s
        return ev.Relieve(frozenset(self._stopped_sessions()))

    def _stopped_sessions(self) -> list[str]:
        """Of the sessions whose turn it is, those of which every process is stopped."""
        readers = list(self._pressure.readers())
        if not readers:
            return []
        first = self._turn % len(readers)
        self._turn = first + _SESSIONS
        looked_at = set(islice(readers, first, first + _SESSIONS))
        pids: dict[str, set[int]] = {}
        for client in self._clients.values():
            if client.session in looked_at and client.pid:
                pids.setdefault(client.session, set()).add(client.pid)
        return [name for name, of in pids.items() if all(map(self._is_stopped, of))]
