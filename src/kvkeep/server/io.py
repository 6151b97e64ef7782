"""Carries out what the core decided about L2: questions, fetches, persists, deletions, alarms.

Decides nothing. Each effect becomes one call of a store, and its end one event. Memory handed to a
store stays the transfer's until its I/O has really returned: after a deadline the core is told that
it is late, and only later that it is over.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.breaker import State
from kvkeep.backends.checked import Store, Wanted
from kvkeep.backends.guarded import Late
from kvkeep.core import events as ev
from kvkeep.core.directory import Directory
from kvkeep.errors import BackendError
from kvkeep.server.overview import Log
from kvkeep.types import (
    HASH_BYTES,
    Fingerprint,
    IoOutcome,
    Namespace,
    ObjectKey,
)

DISCARDS = 16  # deletions under way at once
MOST_DISCARDS = 65_536  # and waiting; beyond, the oldest is not done, and counted
FORGET_AGAIN_S = 1.0
FORGET_ANSWER_S = 1.5  # then whoever asked is told that it is not done yet

Apply = Callable[[ev.Event], ev.Reply]
_Where = tuple[int, Fingerprint]  # backend, layout
Forgotten = Callable[[Namespace, bool], None]  # of this space; whether every backend could


class Io:
    """The stores of one server and what is under way to and from them."""

    def __init__(
        self, stores: Sequence[Store], arena: memoryview, *, clock: Callable[[], float], log: Log
    ) -> None:
        """`arena`: all of L1. `clock`: the one the core's times come from."""
        self.stores = list(stores)
        self._arena = arena
        self._clock = clock
        self._log = log
        self._apply: Apply
        self._forgotten: Forgotten
        self._unforgotten: Counter[_Where] = Counter()  # forgets that have not worked yet
        self._puts: dict[_Where, set[asyncio.Future[None]]] = {}  # under way, late ones too
        self._tasks: set[asyncio.Task[None]] = set()
        self.discards_lost = 0
        self._discards: deque[ev.Discard] = deque()  # not begun
        self._discarding = 0

    def attach(self, apply: Apply, forgotten: Forgotten | None = None) -> None:
        """Where events go, and the ends of ForgetStored; before the first effect."""
        self._apply = apply
        if forgotten is not None:
            self._forgotten = forgotten

    async def open(self) -> None:
        """Open every store, or none. Raises BackendError."""
        opened: list[Store] = []
        try:
            for store in self.stores:
                await store.open()
                opened.append(store)
        except BackendError:
            for store in opened:
                await store.close()
            raise

    async def close(self) -> None:
        """End every store; I/O that hangs is left behind."""
        self._discards.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*[store.close() for store in self.stores])

    def carry_out(self, effect: ev.IoEffect) -> None:
        """Begin it. An answer that is there at once is applied before this returns."""
        match effect:
            case ev.Probe():
                self._probe(effect)
            case ev.Alarm():
                self._ring(effect)
            case ev.Fetch():
                self._spawn(self._fetch(effect), lambda: ev.Fetched(effect.id, _failed(effect)))
            case ev.Persist():
                self._spawn(self._persist(effect), lambda: ev.Persisted(effect.id, _failed(effect)))
            case ev.Discard():
                self._discards.append(effect)
                if len(self._discards) > MOST_DISCARDS:
                    self._discards.popleft()
                    self.discards_lost += 1
                self._discard_more()
            case ev.ForgetStored():
                where = [(n, effect.space.fingerprint) for n in range(len(self.stores))]
                self._unforgotten.update(where)  # at once: nothing of it is used from now on
                self._spawn(self._forget(effect.space, where))

    def _ring(self, alarm: ev.Alarm) -> None:
        delay_s = max(0.0, alarm.at_s - self._clock())
        loop = asyncio.get_running_loop()
        loop.call_later(delay_s, self._apply, ev.Expire(alarm.ticket))

    # ---- questions

    def _probe(self, effect: ev.Probe) -> None:
        keys = _keys(effect.objects, effect.hashes)
        answers: list[Sequence[bool] | Awaitable[Sequence[bool]]] = [
            store.contains(effect.space, keys)
            if self._may_use(number, effect.space)
            else [False] * len(keys)
            for number, store in enumerate(self.stores)
        ]
        if any(isinstance(answer, Awaitable) for answer in answers):
            failed = ev.Probed(effect.ticket, (0,) * (len(effect.hashes) // HASH_BYTES), ~0)
            self._spawn(self._probe_later(effect, answers), lambda: failed)
            self._ring(ev.Alarm(effect.ticket, effect.deadline_s))
        else:
            self._probed(effect, [a for a in answers if not isinstance(a, Awaitable)])

    async def _probe_later(
        self, effect: ev.Probe, answers: list[Sequence[bool] | Awaitable[Sequence[bool]]]
    ) -> None:
        """Ask those that need time all at once."""
        slow = [a for a in answers if isinstance(a, Awaitable)]
        told = iter(await asyncio.gather(*slow))
        self._probed(effect, [next(told) if isinstance(a, Awaitable) else a for a in answers])

    def _probed(self, effect: ev.Probe, answers: Sequence[Sequence[bool]]) -> None:
        """A backend holds a chunk when it has the object of every row."""
        rows, chunks = len(effect.objects.rows), len(effect.hashes) // HASH_BYTES
        holders = [0] * chunks
        down = 0
        for number, (store, held) in enumerate(zip(self.stores, answers, strict=True)):
            if store.health().state is not State.CLOSED:
                down |= 1 << number
            for chunk in range(chunks) if True in held else ():
                if all(held[chunk * rows : (chunk + 1) * rows]):
                    holders[chunk] |= 1 << number
        self._apply(ev.Probed(effect.ticket, tuple(holders), down))

    # ---- transfers

    async def _fetch(self, effect: ev.Fetch) -> None:
        try:
            outcomes = await self.stores[effect.backend].get(self._wanted(effect))
        except Late as late:
            self._apply(ev.FetchLate(effect.id))
            await asyncio.wait([late.settled])
            outcomes = [IoOutcome.TIMEOUT] * len(effect.offsets)
        self._apply(ev.Fetched(effect.id, tuple(outcomes)))

    async def _persist(self, effect: ev.Persist) -> None:
        where = effect.backend, effect.space.fingerprint
        outcomes: Sequence[IoOutcome] = [IoOutcome.REFUSED] * len(effect.offsets)
        if where not in self._unforgotten:
            ended = asyncio.get_running_loop().create_future()
            puts = self._puts.setdefault(where, set())
            puts.add(ended)  # from here on a forget waits for it
            try:
                outcomes = await self._put(effect)
            finally:
                ended.set_result(None)
                puts.discard(ended)
        self._apply(ev.Persisted(effect.id, tuple(outcomes)))

    async def _put(self, effect: ev.Persist) -> Sequence[IoOutcome]:
        """Unless it is there already, and can be read."""
        store = self.stores[effect.backend]
        if all(await store.holds(effect.space, _keys(effect.objects, effect.chunk))):
            return [IoOutcome.OK] * len(effect.offsets)
        try:
            return await store.put(self._wanted(effect))
        except Late as late:
            await asyncio.wait([late.settled])
            return [IoOutcome.TIMEOUT] * len(effect.offsets)

    def _discard_more(self) -> None:
        while self._discards and self._discarding < DISCARDS:
            self._discarding += 1
            self._spawn(self._discard_one(self._discards.popleft()))

    async def _discard_one(self, effect: ev.Discard) -> None:
        try:
            await self._discard(effect)
        finally:
            self._discarding -= 1
            self._discard_more()

    async def _discard(self, effect: ev.Discard) -> None:
        keys = _keys(effect.objects, effect.hashes)
        for store in self.stores:
            try:
                await store.delete(effect.space, keys, broken=effect.broken)
            except BackendError as error:
                self._log("l2_delete_failed", level="warning", backend=store.name, why=str(error))

    async def _forget(self, space: Namespace, where: list[_Where]) -> None:
        """Until a backend could, nothing of the layout is asked of it; tried until it works."""
        first = asyncio.ensure_future(self._forget_in(where, space))
        try:
            await asyncio.wait([first], timeout=FORGET_ANSWER_S)
            # Another forget of it may be under way: then nobody is told that it is done.
            self._forgotten(space, not any(w in self._unforgotten for w in where))
            left = await first
        finally:
            first.cancel()
        while left:
            await asyncio.sleep(FORGET_AGAIN_S)
            left = await self._forget_in(left, space, again=True)

    async def _forget_in(
        self, where: list[_Where], space: Namespace, *, again: bool = False
    ) -> list[_Where]:
        """Try it; where it did not work."""
        done = await asyncio.gather(*[self._forget_one(w, space, again=again) for w in where])
        return [w for w, worked in zip(where, done, strict=True) if not worked]

    async def _forget_one(self, where: _Where, space: Namespace, *, again: bool) -> bool:
        store = self.stores[where[0]]
        if puts := self._puts.get(where):
            await asyncio.wait(puts)  # what is being written would come back
        try:
            await store.forget(space)
        except BackendError as error:
            if not again:
                why = str(error)
                self._log("l2_forget_failed", level="warning", backend=store.name, why=why)
            return False
        self._unforgotten[where] -= 1
        self._unforgotten += Counter()  # without what is zero
        if again:
            self._log("l2_forgot_late", backend=store.name)
        return True

    def takes_puts(self) -> bool:
        """Whether some backend may take something now."""
        return any(
            store.health().state is State.CLOSED and not store.usage().read_only
            for store in self.stores
        )

    def statuses(self) -> list[dict[str, Any]]:
        """One status of each store. `forgetting`: layouts that it still has to forget."""
        left = [number for number, _ in self._unforgotten]  # layouts, once each
        return [
            {**store.status(), "forgetting": left.count(number)}
            for number, store in enumerate(self.stores)
        ]

    def _may_use(self, number: int, space: Namespace) -> bool:
        return (number, space.fingerprint) not in self._unforgotten

    def _wanted(self, effect: ev.Transfer) -> list[Wanted]:
        """The arena's memory for each object of the chunk, in whole pages."""
        wanted: list[Wanted] = []
        for key, (_, _, length), offset in zip(
            _keys(effect.objects, effect.chunk), effect.objects.rows, effect.offsets, strict=True
        ):
            end = offset + -(-length // PAGE_BYTES) * PAGE_BYTES
            payload = self._arena[offset:end]
            wanted.append(Wanted(effect.space, key, payload, length, effect.depth))
        return wanted

    # ---- tasks

    def _spawn(
        self,
        work: Coroutine[Any, Any, None],
        otherwise: Callable[[], ev.Event] | None = None,
    ) -> None:
        """Run in the background. `otherwise`: what to tell the core if it breaks (our bug)."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled() or task.exception() is None:
                return
            self._log("io_broken", level="error", why=repr(task.exception()))
            if otherwise is not None:
                self._apply(otherwise())

        task.add_done_callback(ended)


def _keys(objects: ev.ObjectRows, hashes: bytes) -> list[ObjectKey]:
    """The object keys of packed chunk hashes, chunk by chunk, row by row."""
    world, rows = objects.world, objects.rows
    return [
        ObjectKey(chunk, world, rank, group)
        for chunk in Directory.split(hashes)
        for rank, group, _ in rows
    ]


def _failed(effect: ev.Transfer) -> tuple[IoOutcome, ...]:
    return (IoOutcome.ERROR,) * len(effect.offsets)
