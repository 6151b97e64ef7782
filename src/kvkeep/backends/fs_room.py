"""Who may write now: bytes are reserved before a write begins, and one change at a time per name.

`used_bytes` counts everything on disk and everything about to be: objects, files being written or
not yet unlinked, quarantine and trash. It never passes the capacity by a reservation; what is too
much already (a smaller capacity than last time) is evicted first.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable


class Room:
    """Bytes of one directory. `evict` starts the removal of the least valuable thing.

    It returns the bytes that will come back through `left`, 0 when nothing may go.
    """

    def __init__(self, capacity_bytes: int, evict: Callable[[], int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._evict = evict
        self._leaving_bytes = 0  # of used_bytes: on its way out
        self._writing = 0
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()

    async def reserve(self, size_bytes: int) -> bool:
        """Take room for one write, evicting for it; False: there is none to be had.

        Each True is followed by one `written` or `unwritten`.
        """
        if size_bytes > self.capacity_bytes:
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, future))
        self.settle()
        try:
            return await future
        except asyncio.CancelledError:
            if _is_granted(future):
                self.unwritten(size_bytes)
            raise

    def written(self) -> None:
        """The bytes of a reservation are an object now."""
        self._writing -= 1
        self.settle()

    def unwritten(self, size_bytes: int) -> None:
        """The write did not happen, and nothing of it is left."""
        self._writing -= 1
        self.freed(size_bytes)

    def found(self, size_bytes: int) -> None:
        """Something was on disk already."""
        self.used_bytes += size_bytes

    def freed(self, size_bytes: int) -> None:
        """Something is gone from the disk."""
        self.used_bytes -= size_bytes
        self.settle()

    def leaving(self, size_bytes: int) -> None:
        """Something is on its way out: worth waiting for; `left` follows."""
        self._leaving_bytes += size_bytes

    def left(self, size_bytes: int) -> None:
        """What was leaving is gone from the disk."""
        self._leaving_bytes -= size_bytes
        self.freed(size_bytes)

    def stayed(self, size_bytes: int) -> None:
        """What was leaving cannot be removed, and counts on; something else may go instead."""
        self._leaving_bytes -= size_bytes
        self.settle()

    def stuck(self, size_bytes: int, error: Exception) -> None:
        """What was leaving could not be removed: those who wait for it hear why."""
        self._leaving_bytes -= size_bytes
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)

    def make_room(self, size_bytes: int) -> int:
        """Evict until that much is on its way out or nothing may go; returns how much is."""
        start = self._leaving_bytes
        while self._leaving_bytes - start < size_bytes:
            evicted = self._evict()
            if not evicted:
                break
            self._leaving_bytes += evicted
        return self._leaving_bytes - start

    def settle(self) -> None:
        """Answer those who wait, in their order, as far as the room goes."""
        while self._waiting:
            size_bytes, future = self._waiting[0]
            if future.done():  # cancelled
                self._waiting.popleft()
            elif self.used_bytes + size_bytes <= self.capacity_bytes:
                self._waiting.popleft()
                self.used_bytes += size_bytes
                self._writing += 1
                future.set_result(True)
            elif self._is_coming(size_bytes):
                return
            else:
                self._waiting.popleft()
                future.set_result(False)

    def _is_coming(self, size_bytes: int) -> bool:
        missing = self.used_bytes - self._leaving_bytes + size_bytes - self.capacity_bytes
        if missing > 0:
            missing -= self.make_room(missing)
        # An object that is being written now can be evicted afterwards.
        return missing <= 0 or self._leaving_bytes > 0 or self._writing > 0


def _is_granted(future: "asyncio.Future[bool]") -> bool:
    done = future.done() and not future.cancelled()
    return done and future.exception() is None and future.result()


class Turns:
    """One at a time per name, in the order of asking."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def busy(self, name: Hashable) -> bool:
        """Whether somebody has the turn."""
        return name in self._queues

    def take_now(self, name: Hashable) -> None:
        """The turn of a name that is not busy."""
        assert name not in self._queues
        self._queues[name] = deque()

    async def take(self, name: Hashable) -> None:
        """Wait for the turn; `leave` ends it."""
        if name not in self._queues:
            self.take_now(name)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues[name].append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.leave(name)
            raise

    def leave(self, name: Hashable) -> None:
        """End the turn; the next one has it at once."""
        queue = self._queues[name]
        while queue:
            future = queue.popleft()
            if not future.done():
                future.set_result(None)
                return
        del self._queues[name]
