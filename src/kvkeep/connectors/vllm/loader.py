"""Loads that run beside the engine's steps: on a thread of this process, or on a device stream.

A task holds the mapping while its bytes are copied, so unmapping waits for it. Its target blocks
stay the request's own until vLLM hears that the load ended (v1/core/sched/scheduler.py: an aborted
request in WAITING_FOR_REMOTE_KVS keeps them), so every task ends and is reported, cancelled or not.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from kvkeep.connectors.blocks import DeviceBlocks, Mark, ScatterJob
from kvkeep.connectors.vllm.meta import Handle, Load
from kvkeep.errors import MemoryRefused
from kvkeep.shm import Mapping

JOIN_S = 5.0
_log = logging.getLogger("vllm.kvkeep")


@dataclass(eq=False, slots=True)
class Task:
    """One load of one rank. `broken` and `stale` as in LoadReport; set when it has ended."""

    load: Load
    handles: list[Handle]
    mapping: Mapping | None
    beside: bool = False
    broken: set[int] = field(default_factory=set)
    stale: set[int] = field(default_factory=set)
    cancelled: bool = False  # chunks not begun are skipped
    asked_s: float = field(default_factory=time.perf_counter)
    begun_s: float = 0.0
    ended_s: float = 0.0

    @property
    def everything(self) -> set[int]:
        """Every index."""
        return set(range(len(self.load.blocks)))

    def jobs(self, chunks: int) -> Iterator[ScatterJob]:
        """The copies of the first chunks; only while the mapping is held."""
        assert self.mapping is not None
        address = self.mapping.address
        pairs = zip(self.handles[:chunks], self.load.blocks, strict=False)
        return ((address + offset, blocks) for (_, offset, _), blocks in pairs)

    def intact(self) -> int:
        """Chunks before the first whose generation is not its handle's."""
        assert self.mapping is not None
        for index, (slot, _, generation) in enumerate(self.handles):
            if self.mapping.generation(slot) != generation:
                return index
        return len(self.handles)

    def lose_from(self, index: int) -> None:
        """Chunks from this one on do not count: a prefix ends where its first chunk is lost."""
        self.stale |= set(range(index, len(self.load.blocks)))

    def end(self) -> "Task":
        """Note the time."""
        self.ended_s = time.perf_counter()
        return self


class Loader(Protocol):
    """Runs tasks in the order of their submission."""

    def submit(self, task: Task) -> None:
        """Begin it soon; it comes back from `take_ended`, whatever happens."""

    def cancel(self, requests: set[str]) -> None:
        """Skip what has not begun of these requests' loads; they still end."""

    def take_ended(self, wait_s: float = 0.0) -> list[Task]:
        """Tasks that ended since; waits for the first, if there is something to wait for."""

    def wait_for(self, requests: set[str]) -> None:
        """Return when no copy into these requests' blocks runs any more."""

    def close(self) -> None:
        """Cancel everything and return when nothing runs."""


class ThreadLoader:
    """For host memory: one thread. `run` copies and fills in the outcome; torch frees the GIL."""

    def __init__(self, run: Callable[[Task], None]) -> None:
        self._run = run
        self._change = threading.Condition()
        self._waiting: deque[Task] = deque()
        self._running: Task | None = None
        self._ended: list[Task] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        with self._change:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="kvkeep-loader", daemon=True
                )
                self._thread.start()
            self._waiting.append(task)
            self._change.notify_all()

    def cancel(self, requests: set[str]) -> None:
        with self._change:
            for task in (*self._waiting, *([self._running] if self._running else [])):
                task.cancelled = task.cancelled or task.load.request in requests

    def take_ended(self, wait_s: float = 0.0) -> list[Task]:
        with self._change:
            self._fail_if_dead()
            if wait_s and (self._waiting or self._running):
                self._change.wait_for(lambda: self._ended, wait_s)
            ended, self._ended = self._ended, []
            return ended

    def wait_for(self, requests: set[str]) -> None:
        def begun() -> bool:
            return any(t.load.request in requests for t in (*self._waiting, self._running) if t)

        with self._change:
            self._change.wait_for(lambda: not begun() or not self._alive())

    def close(self) -> None:
        with self._change:
            self._closed = True
            for task in (*self._waiting, *([self._running] if self._running else [])):
                task.cancelled = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    # ---- the thread

    def _work(self) -> None:
        _leave_the_engines_core()
        with torch.inference_mode():  # the engine's blocks may be inference tensors
            while (task := self._next()) is not None:
                lost = True
                try:
                    self._run(task)
                    lost = False
                finally:  # a bug in `run` ends this thread, but not the request
                    if lost:
                        task.stale = task.everything
                    self._done(task)

    def _next(self) -> Task | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closed)
            self._running = self._waiting.popleft() if self._waiting else None
            return self._running

    def _done(self, task: Task) -> None:
        with self._change:
            self._running = None
            self._ended.append(task.end())
            self._change.notify_all()

    def _alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _fail_if_dead(self) -> None:
        if self._waiting and not self._alive():
            for task in self._waiting:
                task.stale = task.everything
                self._ended.append(task.end())
            self._waiting.clear()


class StreamLoader:
    """For a device with streams: enqueued at once on a stream of its own, and asked when done.

    What is enqueued cannot be cancelled; it ends soon, and is then reported like any other.
    """

    def __init__(self, blocks: DeviceBlocks) -> None:
        self._blocks = blocks.twin()
        self._running: deque[tuple[Task, Mark, contextlib.ExitStack]] = deque()
        self._failed: list[Task] = []

    def submit(self, task: Task) -> None:
        assert task.mapping is not None
        task.begun_s = time.perf_counter()
        with contextlib.ExitStack() as hold:
            try:
                hold.enter_context(task.mapping.use())
                chunks = task.intact()
                task.lose_from(chunks)
                self._blocks.scatter(list(task.jobs(chunks)))
                self._running.append((task, self._blocks.mark(), hold.pop_all()))
            except MemoryRefused:
                task.stale = task.everything
                self._failed.append(task.end())
            except (ValueError, RuntimeError) as error:
                _log.error("kvkeep: loading request %s failed: %s", task.load.request, error)
                task.broken, task.stale = task.everything, set()
                self._blocks.synchronize()  # some of it may have been enqueued
                self._failed.append(task.end())

    def cancel(self, requests: set[str]) -> None:
        """Nothing: all of it has begun."""

    def take_ended(self, wait_s: float = 0.0) -> list[Task]:
        ended, self._failed = self._failed, []
        until = time.monotonic() + wait_s
        while self._running:
            if not self._running[0][1].query():
                if ended or time.monotonic() >= until:
                    break
                time.sleep(wait_s / 10)
                continue
            ended.append(self._end())
        return ended

    def wait_for(self, requests: set[str]) -> None:
        if any(task.load.request in requests for task, _, _ in self._running):
            self.synchronize()

    def close(self) -> None:
        self.synchronize()
        while self._running:
            self._failed.append(self._end())

    def synchronize(self) -> None:
        """Wait for everything that was enqueued."""
        for _, mark, _ in self._running:
            mark.synchronize()

    def _end(self) -> Task:
        task, _, hold = self._running.popleft()
        with hold:
            task.lose_from(task.intact())
        return task.end()


def loader_for(blocks: DeviceBlocks, run: Callable[[Task], None]) -> Loader:
    """The loader of the device that holds `blocks`."""
    return ThreadLoader(run) if blocks.device == "cpu" else StreamLoader(blocks)


def _leave_the_engines_core() -> None:
    """vLLM ties its worker thread to cores of its own; a thread made by it inherits them.

    The parent process is not tied, so its cores are what this one was given.
    """
    with contextlib.suppress(OSError):  # a parent that is gone, or no right to ask: stay
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
