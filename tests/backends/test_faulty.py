"""The backend that fails on demand: without a fault it keeps the contract, with one it fails so."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kvkeep.backends.base import ABSENT, Backend
from kvkeep.errors import BackendError
from kvkeep.testing import virtual_loop
from kvkeep.testing.backend_contract import SPACE, BackendContract, filled, found, is_filled, item
from kvkeep.testing.backend_contract import key as key_of
from kvkeep.testing.faulty_backend import Chance, Fault, FaultyBackend, Kind, Nth, Switched
from kvkeep.types import IoOutcome

KEY = key_of(1)
LENGTH = 5_000


class TestOnARealLoop(BackendContract):
    """The contract, `contains` answering at once."""

    durable = False

    async def make(self, place: Path) -> Backend:
        return FaultyBackend()


class TestOnTheVirtualLoop(BackendContract):
    """The contract, `contains` answering later."""

    durable = False

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        virtual_loop.run(main)

    async def make(self, place: Path) -> Backend:
        return FaultyBackend(later=True)


async def holding_one() -> FaultyBackend:
    backend = FaultyBackend()
    await backend.put([filled(SPACE, KEY, LENGTH)])
    return backend


@pytest.mark.parametrize("operation", ["get", "put", "delete", "forget", "probe", "contains"])
async def test_an_error_comes_out_of_every_operation(operation: str) -> None:
    backend = await holding_one()
    backend.plan = Switched(Fault(Kind.ERROR), operation=operation)
    calls: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
        "get": lambda: backend.get([item(SPACE, KEY, LENGTH)]),
        "put": lambda: backend.put([filled(SPACE, KEY, LENGTH)]),
        "delete": lambda: backend.delete(SPACE, [KEY]),
        "forget": lambda: backend.forget(SPACE),
        "probe": backend.probe,
        "contains": lambda: found(backend, SPACE, [KEY]),
    }
    with pytest.raises(OSError, match=f"{operation} fails"):
        await calls[operation]()
    assert len(backend.objects) == 1
    backend.plan = Switched()
    await calls[operation]()


@pytest.mark.parametrize(
    ("kind", "size"),
    [(Kind.MISSING, ABSENT), (Kind.SHORT, LENGTH - 1), (Kind.LONG, LENGTH + 1)],
)
async def test_a_read_sees_another_size_once(kind: Kind, size: int) -> None:
    backend = await holding_one()
    backend.plan = Nth(1, Fault(kind), operation="get")
    assert list(await backend.get([item(SPACE, KEY, LENGTH)])) == [size]
    assert list(await backend.get([item(SPACE, KEY, LENGTH)])) == [LENGTH]
    assert await found(backend, SPACE, [KEY]) == [True]


async def test_one_bit_is_another() -> None:
    backend = await holding_one()
    backend.plan = Nth(1, Fault(Kind.FLIPPED, place=8 * 17 + 3))
    target = item(SPACE, KEY, LENGTH)
    await backend.get([target])
    assert not is_filled(target)
    target.payload[17] ^= 1 << 3
    assert is_filled(target)


async def test_another_objects_bytes() -> None:
    backend = await holding_one()
    await backend.put([filled(SPACE, key_of(2), LENGTH, seed=2)])
    backend.plan = Nth(1, Fault(Kind.OTHER_KEY))
    target = item(SPACE, KEY, LENGTH)
    await backend.get([target])
    assert is_filled(target, seed=2)


async def test_a_put_is_full_refused_or_lost() -> None:
    backend = FaultyBackend()
    for kind, outcome in (
        (Kind.FULL, IoOutcome.FULL),
        (Kind.REFUSE, IoOutcome.REFUSED),
        (Kind.MISSING, IoOutcome.OK),
    ):
        backend.plan = Switched(Fault(kind))
        assert list(await backend.put([filled(SPACE, KEY, LENGTH)])) == [outcome]
        assert not backend.objects
    backend.plan = Switched(Fault(Kind.REFUSE))
    with pytest.raises(BackendError, match="get is refused"):
        await backend.get([item(SPACE, KEY, LENGTH)])


async def test_it_is_full_by_its_capacity() -> None:
    backend = FaultyBackend(capacity_bytes=20_000)
    outcomes = await backend.put([filled(SPACE, key_of(n), LENGTH) for n in range(3)])
    assert list(outcomes) == [IoOutcome.OK, IoOutcome.OK, IoOutcome.FULL]


def test_slow_is_slow_and_touches_the_memory_last() -> None:
    async def main() -> None:
        backend = await holding_one()
        backend.plan = Switched(Fault(Kind.SLOW, delay_s=30.0))
        target = item(SPACE, KEY, LENGTH)
        call = asyncio.create_task(backend.get([target]))
        await asyncio.sleep(29.0)
        assert not call.done()
        assert target.payload[0] == 0xA5
        assert list(await call) == [LENGTH]
        assert asyncio.get_running_loop().time() == pytest.approx(30.0)
        assert is_filled(target)

    virtual_loop.run(main())


async def test_a_call_hangs_until_it_is_let_go() -> None:
    backend = await holding_one()
    backend.plan = Nth(1, Fault(Kind.NEVER))
    call = asyncio.create_task(backend.get([item(SPACE, KEY, LENGTH)]))
    while not backend.hanging:
        await asyncio.sleep(0)
    assert not call.done()
    backend.unstick()
    assert list(await call) == [LENGTH]
    assert backend.hanging == 0


async def test_a_call_returns_only_after_the_close_and_does_its_work() -> None:
    backend = await holding_one()
    backend.plan = Nth(1, Fault(Kind.AFTER_CLOSE), operation="get")
    target = item(SPACE, KEY, LENGTH)
    call = asyncio.create_task(backend.get([target]))
    while not backend.hanging:
        await asyncio.sleep(0)
    assert target.payload[0] == 0xA5
    await backend.close()
    assert list(await call) == [LENGTH]
    assert is_filled(target)
    assert backend.hanging == 0


async def test_a_permission_can_be_lost() -> None:
    backend = await holding_one()
    backend.plan = Switched(Fault(Kind.DENIED))
    with pytest.raises(PermissionError, match="get is not permitted"):
        await backend.get([item(SPACE, KEY, LENGTH)])
    with pytest.raises(PermissionError, match="put is not permitted"):
        await backend.put([filled(SPACE, KEY, LENGTH)])
    with pytest.raises(PermissionError, match="probe is not permitted"):
        await backend.probe()


def test_the_nth_call_once_or_from_then_on() -> None:
    fault = Fault(Kind.ERROR)
    once, ever = Nth(2, fault), Nth(2, fault, for_ever=True)
    puts = Nth(2, fault, operation="put")
    calls = ["get", "put", "get", "put"]
    assert [once.next(call) for call in calls] == [None, fault, None, None]
    assert [ever.next(call) for call in calls] == [None, fault, fault, fault]
    assert [puts.next(call) for call in calls] == [None, None, None, fault]


def test_chance_follows_its_seed() -> None:
    faults = [Fault(kind) for kind in Kind]

    def drawn(seed: int) -> list[Fault | None]:
        plan = Chance(random.Random(seed), 0.5, faults)
        return [plan.next("get") for _ in range(200)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {fault.kind for fault in drawn(1) if fault} == set(Kind)
    assert 60 < drawn(1).count(None) < 140
