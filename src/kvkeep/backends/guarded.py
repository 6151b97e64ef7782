"""Deadlines and the breaker around a backend: a call into L2 ends in time, whatever L2 does.

A call that passes its deadline raises `Late`; the I/O itself is never cancelled, since a thread may
still touch the memory it was given, and `Late.settled` tells when it has really ended. Enough
failures in a row open the breaker: then nothing is sent, and a probe of our own finds out when the
backend works again. A deadline that is noticed long after it was due means that this process or its
machine stood still: the backend then gets a moment more before it is blamed.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from kvkeep.backends.base import Backend, Item, Usage
from kvkeep.backends.breaker import Breaker, State, Turn
from kvkeep.errors import BackendError
from kvkeep.types import IoOutcome, Namespace, ObjectKey

STOOD_STILL_S = 0.5  # a timer this late is not the backend's fault
GRACE_S = 1.0
CLOSE_TIMEOUT_S = 1.0

T = TypeVar("T")
Log = Callable[..., None]


class Late(BackendError):
    """The deadline passed. `settled` is done when the I/O no longer touches any memory."""

    def __init__(self, text: str, settled: "asyncio.Future[None]") -> None:
        super().__init__(text)
        self.settled = settled


class Unavailable(BackendError):
    """The breaker is open: nothing was sent."""


class GuardSettings(msgspec.Struct, frozen=True):
    """Deadlines, and when the breaker opens."""

    get_timeout_s: float = 2.0
    put_timeout_s: float = 10.0
    lookup_timeout_s: float = 0.5
    breaker_failures: int = 5
    breaker_open_s: float = 5.0
    breaker_open_most_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Health:
    """How a backend is doing, for readiness and status."""

    state: State
    why: str  # the last failure while the breaker is not closed
    stuck: int  # calls past their deadline whose I/O has not returned
    failures_in_row: int
    retry_in_s: float


class Guarded:
    """A backend with deadlines and a breaker; raises Late and Unavailable besides its errors."""

    def __init__(self, raw: Backend, *, settings: GuardSettings, log: Log) -> None:
        self._raw = raw
        self._settings = settings
        self._log = log
        self._breaker = Breaker(
            failures=settings.breaker_failures,
            open_s=settings.breaker_open_s,
            open_most_s=max(settings.breaker_open_s, settings.breaker_open_most_s),
        )
        self._why = ""
        self._stuck = 0
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None  # since the breaker first opened
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.Task[None] | None = None
        self._hung: asyncio.Future[None] | None = None  # done when a hanging probe has returned
        self.name = raw.name
        self.url = raw.url

    def health(self) -> Health:
        """Immediate, and from any thread."""
        breaker = self._breaker
        retry_in_s = breaker.retry_in_s(self._loop.time()) if self._loop is not None else 0.0
        why = "" if breaker.closed else self._why
        return Health(breaker.state, why, self._stuck, breaker.failures_in_row, retry_in_s)

    async def open(self) -> None:
        """The backend's own open; it says itself what is wrong."""
        await self._raw.open()

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        """All False while the breaker is open."""
        if not self._breaker.closed or self._closing:
            return [False] * len(keys)
        turn = self._breaker.enter()
        try:
            answer = self._raw.contains(space, keys)
        except (OSError, BackendError) as error:
            self._failed(turn, f"contains: {error}")
            raise
        if not isinstance(answer, Awaitable):
            return answer
        return self._send(turn, "contains", _awaited(answer), self._settings.lookup_timeout_s)

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        """Within the deadline for reading."""
        turn = self._enter()
        return await self._send(turn, "get", self._raw.get(items), self._settings.get_timeout_s)

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        """Within the deadline for writing. FULL and REFUSED are answers, no failures."""
        turn = self._enter()
        return await self._send(turn, "put", self._raw.put(items), self._settings.put_timeout_s)

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        """Within the deadline for writing."""
        turn = self._enter()
        call = self._raw.delete(space, keys, broken=broken)
        await self._send(turn, "delete", call, self._settings.put_timeout_s)

    async def forget(self, space: Namespace) -> None:
        """Within the deadline for writing."""
        turn = self._enter()
        await self._send(turn, "forget", self._raw.forget(space), self._settings.put_timeout_s)

    async def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        """Each step within the deadline for reading."""
        steps = self._raw.names()
        while True:
            turn = self._enter()
            call = _next(steps)
            name = await self._send(turn, "names", call, self._settings.get_timeout_s)
            if name is None:
                return
            yield name

    async def probe(self) -> None:
        """The backend's own, within the deadline for reading; does not move the breaker."""
        await self._bounded("probe", self._raw.probe(), self._settings.get_timeout_s)

    def usage(self) -> Usage:
        """The backend's own."""
        return self._raw.usage()

    async def close(self) -> None:
        """End within a second or so; what hangs is left behind."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._probe is not None:
            self._probe.cancel()  # only the waiting: the raw probe runs on
        try:
            await self._bounded("close", self._raw.close(), CLOSE_TIMEOUT_S)
        except Late as late:
            self._log("backend_left", level="warning", backend=self.name, why=str(late))

    # ---- one call

    def _enter(self) -> Turn:
        if self._closing:
            raise Unavailable(f"{self.name} is closed")
        if not self._breaker.closed:
            raise Unavailable(f"{self.name} does not work ({self._why}); it is tried again soon")
        return self._breaker.enter()

    async def _send(self, turn: Turn, what: str, call: Coroutine[Any, Any, T], limit_s: float) -> T:
        """One call that the breaker counts."""
        try:
            result = await self._bounded(what, call, limit_s)
        except Late as late:
            self._failed(turn, str(late))
            raise
        except (OSError, BackendError) as error:
            self._failed(turn, f"{what}: {error}")
            raise
        self._breaker.succeeded(turn)
        return result

    async def _bounded(self, what: str, call: Coroutine[Any, Any, T], limit_s: float) -> T:
        """The call's result, or Late. Cancelling the caller leaves the call running as well."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(call, name=f"{self.name} {what}")
        task.add_done_callback(_read)
        due_s = loop.time() + limit_s
        grace = True
        while True:
            done, _ = await asyncio.wait((task,), timeout=max(0.0, due_s - loop.time()))
            if done:
                return self._result(what, task)
            now_s = loop.time()
            if not grace or now_s - due_s <= STOOD_STILL_S:
                raise self._late(f"{what} did not end within {limit_s:g} s", task)
            grace, due_s = False, now_s + GRACE_S

    def _result(self, what: str, task: "asyncio.Task[T]") -> T:
        if task.cancelled():
            raise BackendError(f"{self.name}: {what} was cancelled inside the backend")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, (OSError, BackendError)) or not isinstance(error, Exception):
            raise error
        # A plug-in's own kinds of errors end here, where it is known which backend it was.
        raise BackendError(f"{self.name}: {what} raised {type(error).__name__}: {error}") from error

    def _late(self, text: str, task: "asyncio.Task[T]") -> Late:
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stuck += 1

        def ended(_: "asyncio.Task[T]") -> None:
            self._stuck -= 1
            if not settled.done():
                settled.set_result(None)

        task.add_done_callback(ended)
        return Late(f"{self.name}: {text}", settled)

    # ---- failures and the probe

    def _failed(self, turn: Turn, why: str) -> None:
        self._why = why
        now_s = asyncio.get_running_loop().time()
        if not self._breaker.failed(turn, now_s) or self._closing:
            return
        retry_in_s = self._breaker.retry_in_s(now_s)
        self._log(
            "backend_lost", level="warning", backend=self.name, why=why, retry_in_s=retry_in_s
        )
        self._arm()

    def _arm(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        if not self._closing:
            self._timer = loop.call_later(self._breaker.retry_in_s(loop.time()), self._start_probe)

    def _start_probe(self, *, early: bool = False) -> None:
        if self._closing or (self._hung is not None and not self._hung.done()):
            return  # a hanging probe starts the next one when it returns
        loop = asyncio.get_running_loop()
        if self._breaker.begin_probe(loop.time(), early=early):
            self._probe = loop.create_task(self._run_probe(), name=f"{self.name} breaker")
        elif self._breaker.state is State.OPEN:
            self._arm()

    async def _run_probe(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self.probe()
        except (OSError, BackendError) as error:
            self._why = str(error)
            self._breaker.end_probe(loop.time(), worked=False)
            if isinstance(error, Late):
                self._hung = error.settled
                self._hung.add_done_callback(lambda _: self._start_probe(early=True))
            self._arm()
        else:
            self._breaker.end_probe(loop.time(), worked=True)
            self._log("backend_back", backend=self.name)


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer


async def _next(steps: AsyncIterator[T]) -> T | None:
    return await anext(steps, None)


def _read(task: "asyncio.Task[Any]") -> None:
    """Nobody may be waiting any more: an error that is not read would be reported by asyncio."""
    if not task.cancelled():
        task.exception()
