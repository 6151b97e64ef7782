"""Time moves only when it must, in order, and a wait that can never end is an error at once."""

import asyncio
import time

import pytest

from kvkeep.testing import virtual_loop
from kvkeep.testing.virtual_loop import Deadlock

YEAR_S = 365 * 86_400.0


async def _now() -> float:
    return asyncio.get_running_loop().time()


def test_a_year_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(YEAR_S)
        return await _now()

    started = time.perf_counter()
    assert virtual_loop.run(main()) == pytest.approx(YEAR_S)
    assert time.perf_counter() - started < 5.0


def test_time_stands_still_while_something_is_ready() -> None:
    async def main() -> float:
        for _ in range(100):
            await asyncio.sleep(0)
        return await _now()

    assert virtual_loop.run(main()) == 0.0


def test_timers_run_in_the_order_of_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def later(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            seen.append((name, await _now()))

        await asyncio.gather(later("c", 3.0), later("a", 1.0), later("b", 2.0))
        return seen

    assert virtual_loop.run(main()) == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_timeouts_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(YEAR_S), timeout=60.0)
        return await _now()

    assert virtual_loop.run(main()) == pytest.approx(60.0)


def test_a_wait_that_cannot_end_is_a_deadlock() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.gather(asyncio.create_task(stuck(), name="the one that waits"))

    with pytest.raises(Deadlock, match="the one that waits"):
        virtual_loop.run(main())


def test_what_is_left_running_is_cancelled() -> None:
    ended: list[str] = []

    async def endless() -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
        finally:
            ended.append("cancelled")

    async def main() -> asyncio.Task[None]:
        task = asyncio.create_task(endless())
        await asyncio.sleep(10.5)
        return task

    assert virtual_loop.run(main()).cancelled()
    assert ended == ["cancelled"]


def test_an_error_of_the_main_coroutine_comes_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        virtual_loop.run(main())


def test_the_loop_opens_nothing() -> None:
    """No self-pipe: a simulation makes one loop per seed."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert not isinstance(loop, asyncio.SelectorEventLoop)
        loop.call_soon_threadsafe(lambda: None)
        await asyncio.sleep(1.0)

    virtual_loop.run(main())
