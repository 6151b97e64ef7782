"""Hands on the processes under test: client places that are filled again, and the server.

A place is filled with a new process as soon as the old one is gone. Both hands only ever poll, so
that striking goes on while a server starts; what they see that must not be goes into the story.
"""

import os
import random
import signal
import time
from collections import Counter
from types import FrameType

from kvkeep.testing.chaos_client import POINTS, ChaosClient, Habits, Layout, Orders
from kvkeep.testing.chaos_fork import forked
from kvkeep.testing.chaos_health import HealthWatch
from kvkeep.testing.chaos_ledger import Count, Row, Story
from kvkeep.testing.chaos_server import START_S, STOP_S, RealServer, ServerBroke

HANGS_S = 30.0  # one operation, however busy the machine
_DOOMED_SHARE = 0.5  # of new clients: they kill themselves at a point of their work
_MOST_PASSES = 60
_STOPPED_S = 1.2  # at most


class Place:
    """One client process after another."""

    def __init__(
        self, name: str, layout: Layout, habits: Habits, *, row: Row, story: Story
    ) -> None:
        self.pid = 0  # 0: nobody
        self.groups: list[int] = []  # of every process there was
        self._name, self._layout, self._habits = name, layout, habits
        self._row, self._story = row, story
        self._continues_s = 0.0  # when a stopped one goes on; 0: it is not stopped
        self._from_ns = 0  # a hang counts from here
        self._ending = False

    def fill(self, socket: str, rng: random.Random, *, doomed: bool = True) -> None:
        """A new process. Half of them carry their own end."""
        doom = rng.choice(POINTS) if doomed and rng.random() < _DOOMED_SHARE else ""
        session = f"{self._name}-{rng.randrange(3)}"  # sometimes the session of the one before
        passes, seed = rng.randint(1, _MOST_PASSES), rng.getrandbits(64)
        orders = Orders(socket, session, self._layout, self._habits, seed, doom, passes)
        self._row[Count.SINCE_NS] = 0
        self._from_ns, self._continues_s, self._ending = time.monotonic_ns(), 0.0, False
        self.pid = forked(lambda: _live(orders, self._row, self._story), self._story)
        self.groups.append(self.pid)

    def adopt(self, pid: int) -> None:
        """A process that was made elsewhere and is to end by itself."""
        self.pid, self._from_ns, self._ending = pid, time.monotonic_ns(), True

    def reap(self, counts: Counter[str]) -> None:
        """Notice its end, count it, and judge how it ended."""
        if not self.pid:
            return
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            self._judge_hang()
            return
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            counts["client_sigkill"] += 1
        elif code in (0, -signal.SIGTERM) and self._ending:  # the latter: before it could listen
            counts["client_sigterm"] += 1
        else:
            self._row.add(Count.FAILED)
            self._story.tell(f"{self._name}: a client ended with {code}")
        self.pid = 0

    def kill(self) -> None:
        """SIGKILL, stopped or not."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        """SIGTERM: it ends cleanly."""
        self._ending = True
        os.kill(self.pid, signal.SIGTERM)
        os.kill(self.pid, signal.SIGCONT)
        self._continues_s = 0.0

    def stop(self, for_s: float) -> None:
        """SIGSTOP; `go_on` continues it in time."""
        os.kill(self.pid, signal.SIGSTOP)
        self._continues_s = time.monotonic() + for_s

    def go_on(self, *, now: bool = False) -> None:
        """SIGCONT, when it is time."""
        if self.pid and self._continues_s and (now or time.monotonic() >= self._continues_s):
            os.kill(self.pid, signal.SIGCONT)
            self._continues_s, self._from_ns = 0.0, time.monotonic_ns()

    @property
    def strikable(self) -> bool:
        """It lives, runs, and nothing is under way with it."""
        return bool(self.pid) and not self._continues_s and not self._ending

    def _judge_hang(self) -> None:
        since_ns = self._row[Count.SINCE_NS]
        if not since_ns or self._continues_s:
            return
        if time.monotonic_ns() - max(since_ns, self._from_ns) > HANGS_S * 1e9:
            self._row.add(Count.FAILED)
            self._story.tell(f"{self._name}: an operation hangs for {HANGS_S} s")
            self.kill()


def _live(orders: Orders, row: Row, story: Story) -> None:
    """A client process, from its first to its last moment."""
    os.setpgid(0, 0)
    told: list[int] = []

    def tell(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    signal.signal(signal.SIGTERM, tell)
    client = ChaosClient(orders, row, story)
    client.work(lambda: bool(told))
    client.close()


class ServerHand:
    """The server: struck, and started again."""

    def __init__(self, server: RealServer, health: HealthWatch, story: Story) -> None:
        self.failed = 0
        self._server, self._health, self._story = server, health, story
        self._starts_s = 0.0  # when the next life begins; 0: one is under way
        self._continues_s = 0.0
        self._asked_to_stop_s = 0.0
        self._killed = False
        self._began_s = time.monotonic()
        self._counts_already = False

    @property
    def strikable(self) -> bool:
        """It serves, and nothing is under way with it."""
        busy = self._starts_s or self._continues_s or self._asked_to_stop_s or self._killed
        return not busy and self._counts_already

    def kill(self) -> None:
        """SIGKILL."""
        self._touch()
        self._killed = True
        self._server.send(signal.SIGKILL)

    def end(self) -> None:
        """SIGTERM."""
        self._touch()
        self._asked_to_stop_s = time.monotonic()
        self._server.send(signal.SIGTERM)

    def stop(self, for_s: float) -> None:
        """SIGSTOP for a while."""
        self._touch()
        self._server.send(signal.SIGSTOP)
        self._continues_s = time.monotonic() + for_s

    def look(self, rng: random.Random, counts: Counter[str]) -> None:
        """One round: continue, notice an end, start again, let /healthz count."""
        now_s = time.monotonic()
        if self._starts_s:
            if now_s >= self._starts_s:
                self._begin()
            return
        if self._continues_s and now_s >= self._continues_s:
            self._server.send(signal.SIGCONT)
            self._continues_s = 0.0
        code = self._server.ended()
        if code is not None:
            self._judge_end(code, counts)
            self._starts_s = now_s + rng.random() * 0.3
        elif self._asked_to_stop_s and now_s - self._asked_to_stop_s > STOP_S:
            self._fail(f"it did not stop within {STOP_S} s")
            self.kill()
        elif not self.busy and not self._counts_already:
            self._let_count(now_s)

    @property
    def busy(self) -> bool:
        """Something is under way with it."""
        return bool(self._starts_s or self._continues_s or self._asked_to_stop_s or self._killed)

    def _begin(self) -> None:
        self._server.start()
        self._began_s = time.monotonic()
        self._starts_s = self._asked_to_stop_s = 0.0
        self._killed = self._counts_already = False

    def _let_count(self, now_s: float) -> None:
        try:
            serving = self._server.serving()
        except ServerBroke:  # it has ended just now: judged at the next look
            return
        if serving:
            self._health.count(self._server.url, self._server.pid)
            self._counts_already = True
        elif now_s - self._began_s > START_S:
            self._fail(f"it does not serve {START_S} s after its start")
            self.kill()

    def _judge_end(self, code: int, counts: Counter[str]) -> None:
        if self._killed and code == -signal.SIGKILL:
            counts["server_sigkill"] += 1
        elif self._asked_to_stop_s and code == 0:
            counts["server_sigterm"] += 1
            if left := [path.name for path in self._server.socket.parent.iterdir()]:
                self._fail(f"a clean stop leaves {left} beside the socket")
        else:
            self._fail(f"it ended with {code}: {self._server.log_end()}")
        for line in self._server.broken():
            self._fail(line)

    def _touch(self) -> None:
        self._health.pause()
        self._counts_already = False

    def _fail(self, why: str) -> None:
        self.failed += 1
        self._story.tell(f"server, life {self._server.lives}: {why}")


def stopped_for_s(rng: random.Random) -> float:
    """How long something stays stopped: mostly short, sometimes beyond every patience."""
    return rng.random() ** 2 * _STOPPED_S + 0.01
