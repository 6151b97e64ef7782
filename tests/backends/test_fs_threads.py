"""The daemon threads of `fs`: results and errors come back, nothing waits for a stuck one."""

import asyncio
import subprocess
import sys
import threading

import pytest

from kvkeep.backends.threads import Pool
from kvkeep.errors import BackendError


def test_results_and_errors_come_back() -> None:
    async def main() -> None:
        pool = Pool("p", 2)
        assert await asyncio.gather(*(pool.run(lambda n=n: n * n) for n in range(50))) == [  # type: ignore[misc]
            n * n for n in range(50)
        ]
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0)
        assert await pool.close(20)
        with pytest.raises(BackendError, match="p is closed"):
            pool.run(int)

    asyncio.run(main())


def test_closing_ends_what_is_queued() -> None:
    async def main() -> None:
        pool, gate = Pool("p", 1), threading.Event()
        first, second = pool.run(lambda: gate.wait(20)), pool.run(lambda: 7)
        assert not await pool.close(0.01)
        gate.set()
        assert await pool.close(20)
        assert await first
        assert await second == 7

    asyncio.run(main())


def test_cancelled_before_its_turn_is_never_begun() -> None:
    async def main() -> None:
        pool, gate, ran = Pool("p", 1), threading.Event(), list[int]()
        first, second = pool.run(lambda: gate.wait(20)), pool.run(lambda: ran.append(1))
        second.cancel()
        gate.set()
        await first
        assert await pool.close(20)
        assert not ran

    asyncio.run(main())


def test_an_answer_nobody_waits_for_is_dropped() -> None:
    async def main() -> None:
        pool, begun, gate = Pool("p", 1), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            gate.wait(20)
            raise OSError("too late")

        future = pool.run(work)
        await asyncio.to_thread(begun.wait)
        future.cancel()
        gate.set()
        assert await pool.close(20)

    asyncio.run(main())


def test_the_process_ends_though_a_thread_is_stuck() -> None:
    script = """
import asyncio, time
from kvkeep.backends.threads import Pool
async def main():
    pool = Pool("p", 1)
    pool.run(lambda: time.sleep(600))
    assert not await pool.close(0.05)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
