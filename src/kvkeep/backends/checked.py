"""What the server uses of an L2: objects go in with a checksum, and come out right or not at all.

A `Store` writes the header page, and when reading compares it with what was asked and the payload
with its checksum. Anything else than exactly the stored object is a named outcome, is counted, and
is deleted as broken, so that the next store writes it anew. With a `Sealer` objects are encrypted,
and the seal's tag takes the place of the checksum. What cannot be read here though nothing is wrong
with it (no key, or not encrypted where it must be) is a miss, is counted apart, and stays: the next
store writes over it. Because of these, `holds` is more careful than `contains`. Work on large
payloads is done off the event loop.
"""

import asyncio
import mmap
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from kvkeep.backends import header as pages
from kvkeep.backends import jobs
from kvkeep.backends.base import ABSENT, HEADER_BYTES, PAGE_BYTES, Item, Tenanted, Usage
from kvkeep.backends.breaker import State
from kvkeep.backends.encrypted import Sealer
from kvkeep.backends.guarded import Guarded, Health, Late, Log, Unavailable
from kvkeep.backends.header import Header, HeaderProblem, Verdict
from kvkeep.backends.known import Known
from kvkeep.backends.measured import Measured
from kvkeep.errors import BackendError
from kvkeep.types import IoOutcome, Namespace, ObjectKey

INLINE_BYTES = 256 << 10  # hashing this much takes the loop some tens of microseconds
INLINE_SEALED_BYTES = 64 << 10  # and so does encrypting this much
DELETE_WAIT_S = 0.5  # a reader does not wait longer than this for the removal of a broken object
PAGES_AT_ONCE = 64
SAID_A_MINUTE = 10  # lines about broken objects
POOL_WAIT_S = 10.0  # a put waits so long for memory to encrypt into

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object to move. `payload` starts at a page and has whole pages; it stays the caller's."""

    space: Namespace
    key: ObjectKey
    payload: memoryview
    length: int  # exact bytes of the object
    depth: int = 0


class HeaderPages:
    """Page-aligned memory for headers, used again and again."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        """One page, with no header in it."""
        if not self._free:
            block = memoryview(mmap.mmap(-1, PAGES_AT_ONCE * HEADER_BYTES))
            starts = range(0, len(block), HEADER_BYTES)
            self._free.extend(block[start : start + HEADER_BYTES] for start in starts)
        page = self._free.pop()
        page[: len(pages.MAGIC)] = bytes(len(pages.MAGIC))  # an earlier header must not be found
        return page

    def give_back(self, items: Iterable[Item]) -> None:
        """The pages of these items; nobody touches them any more."""
        self._free.extend(item.header for item in items)


class Store:
    """One L2, verified. `offload` runs a checksum elsewhere; the default is the loop's threads."""

    def __init__(
        self,
        backend: Measured,
        *,
        guard: Guarded,
        sealer: Sealer | None = None,
        offload: jobs.Offload | None = None,
        wall: Callable[[], float] = time.time,
        log: Log | None = None,
    ) -> None:
        self._log = log
        self._said_s: deque[float] = deque(maxlen=SAID_A_MINUTE)
        self._backend = backend
        self._guard = guard
        self._offload = offload or jobs.in_thread
        self._wall = wall
        self._pages = HeaderPages()
        self._broken: Counter[str] = Counter()
        self._sealer = sealer
        self._sealed = 0
        self._known = Known(is_doubtful=sealer is not None)
        self._too_large_bytes = 0  # the largest object that can never be encrypted
        self._last_error = ""
        self._removals: set[asyncio.Task[None]] = set()
        self.name = backend.name
        self.url = backend.url
        self.backend_bytes = 0  # what the backend takes for buffers of its own
        self.tenanted: Tenanted | None = None  # the backend, where it keeps a limit per salt

    async def open(self) -> None:
        """Raises BackendError, naming the place and the fix."""
        try:
            await self._backend.open()
        except OSError as error:
            raise self._named(error) from error

    async def close(self) -> None:
        """End; what hangs is left behind."""
        if self._removals:
            await asyncio.wait(self._removals, timeout=DELETE_WAIT_S)
        try:
            await self._backend.close()
        except (OSError, BackendError) as error:
            self._last_error = str(error)

    def contains(
        self, space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool] | Awaitable[Sequence[bool]]:
        """Which objects are there; all False when L2 cannot say. Never raises."""
        try:
            answer = self._backend.contains(space, keys)
        except (OSError, BackendError) as error:
            self._last_error = str(error)
            return [False] * len(keys)
        if isinstance(answer, Awaitable):
            return self._later(answer, space, keys)
        return self._known.of_use(space, keys, answer)

    async def holds(self, space: Namespace, keys: Sequence[ObjectKey]) -> Sequence[bool]:
        """Which objects are there for sure, so that they need not be written. Never raises.

        Where some of what is there may be unreadable, that is only what this store wrote or read.
        """
        there = self.contains(space, keys)
        if isinstance(there, Awaitable):
            there = await there
        return self._known.vouched(space, keys, there)

    async def _later(
        self, answer: Awaitable[Sequence[bool]], space: Namespace, keys: Sequence[ObjectKey]
    ) -> Sequence[bool]:
        try:
            return self._known.of_use(space, keys, await answer)
        except (OSError, BackendError) as error:
            self._last_error = str(error)
            return [False] * len(keys)

    async def get(self, wanted: Sequence[Wanted]) -> Sequence[IoOutcome]:
        """Fill the payloads. Only an OK's memory holds the object; other memory may be written.

        Raises Late, and then no payload may be used again before `settled` is done.
        """
        items = [self._item(one) for one in wanted]
        done = partial(self._pages.give_back, items)
        sizes = await self._called(self._backend.get(items), len(items), done)
        if isinstance(sizes, IoOutcome):
            return [sizes] * len(items)
        verdicts = [self._verdict(item, size) for item, size in zip(items, sizes, strict=True)]
        try:
            await self._check_payloads(items, verdicts)
        finally:
            done()
        await self._draw_conclusions(items, verdicts)
        return [found.outcome for found in verdicts]

    async def put(self, wanted: Sequence[Wanted]) -> Sequence[IoOutcome]:
        """Store the payloads, replacing what is there. The memory must not change meanwhile.

        Raises Late, and then no payload may be used again before `settled` is done.
        """
        if self.health().state is not State.CLOSED:
            return self._refused(wanted)  # without hashing it all for nothing
        if self._sealer is None:
            outcomes = await self._put_plain(wanted)
        else:
            outcomes = await self._put_sealed(wanted, self._sealer)
        for one, outcome in zip(wanted, outcomes, strict=True):
            if outcome is IoOutcome.OK:
                self._known.good(one.space, one.key)
        return outcomes

    async def _put_plain(self, wanted: Sequence[Wanted]) -> Sequence[IoOutcome]:
        payloads = [one.payload[: one.length] for one in wanted]
        digests = await self._worked([(len(p), partial(pages.checksum, p)) for p in payloads])
        items = [self._item(one) for one in wanted]
        for item, digest in zip(items, digests, strict=True):
            pages.encode(item.header, self._header(item, digest))
        done = partial(self._pages.give_back, items)
        outcomes = await self._called(self._backend.put(items), len(items), done)
        if isinstance(outcomes, IoOutcome):
            return [outcomes] * len(items)
        done()
        return outcomes

    async def _put_sealed(self, wanted: Sequence[Wanted], sealer: Sealer) -> Sequence[IoOutcome]:
        """As many at once as there is memory for; FULL for what can never have any."""
        outcomes = [IoOutcome.FULL] * len(wanted)
        fitting = [n for n, one in enumerate(wanted) if sealer.pool.fits(one.length)]
        if len(fitting) < len(wanted):
            self._never_fits(max(one.length for one in wanted), sealer.pool.limit_bytes)
        for batch in sealer.pool.batches([wanted[n].length for n in fitting]):
            part = [fitting[n] for n in batch]
            answers = await self._put_batch([wanted[n] for n in part], sealer)
            for number, answer in zip(part, answers, strict=True):
                outcomes[number] = answer
        return outcomes

    def _never_fits(self, object_bytes: int, limit_bytes: int) -> None:
        """Say it: in the status for good, in the log once for each larger size."""
        self._last_error = (
            f"an object of {object_bytes} bytes cannot be encrypted in {limit_bytes}: "
            "set l2.encrypt_buffer_bytes to several such objects"
        )
        if object_bytes <= self._too_large_bytes:
            return
        self._too_large_bytes = object_bytes
        if self._log is not None:
            self._log(
                "l2_too_large_to_encrypt",
                level="warning",
                backend=self.name,
                object_bytes=object_bytes,
                encrypt_buffer_bytes=limit_bytes,
            )

    async def _put_batch(self, wanted: Sequence[Wanted], sealer: Sealer) -> Sequence[IoOutcome]:
        buffers = await sealer.pool.take([one.length for one in wanted], POOL_WAIT_S)
        if buffers is None:
            self._last_error = f"no memory to encrypt into for {POOL_WAIT_S:g} s: writes hang"
            return self._refused(wanted)
        items = [
            replace(self._item(one), payload=buffer)
            for one, buffer in zip(wanted, buffers, strict=True)
        ]
        work = [
            (one.length, partial(_sealed, sealer, self._header(item), one, item))
            for one, item in zip(wanted, items, strict=True)
        ]
        await self._worked(work)

        def done() -> None:
            self._pages.give_back(items)
            sealer.pool.give_back(buffers)

        outcomes = await self._called(self._backend.put(items), len(items), done)
        if isinstance(outcomes, IoOutcome):
            return [outcomes] * len(items)
        done()
        self._sealed += sum(outcome is IoOutcome.OK for outcome in outcomes)
        return outcomes

    def _refused(self, wanted: Sequence[Wanted]) -> Sequence[IoOutcome]:
        self._backend.meter.add("put", "refused", len(wanted))
        return [IoOutcome.REFUSED] * len(wanted)

    async def delete(
        self, space: Namespace, keys: Sequence[ObjectKey], *, broken: bool = False
    ) -> None:
        """Nobody finds these any more. Raises BackendError."""
        self._known.gone(space, keys)
        try:
            await self._backend.delete(space, keys, broken=broken)
        except OSError as error:
            raise self._named(error) from error

    async def forget(self, space: Namespace) -> None:
        """Nobody finds anything of this fingerprint any more. Raises BackendError."""
        self._known.forget(space.fingerprint)
        try:
            await self._backend.forget(space)
        except OSError as error:
            raise self._named(error) from error

    def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
        """Every object, for a scrub. Raises OSError or BackendError on the way."""
        return self._backend.names()

    def usage(self) -> Usage:
        """What it holds now; immediate."""
        return self._backend.usage()

    def health(self) -> Health:
        """How it is doing; immediate."""
        return self._guard.health()

    def status(self) -> dict[str, Any]:
        """For `kvkeep status`, readiness and metrics."""
        health, usage = self.health(), self.usage()
        return {
            "name": self.name,
            "url": self.url,
            "state": health.state.value,
            "why": health.why,
            "stuck": health.stuck,
            "failures_in_row": health.failures_in_row,
            "retry_in_s": round(health.retry_in_s, 3),
            "objects": usage.objects,
            "used_bytes": usage.used_bytes,
            "capacity_bytes": usage.capacity_bytes,
            "scanned": usage.scanned,
            "evicted": usage.evicted_objects,
            "quarantined": usage.quarantined_objects,
            "corrupt": {str(problem): count for problem, count in sorted(self._broken.items())},
            "unreadable": {str(why): count for why, count in sorted(self._known.met.items())},
            "unreadable_now": self._known.unreadable_now(),
            "too_large_bytes": self._too_large_bytes,
            "encryption": self._encryption(),
            "buffer_bytes": self.buffer_bytes,
            "operations": self._backend.meter.as_dict(),
            "read_only": usage.read_only,
            "last_error": self._last_error or usage.last_error,
        }

    @property
    def buffer_bytes(self) -> int:
        """The most memory that this takes beside the arena, for the budget."""
        own_bytes = 0 if self._sealer is None else self._sealer.pool.limit_bytes
        return own_bytes + self.backend_bytes

    def _encryption(self) -> dict[str, Any] | None:
        sealer = self._sealer
        if sealer is None:
            return None
        mapped_bytes = sealer.pool.mapped_bytes
        return {
            "key": sealer.active,
            "keys": sealer.keys,
            "sealed": self._sealed,
            "buffer_used_bytes": mapped_bytes,
        }

    # ---- parts of get and put

    def _item(self, wanted: Wanted) -> Item:
        assert 0 < wanted.length <= len(wanted.payload)
        assert len(wanted.payload) % PAGE_BYTES == 0
        return Item(
            space=wanted.space,
            key=wanted.key,
            header=self._pages.take(),
            payload=wanted.payload,
            length=wanted.length,
            depth=wanted.depth,
        )

    def _header(self, item: Item, digest: bytes = b"") -> Header:
        return Header(
            fingerprint=item.space.fingerprint,
            salt_digest=pages.salt_digest(item.space.salt),
            key=item.key,
            length=item.length,
            checksum=digest,
            depth=item.depth,
            model=item.space.model,
            created_s=self._wall(),
        )

    async def _called(
        self, call: Awaitable[Sequence[T]], asked: int, done: Callable[[], None]
    ) -> Sequence[T] | IoOutcome:
        """The answer for each item, or one outcome for all; `done` was called unless answered.

        `done` gives back what the call was lent. Cancelled, that is not given back: the I/O may
        still run, and only it knows for how long.
        """
        try:
            answer = await call
        except Late as late:
            self._last_error = str(late)
            late.settled.add_done_callback(lambda _: done())
            raise
        except Unavailable:
            done()
            return IoOutcome.REFUSED
        except (OSError, BackendError) as error:
            self._last_error = str(error)
            done()
            return IoOutcome.ERROR
        if len(answer) != asked:
            self._last_error = f"{self.name} gave {len(answer)} answers for {asked} objects"
            done()
            return IoOutcome.ERROR
        return answer

    async def _check_payloads(self, items: Sequence[Item], verdicts: list[Verdict]) -> None:
        """Where the header is right, the payload must have its checksum, or open."""
        sound = [(n, found.header) for n, found in enumerate(verdicts) if found.header is not None]
        digests = await self._worked([self._proof(items[n], header) for n, header in sound])
        for (n, header), digest in zip(sound, digests, strict=True):
            if digest != header.checksum:
                is_sealed = header.seal is not None
                problem = HeaderProblem.TAG if is_sealed else HeaderProblem.PAYLOAD_CHECKSUM
                verdicts[n] = Verdict(problem.outcome, problem)

    def _proof(self, item: Item, header: Header) -> jobs.Sized:
        """The work that ends with the header's checksum when the payload is right."""
        payload = item.payload[: item.length]
        if self._sealer is None:
            return item.length, partial(pages.checksum, payload)
        page = pages.associated(item.header)
        return item.length, partial(_opened, self._sealer, header, page, payload)

    def _verdict(self, item: Item, size: int) -> Verdict:
        if size == ABSENT:
            return Verdict(IoOutcome.MISSING)
        found = pages.verdict(item.header, item.space, item.key, length=item.length, size=size)
        if found.header is None:
            return found
        if self._sealer is not None:
            problem = self._sealer.problem(found.header)
        else:
            problem = None if found.header.seal is None else HeaderProblem.NO_KEY
        return found if problem is None else Verdict(problem.outcome, problem)

    async def _draw_conclusions(self, items: Sequence[Item], verdicts: Sequence[Verdict]) -> None:
        """Remember what is right and what is of no use, and take away what is broken.

        So the next store is not told that it is there.
        """
        broken: dict[Namespace, list[ObjectKey]] = {}
        for item, found in zip(items, verdicts, strict=True):
            if found.problem is not None and found.problem.unreadable:
                self._known.unreadable(item.space, item.key, found.problem)
                self._say_wrong("l2_unreadable", item, found.problem)
            elif found.problem is not None:
                self._broken[found.problem] += 1
                self._say_wrong("l2_corrupt", item, found.problem)
                self._known.gone(item.space, [item.key])
                broken.setdefault(item.space, []).append(item.key)
            elif found.outcome is IoOutcome.OK:
                self._known.good(item.space, item.key)
        started = [asyncio.create_task(self._remove(space, keys)) for space, keys in broken.items()]
        if started:
            self._removals.update(started)
            await asyncio.wait(started, timeout=DELETE_WAIT_S)

    def _say_wrong(self, event: str, item: Item, problem: HeaderProblem) -> None:
        """One line for each, but not a flood: the counter has them all."""
        now_s = self._wall()
        many = len(self._said_s) == SAID_A_MINUTE and now_s - self._said_s[0] < 60.0
        if self._log is not None and not many:
            self._said_s.append(now_s)
            name = f"{pages.label(item.space)}/{pages.file_stem(item.key)}"
            self._log(event, level="warning", backend=self.name, object=name, why=problem)

    async def _remove(self, space: Namespace, keys: Sequence[ObjectKey]) -> None:
        try:
            await self._backend.delete(space, keys, broken=True)
        except (OSError, BackendError) as error:
            self._last_error = str(error)
        finally:
            self._removals.discard(cast("asyncio.Task[None]", asyncio.current_task()))

    async def _worked(self, work: Sequence[jobs.Sized]) -> list[bytes]:
        inline_bytes = INLINE_BYTES if self._sealer is None else INLINE_SEALED_BYTES
        return await jobs.done(work, inline_bytes=inline_bytes, offload=self._offload)

    def _named(self, error: OSError) -> BackendError:
        self._last_error = str(error)
        return BackendError(f"{self.name} ({self.url}): {error}")


def _sealed(sealer: Sealer, header: Header, one: Wanted, item: Item) -> bytes:
    sealer.seal(item.header, header, one.payload[: one.length], item.payload)
    return b""


def _opened(sealer: Sealer, header: Header, page: bytes, payload: memoryview) -> bytes:
    """The header's checksum, as if computed, when the payload is right."""
    return header.checksum if sealer.opens(header, page, payload) else b""
