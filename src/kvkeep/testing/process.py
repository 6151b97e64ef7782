"""A simulated process: what it runs stops with it, and the server's pidfd fires a little later."""

import asyncio
import random
from collections.abc import Callable

from kvkeep.errors import KVKeepError

_PIDFD_LATE_S = 0.2  # the most between a death and the server's hearing of it


class ProcessEnded(KVKeepError):
    """Raised inside what a dead process was doing."""


class Process:
    """Alive until `kill`; `on_death` hooks run at once, watchers later."""

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: random.Random, pid: int) -> None:
        self.pid = pid
        self.alive = True
        self.died_s = 0.0
        self._stopped_until_s = 0.0
        self.on_death: list[Callable[[], None]] = []
        self._loop = loop
        self._rng = rng
        self._watchers: list[Callable[[], None]] = []

    async def sleep(self, seconds: float) -> None:
        """Let time pass; raises ProcessEnded when the process died meanwhile."""
        await asyncio.sleep(seconds)
        while self.alive and (left_s := self._stopped_until_s - self._loop.time()) > 0:
            await asyncio.sleep(left_s)
        self.check()

    def stop(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while; messages that come meanwhile are still taken."""
        self._stopped_until_s = self._loop.time() + for_s

    @property
    def stopped(self) -> bool:
        """As the kernel shows it."""
        return self.alive and self._loop.time() < self._stopped_until_s

    def check(self) -> None:
        """Raise ProcessEnded when it is dead."""
        if not self.alive:
            raise ProcessEnded(f"process {self.pid}")

    def watch(self, ended: Callable[[], None]) -> None:
        """Call `ended` some time after the death, as a pidfd would."""
        if self.alive:
            self._watchers.append(ended)
        else:
            self._loop.call_soon(ended)

    def kill(self) -> None:
        """End at once, in the middle of whatever it does."""
        if not self.alive:
            return
        self.alive = False
        self.died_s = self._loop.time()
        for hook in self.on_death:
            hook()
        for watcher in self._watchers:
            self._loop.call_later(self._rng.random() * _PIDFD_LATE_S, watcher)
