"""The guard: calls end in time, their memory is not free too early, the breaker heals by itself."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

import pytest

from kvkeep.backends.base import ABSENT, Item
from kvkeep.backends.breaker import State
from kvkeep.backends.guarded import Guarded, GuardSettings, Late, Unavailable
from kvkeep.errors import BackendError
from kvkeep.testing import virtual_loop
from kvkeep.testing.backend_contract import SPACE, filled, is_filled, item, key
from kvkeep.testing.faulty_backend import Fault, FaultyBackend, Kind, Nth, Switched
from kvkeep.testing.virtual_loop import VirtualLoop
from kvkeep.types import IoOutcome, Namespace, ObjectKey

LENGTH = 5_000
ERROR = Fault(Kind.ERROR)
NEVER = Fault(Kind.NEVER)


class Bench:
    """A guarded backend on the virtual loop with one object in it, and what it logged."""

    def __init__(self, raw: FaultyBackend | None = None) -> None:
        self.raw = raw or FaultyBackend()
        self.lines: list[tuple[float, str]] = []
        self.guard = Guarded(self.raw, settings=GuardSettings(), log=self._log)

    def _log(self, event: str, **fields: Any) -> None:
        assert fields["backend"] == "faulty"
        self.lines.append((now_s(), event))

    def fail(self, fault: Fault | None, operation: str | None = None) -> None:
        """From now on."""
        self.raw.plan = Switched(fault, operation=operation)

    async def get(self) -> Item:
        target = item(SPACE, key(1), LENGTH)
        assert list(await self.guard.get([target])) == [LENGTH]
        return target

    async def open_breaker(self) -> None:
        """Five errors in a row."""
        self.fail(ERROR)
        for _ in range(5):
            with pytest.raises(OSError, match="on demand"):
                await self.get()
        assert self.guard.health().state is State.OPEN


def now_s() -> float:
    return asyncio.get_running_loop().time()


def on(body: Callable[[Bench], Coroutine[Any, Any, None]], bench: Bench | None = None) -> None:
    """Run with an object already stored; afterwards nothing may be left running."""

    complaints: list[object] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, seen: complaints.append(seen))
        made = bench or Bench()
        await made.guard.open()
        await made.guard.put([filled(SPACE, key(1), LENGTH)])
        await body(made)
        made.fail(None)
        made.raw.unstick()
        await made.guard.close()
        assert made.guard.health().stuck == 0

    virtual_loop.run(main())
    gc.collect(1)  # an exception that nobody read is reported when its task goes
    assert not complaints


# ---- deadlines


def test_a_late_call_is_not_cancelled_and_tells_when_it_has_settled() -> None:
    async def body(bench: Bench) -> None:
        bench.fail(Fault(Kind.SLOW, delay_s=7.0))
        target = item(SPACE, key(1), LENGTH)
        with pytest.raises(Late, match=r"faulty: get did not end within 2 s") as late:
            await bench.guard.get([target])
        assert now_s() == pytest.approx(2.0)
        assert bench.guard.health().stuck == 1
        assert not is_filled(target)
        await late.value.settled
        assert now_s() == pytest.approx(7.0)
        assert is_filled(target)
        assert bench.guard.health().stuck == 0

    on(body)


def test_settled_also_ends_when_the_late_call_fails() -> None:
    class Failing(FaultyBackend):
        async def get(self, items: Sequence[Item]) -> Sequence[int]:
            await asyncio.sleep(5.0)
            raise OSError("at last")

    async def body(bench: Bench) -> None:
        with pytest.raises(Late) as late:
            await bench.get()
        await late.value.settled
        assert now_s() == pytest.approx(5.0)

    on(body, Bench(Failing()))


@pytest.mark.parametrize(
    ("operation", "limit_s"),
    [("get", 2.0), ("put", 10.0), ("delete", 10.0), ("forget", 10.0), ("contains", 0.5)],
)
def test_every_operation_has_its_deadline(operation: str, limit_s: float) -> None:
    async def body(bench: Bench) -> None:
        bench.fail(NEVER)
        guard = bench.guard
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "get": lambda: guard.get([item(SPACE, key(1), LENGTH)]),
            "put": lambda: guard.put([filled(SPACE, key(1), LENGTH)]),
            "delete": lambda: guard.delete(SPACE, [key(1)]),
            "forget": lambda: guard.forget(SPACE),
            "contains": lambda: later(guard.contains(SPACE, [key(1)])),
        }
        with pytest.raises(Late, match=operation):
            await calls[operation]()
        assert now_s() == pytest.approx(limit_s)
        assert guard.health().failures_in_row == 1

    on(body)


def later(answer: Sequence[bool] | Awaitable[Sequence[bool]]) -> Awaitable[Sequence[bool]]:
    assert isinstance(answer, Awaitable)
    return answer


def test_listing_names_has_a_deadline_for_each_step() -> None:
    class Stalling(FaultyBackend):
        async def names(self) -> AsyncIterator[tuple[str, ObjectKey, int]]:
            for number in range(3):
                await asyncio.sleep(1.9 if number < 2 else 99.0)
                yield "label", key(number), 1

    async def body(bench: Bench) -> None:
        steps = bench.guard.names()
        assert [(await anext(steps))[1], (await anext(steps))[1]] == [key(0), key(1)]
        with pytest.raises(Late, match="names"):
            await anext(steps)
        await asyncio.sleep(200.0)

    on(body, Bench(Stalling()))


def test_a_caller_that_gives_up_does_not_stop_the_call() -> None:
    async def body(bench: Bench) -> None:
        bench.fail(Fault(Kind.SLOW, delay_s=1.0))
        target = item(SPACE, key(1), LENGTH)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.guard.get([target]), timeout=0.5)
        await asyncio.sleep(1.0)
        assert is_filled(target)
        assert bench.guard.health().failures_in_row == 0

    on(body)


def test_a_call_that_fails_after_its_caller_gave_up_is_nobodys_surprise() -> None:
    class Failing(FaultyBackend):
        async def get(self, items: Sequence[Item]) -> Sequence[int]:
            await asyncio.sleep(1.0)
            raise OSError("nobody waits for this")

    async def body(bench: Bench) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bench.get(), timeout=0.5)
        await asyncio.sleep(1.0)

    on(body, Bench(Failing()))


@pytest.mark.parametrize(("needs_s", "is_late"), [(61.5, False), (65.0, True)])
def test_a_machine_that_stood_still_blames_nobody_at_first(needs_s: float, is_late: bool) -> None:
    async def body(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        bench.fail(Fault(Kind.SLOW, delay_s=needs_s))
        loop.call_later(1.0, loop.advance, 60.0)
        if is_late:
            with pytest.raises(Late):
                await bench.get()
            assert now_s() == pytest.approx(62.0)
        else:
            await bench.get()
        assert bench.guard.health().failures_in_row == is_late
        await asyncio.sleep(10.0)

    on(body)


def test_the_moment_more_is_given_once() -> None:
    async def body(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        bench.fail(Fault(Kind.SLOW, delay_s=122.0))
        loop.call_later(1.0, loop.advance, 60.0)
        loop.call_later(61.5, loop.advance, 60.0)
        with pytest.raises(Late):
            await bench.get()
        assert now_s() == pytest.approx(121.5)
        await asyncio.sleep(1.0)

    on(body)


# ---- the breaker


def test_five_failures_open_it_and_nothing_is_sent() -> None:
    async def body(bench: Bench) -> None:
        await bench.open_breaker()
        sent = bench.raw.calls.copy()
        with pytest.raises(Unavailable, match="get fails on demand"):
            await bench.get()
        with pytest.raises(Unavailable):
            await bench.guard.put([filled(SPACE, key(1), LENGTH)])
        with pytest.raises(Unavailable):
            await bench.guard.delete(SPACE, [key(1)])
        assert bench.guard.contains(SPACE, [key(1), key(2)]) == [False, False]
        assert bench.raw.calls == sent
        health = bench.guard.health()
        assert health.failures_in_row == 5
        assert health.retry_in_s == pytest.approx(5.0)
        assert "get fails on demand" in health.why

    on(body)


def test_it_probes_by_itself_ever_more_rarely_and_closes() -> None:
    async def body(bench: Bench) -> None:
        probed: list[float] = []

        class Noting(Switched):
            def next(self, operation: str) -> Fault | None:
                if operation == "probe":
                    probed.append(now_s())
                return super().next(operation)

        await bench.open_breaker()
        bench.raw.plan = Noting(ERROR)
        await asyncio.sleep(200.0)
        assert probed == pytest.approx([5.0, 15.0, 35.0, 75.0, 135.0, 195.0])
        bench.raw.plan = Noting()
        await asyncio.sleep(60.0)
        assert probed[6:] == pytest.approx([255.0])
        assert bench.guard.health().state is State.CLOSED
        assert bench.guard.health().why == ""
        await bench.get()
        assert bench.lines == [(0.0, "backend_lost"), (pytest.approx(255.0), "backend_back")]
        await bench.open_breaker()  # and the delay starts again from its first value
        assert bench.guard.health().retry_in_s == pytest.approx(5.0)

    on(body)


def test_late_calls_open_it_too() -> None:
    async def body(bench: Bench) -> None:
        bench.fail(NEVER)
        calls = [bench.get() for _ in range(8)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, Late) for result in results)
        health = bench.guard.health()
        assert (health.state, health.stuck, health.failures_in_row) == (State.OPEN, 8, 5)
        bench.fail(None)
        await asyncio.sleep(6.0)
        health = bench.guard.health()
        assert (health.state, health.stuck) == (State.CLOSED, 8)
        bench.raw.unstick()
        await asyncio.sleep(0.1)
        assert bench.guard.health().stuck == 0
        assert bench.guard.health().failures_in_row == 0

    on(body)


def test_a_probe_that_hangs_is_not_started_twice() -> None:
    async def body(bench: Bench) -> None:
        await bench.open_breaker()
        bench.fail(NEVER, "probe")
        await asyncio.sleep(500.0)
        assert bench.raw.calls["probe"] == 1
        assert bench.guard.health().stuck == 1
        assert "probe did not end" in bench.guard.health().why
        bench.fail(None)
        bench.raw.unstick()
        await asyncio.sleep(0.1)
        assert bench.raw.calls["probe"] == 2
        assert bench.guard.health().state is State.CLOSED

    on(body)


def test_answers_are_no_failures() -> None:
    async def body(bench: Bench) -> None:
        for kind, outcome in ((Kind.FULL, IoOutcome.FULL), (Kind.REFUSE, IoOutcome.REFUSED)):
            bench.fail(Fault(kind), "put")
            for _ in range(6):
                assert list(await bench.guard.put([filled(SPACE, key(2), 9)])) == [outcome]
        for _ in range(6):
            assert list(await bench.guard.get([item(SPACE, key(2), 9)])) == [ABSENT]
        assert bench.guard.health().failures_in_row == 0

    on(body)


def test_a_success_between_failures_starts_the_count_again() -> None:
    async def body(bench: Bench) -> None:
        for n in range(20):
            bench.raw.plan = Nth(1, ERROR) if n % 5 else Switched()
            try:
                await bench.get()
            except OSError:
                assert n % 5
        assert bench.guard.health().state is State.CLOSED
        assert bench.guard.health().failures_in_row == 4

    on(body)


def test_what_began_before_it_opened_does_not_close_it() -> None:
    async def body(bench: Bench) -> None:
        bench.fail(Fault(Kind.SLOW, delay_s=1.0))
        early = asyncio.create_task(bench.get())
        await asyncio.sleep(0.5)
        await bench.open_breaker()
        await early
        assert bench.guard.health().state is State.OPEN

    on(body)


def test_an_error_of_contains_counts() -> None:
    async def body(bench: Bench) -> None:
        bench.fail(ERROR, "contains")
        with pytest.raises(OSError, match="contains"):
            bench.guard.contains(SPACE, [key(1)])
        assert bench.guard.health().failures_in_row == 1

    on(body)


def test_a_plug_ins_own_errors_become_ours() -> None:
    class Odd(FaultyBackend):
        async def get(self, items: Sequence[Item]) -> Sequence[int]:
            raise ZeroDivisionError("in a plug-in")

        async def forget(self, space: Namespace) -> None:
            raise asyncio.CancelledError

    async def body(bench: Bench) -> None:
        with pytest.raises(BackendError, match="get raised ZeroDivisionError: in a plug-in"):
            await bench.get()
        with pytest.raises(BackendError, match="forget was cancelled inside"):
            await bench.guard.forget(SPACE)
        assert bench.guard.health().failures_in_row == 2

    on(body, Bench(Odd()))


# ---- the end


def test_close_leaves_behind_what_hangs() -> None:
    async def body(bench: Bench) -> None:
        await bench.open_breaker()
        bench.fail(NEVER)
        await asyncio.sleep(5.5)  # a probe is under way
        await bench.guard.close()
        assert now_s() == pytest.approx(6.5)
        assert [event for _, event in bench.lines] == ["backend_lost", "backend_left"]
        with pytest.raises(Unavailable, match="closed"):
            await bench.get()
        assert bench.guard.contains(SPACE, [key(1)]) == [False]
        bench.raw.unstick()
        await asyncio.sleep(100.0)
        assert bench.raw.calls["probe"] == 1

    on(body)


def test_a_probe_that_works_after_close_says_nothing() -> None:
    async def body(bench: Bench) -> None:
        await bench.open_breaker()
        bench.fail(Fault(Kind.SLOW, delay_s=1.5), "probe")
        await asyncio.sleep(5.5)
        await bench.guard.close()
        await asyncio.sleep(5.0)
        assert [event for _, event in bench.lines] == ["backend_lost"]

    on(body)
