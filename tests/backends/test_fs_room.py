"""Room, turns and the index of `fs`, without a disk: sums stay right whatever the order."""

import asyncio
import random
from collections.abc import Callable

import pytest

from kvkeep.backends.fs_index import DEPTH_PENALTY_S, NS, Entry, Index, disk_bytes, value_ns
from kvkeep.backends.fs_room import Room, Turns
from kvkeep.testing.backend_contract import key


def nobody(_: Entry) -> bool:
    return False


def nothing() -> int:
    return 0


# ---- room


def test_room_is_given_in_order_of_asking() -> None:
    async def main() -> None:
        room = Room(10, nothing)
        assert await room.reserve(6)
        large = asyncio.create_task(room.reserve(8))
        small = asyncio.create_task(room.reserve(1))
        await asyncio.sleep(0)
        assert not large.done()
        assert not small.done()  # it would fit, but the other one would starve
        room.unwritten(6)
        assert await large
        assert await small
        assert room.used_bytes == 9

    asyncio.run(main())


def test_who_can_never_fit_is_told_at_once() -> None:
    async def main() -> None:
        room = Room(10, nothing)
        assert not await room.reserve(11)
        room.found(5)
        assert not await room.reserve(6)  # nothing is being written that could be evicted
        assert room.used_bytes == 5

    asyncio.run(main())


def test_what_leaves_is_waited_for() -> None:
    async def main() -> None:
        room = Room(10, nothing)
        room.found(10)
        room.leaving(10)
        waiting = asyncio.create_task(room.reserve(4))
        await asyncio.sleep(0)
        assert not waiting.done()
        room.left(10)
        assert await waiting

    asyncio.run(main())


def test_what_cannot_leave_is_an_error_for_all_who_wait() -> None:
    async def main() -> None:
        room = Room(10, nothing)
        room.found(10)
        room.leaving(10)
        waiting = [asyncio.create_task(room.reserve(4)) for _ in range(3)]
        await asyncio.sleep(0)
        room.stuck(10, OSError("broken"))
        for one in waiting:
            with pytest.raises(OSError, match="broken"):
                await one
        assert room.used_bytes == 10

    asyncio.run(main())


@pytest.mark.parametrize("granted", [False, True])
def test_a_cancelled_reservation_takes_nothing(granted: bool) -> None:
    async def main() -> None:
        room = Room(10, nothing)
        assert await room.reserve(10)
        waiting = asyncio.create_task(room.reserve(3))
        after = asyncio.create_task(room.reserve(10))
        await asyncio.sleep(0)
        if granted:
            room.unwritten(10)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        if not granted:
            room.unwritten(10)
        assert await after
        assert room.used_bytes == 10

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(20))
def test_random_writers_never_pass_the_capacity(seed: int) -> None:
    chance = random.Random(seed)

    async def main() -> None:
        objects: list[int] = []
        disk = [0]

        def evict() -> int:
            if not objects:
                return 0
            size = objects.pop(0)

            def gone() -> None:
                disk[0] -= size
                room.left(size)

            asyncio.get_running_loop().call_later(chance.random() / 1000, gone)
            return size

        room = Room(100, evict)

        async def write() -> None:
            size = chance.randint(1, 60)
            await asyncio.sleep(chance.random() / 1000)
            assert await room.reserve(size)
            disk[0] += size
            assert disk[0] <= room.used_bytes <= 100
            await asyncio.sleep(chance.random() / 1000)
            if chance.random() < 0.2:
                disk[0] -= size
                room.unwritten(size)
            else:
                objects.append(size)
                room.written()

        await asyncio.gather(*(write() for _ in range(60)))
        await asyncio.sleep(0.01)
        assert room.used_bytes == disk[0] == sum(objects)

    asyncio.run(main())


# ---- turns


def test_one_at_a_time_in_order() -> None:
    async def main() -> None:
        turns, told = Turns(), list[str]()

        async def one(name: str) -> None:
            await turns.take("x")
            told.append(name)
            await asyncio.sleep(0)
            told.append(name)
            turns.leave("x")

        await asyncio.gather(*map(one, "abc"))
        assert told == list("aabbcc")
        assert not turns.busy("x")

    asyncio.run(main())


def test_who_gives_up_waiting_does_not_keep_the_turn() -> None:
    async def main() -> None:
        turns = Turns()
        await turns.take("x")
        second, third = (asyncio.create_task(turns.take("x")) for _ in range(2))
        await asyncio.sleep(0)
        turns.leave("x")  # it is the second one's now
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        await third
        turns.leave("x")
        assert not turns.busy("x")

    asyncio.run(main())


# ---- index


def test_the_least_valuable_first_and_no_busy_one() -> None:
    index = Index()
    entries = [index.add("a", key(n), 100, value) for n, value in enumerate((5, 3, 9, 7))]
    index.use(entries[1], now_ns=20, depth=0)

    def busy(entry: Entry) -> bool:
        return entry is entries[0]

    order = []
    while (entry := index.least(busy)) is not None:
        order.append(entries.index(entry))
        index.drop(entry)
    assert order == [3, 2, 1]
    assert index.least(nobody) is entries[0]


@pytest.mark.parametrize("seed", range(5))
def test_the_index_agrees_with_a_plain_dict(seed: int) -> None:
    chance = random.Random(seed)
    index, model, now = Index(), dict[tuple[str, int], int](), 0
    steps: list[Callable[[str, int], None]] = []

    def add(label: str, number: int) -> None:
        if (label, number) not in model:
            index.add(label, key(number), number, now)
            model[label, number] = now

    def use(label: str, number: int) -> None:
        entry = index.find(label, key(number))
        assert (entry is not None) == ((label, number) in model)
        if entry is not None:
            model[label, number] = index.use(entry, now, 0)

    def drop(label: str, number: int) -> None:
        if (entry := index.find(label, key(number))) is not None:
            index.drop(entry)
            del model[label, number]

    def forget(label: str, number: int) -> None:
        if number == 0:
            gone = [name for name in model if name[0] in (label, f"{label}-1")]
            assert sum(len(space.entries) for space in index.forget(label)) == len(gone)
            for name in gone:
                del model[name]

    steps += [add] * 5 + [use, use, drop, forget]
    for _ in range(4_000):
        now += 1
        chance.choice(steps)(chance.choice(("a", "a-1", "b")), chance.randrange(40))
        assert index.objects == len(model)
        least = index.least(nobody)
        assert (None if least is None else least.value_ns) == min(model.values(), default=None)
    held = {(s.label, e.size): e.value_ns for s in index for e in s.entries.values()}
    assert held == model
    for space in index:
        assert space.bytes == sum(disk_bytes(entry.size) for entry in space.entries.values())


def test_value_grows_with_use_and_shrinks_with_depth() -> None:
    now = 1_000_000 * NS
    assert value_ns(now, 1, 0) == now
    assert value_ns(now, 2, 0) > value_ns(now, 1, 0)
    assert value_ns(now, 1, 1) == now - DEPTH_PENALTY_S * NS
    assert value_ns(now, 1 << 40, 0) == value_ns(now, 1 << 16, 0)
