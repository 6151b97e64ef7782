"""Daemon threads for blocking I/O: one queue, results handed back to the event loop.

The executors of the standard library join their threads when the process ends; a thread that is
stuck in a dead file system would keep the process from ending. These are left behind instead.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from kvkeep.errors import BackendError

T = TypeVar("T")
_Job = tuple[Callable[[], Any], "asyncio.Future[Any]"]


class Pool:
    """`threads` daemon threads. Made, used and closed on one event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self.name = name
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._alive = threads
        self._ended = asyncio.Event()
        self._closed = False
        for number in range(threads):
            thread = threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            thread.start()

    def run(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run `work` in a thread. A future that is cancelled before its turn is never begun."""
        if self._closed:
            raise BackendError(f"{self.name} is closed")
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((work, future))
        return future

    async def close(self, wait_s: float) -> bool:
        """Take no more work, end what is queued; False when a thread is still stuck by then."""
        if not self._closed:
            self._closed = True
            for _ in range(self._alive):
                self._jobs.put(None)
        try:
            await asyncio.wait_for(self._ended.wait(), wait_s)
        except TimeoutError:
            return False
        return True

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, future = job
            if future.cancelled():
                continue
            try:
                self._tell(partial(_settle, future, work(), None))
            except Exception as error:  # whoever awaits the future gets it
                self._tell(partial(_settle, future, None, error))
            # Else this thread keeps the arena's memory and open files until its next job.
            del job, work, future
        self._tell(self._one_ended)

    def _tell(self, call: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _one_ended(self) -> None:
        self._alive -= 1
        if not self._alive:
            self._ended.set()


def _settle(future: "asyncio.Future[Any]", result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
