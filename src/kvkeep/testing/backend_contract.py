"""What every L2 backend must do, as tests that a plug-in inherits.

    class TestMine(BackendContract):
        async def make(self, place: Path) -> Backend:
            return MyBackend(place)

The methods are plain functions that take pytest's `tmp_path`, so pytest runs them and nothing here
needs it; `pytest.register_assert_rewrite` with this module's name makes a failure show its values.
Memory is handed over as the server does: header and payload in page-aligned pages, the bytes beyond
an object's length are noise. A backend whose objects die with it sets `durable` to False.
Two rules that no test can show in full: memory is not touched after a call has returned or raised,
and a stored thing that ends inside its own header page is reported with size 0.
"""

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from hashlib import shake_128
from pathlib import Path
from typing import Any

from kvkeep.backends.base import ABSENT, HEADER_BYTES, PAGE_BYTES, Backend, Item
from kvkeep.backends.header import label
from kvkeep.types import ChunkHash, Fingerprint, IoOutcome, Namespace, ObjectKey

LENGTHS = (1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES, 70_001, 1 << 20)
PATIENCE_S = 20.0
SPACE = Namespace(Fingerprint(b"\x11" * 32), model="contract")
SALTED = Namespace(Fingerprint(b"\x11" * 32), salt="s", model="contract")
OTHER = Namespace(Fingerprint(b"\x22" * 32), model="contract")
NASTY = ("../../outside", "/", "a/b", ".", "", "nul\0", "\ud800", "ü" * 300, "a" * 5000)


def key(number: int, *, world: int = 1, rank: int = 0, group: int = 0) -> ObjectKey:
    """A key like a real one: the hash is spread over all its bits."""
    chunk = shake_128(b"key" + number.to_bytes(8, "little")).digest(32)
    return ObjectKey(ChunkHash(chunk), world, rank, group)


def pattern(seed: int, length: int) -> bytes:
    """The content of an object."""
    return shake_128(b"data" + seed.to_bytes(8, "little")).digest(length)


def item(space: Namespace, name: ObjectKey, length: int, *, depth: int = 0) -> Item:
    """An object's memory, filled with noise."""
    whole = -(-length // PAGE_BYTES) * PAGE_BYTES
    memory = memoryview(mmap.mmap(-1, HEADER_BYTES + whole))
    memory[:] = b"\xa5" * len(memory)
    return Item(space, name, memory[:HEADER_BYTES], memory[HEADER_BYTES:], length, depth)


def filled(space: Namespace, name: ObjectKey, length: int, *, seed: int = 0) -> Item:
    """An object to store; header and payload follow from the seed."""
    one = item(space, name, length)
    one.header[:] = pattern(seed + 1_000_000, HEADER_BYTES)
    one.payload[:length] = pattern(seed, length)
    return one


def is_filled(one: Item, *, seed: int = 0) -> bool:
    """Whether exactly what `filled` wrote is here."""
    right = pattern(seed, one.length)
    return (
        one.header == pattern(seed + 1_000_000, HEADER_BYTES) and one.payload[: one.length] == right
    )


async def ready(backend: Backend) -> None:
    """Wait until the backend knows what it holds."""
    await until(lambda: backend.usage().scanned >= 1.0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def found(backend: Backend, space: Namespace, keys: Sequence[ObjectKey]) -> list[bool]:
    """What `contains` says, at once or later."""
    answer = backend.contains(space, keys)
    return list(await answer if isinstance(answer, Awaitable) else answer)


async def names(backend: Backend) -> set[tuple[str, ObjectKey, int]]:
    """All that `names` yields; nothing twice."""
    listed = [name async for name in backend.names()]
    assert len(listed) == len(set(listed)), "names yields an object twice"
    return set(listed)


async def store(backend: Backend, *items: Item) -> None:
    """Put, and all of it is stored."""
    outcomes = list(await backend.put(items))
    assert outcomes == [IoOutcome.OK] * len(items), outcomes


class BackendContract:
    """Inherit, implement `make`, run with pytest."""

    durable = True  # objects survive close and open at the same place

    async def make(self, place: Path) -> Backend:
        """A backend, not open yet, that keeps its things in `place`; its parent exists."""
        raise NotImplementedError("a contract test says here how its backend is made")

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        """Run one test; override it for another event loop."""
        asyncio.run(main)

    def on(self, place: Path, body: Callable[[Backend], Coroutine[Any, Any, None]]) -> None:
        """Run `body` with a backend that is open and knows what it holds."""
        self.run(self._opened(place, body))

    async def _opened(
        self, place: Path, body: Callable[[Backend], Coroutine[Any, Any, None]]
    ) -> None:
        backend = await self.make(place)
        await backend.open()
        try:
            await ready(backend)
            await body(backend)
        finally:
            await backend.close()

    def test_absent(self, tmp_path: Path) -> None:
        """What was never stored is not found, and asking for it is no error."""
        self.on(tmp_path / "store", _absent)

    def test_round_trip(self, tmp_path: Path) -> None:
        """Every length comes back as it was, header too."""
        self.on(tmp_path / "store", _round_trip)

    def test_replace(self, tmp_path: Path) -> None:
        """The newer object is found, also when it has another length."""
        self.on(tmp_path / "store", _replace)

    def test_other_length(self, tmp_path: Path) -> None:
        """Asked with another length: its own size is told, and its header is there."""
        self.on(tmp_path / "store", _other_length)

    def test_mixed_batch(self, tmp_path: Path) -> None:
        """Each object of a batch has its own answer, in order."""
        self.on(tmp_path / "store", _mixed_batch)

    def test_empty_batch(self, tmp_path: Path) -> None:
        """Nothing asked, nothing answered."""
        self.on(tmp_path / "store", _empty_batch)

    def test_neighbours(self, tmp_path: Path) -> None:
        """Keys that differ in one field, and namespaces, are different objects."""
        self.on(tmp_path / "store", _neighbours)

    def test_delete(self, tmp_path: Path) -> None:
        """A deleted object is gone, others stay, and it can be stored again."""
        self.on(tmp_path / "store", _delete)

    def test_delete_broken(self, tmp_path: Path) -> None:
        """The same for one that is broken, wherever it is kept."""
        self.on(tmp_path / "store", _delete_broken)

    def test_forget(self, tmp_path: Path) -> None:
        """All salts of the fingerprint are gone, other fingerprints stay."""
        self.on(tmp_path / "store", _forget)

    def test_names(self, tmp_path: Path) -> None:
        """Every object once, with its label, key and size."""
        self.on(tmp_path / "store", _names)

    def test_concurrent(self, tmp_path: Path) -> None:
        """Many calls at once do not mix their objects."""
        self.on(tmp_path / "store", _concurrent)

    def test_one_of_two_writers(self, tmp_path: Path) -> None:
        """Writers of one key at once: what is read is all of one of them."""
        self.on(tmp_path / "store", _one_of_two_writers)

    def test_memory_is_left_alone(self, tmp_path: Path) -> None:
        """After a call the memory is the caller's: neither read nor written any more."""
        self.on(tmp_path / "store", _memory_is_left_alone)

    def test_probe(self, tmp_path: Path) -> None:
        """A probe works, again and again, and leaves nothing that is found."""
        self.on(tmp_path / "store", _probe)

    def test_usage(self, tmp_path: Path) -> None:
        """What is counted is right after storing and, in the end, after deleting."""
        self.on(tmp_path / "store", _usage)

    def test_names_cannot_leave_the_place(self, tmp_path: Path) -> None:
        """Salts and model names come from clients and are never a path."""
        place = tmp_path / "in" / "store"
        place.parent.mkdir()
        self.on(place, _nasty_names)
        assert {path.name for path in tmp_path.iterdir()} == {"in"}
        assert {path.name for path in place.parent.iterdir()} <= {"store"}

    def test_reopen(self, tmp_path: Path) -> None:
        """A durable backend finds everything again after close and open."""
        if self.durable:
            self.on(tmp_path / "store", _store_some)
            self.on(tmp_path / "store", _find_some)


async def _absent(backend: Backend) -> None:
    assert await found(backend, SPACE, [key(1), key(2)]) == [False, False]
    assert list(await backend.get([item(SPACE, key(1), 100), item(SPACE, key(2), 5000)])) == [
        ABSENT,
        ABSENT,
    ]
    await backend.delete(SPACE, [key(1)])
    await backend.delete(SPACE, [key(1)], broken=True)
    await backend.forget(SPACE)
    assert await names(backend) == set()


async def _round_trip(backend: Backend) -> None:
    for seed, length in enumerate(LENGTHS):
        await store(backend, filled(SPACE, key(seed), length, seed=seed))
    assert all(await found(backend, SPACE, [key(seed) for seed in range(len(LENGTHS))]))
    for seed, length in enumerate(LENGTHS):
        target = item(SPACE, key(seed), length)
        assert list(await backend.get([target])) == [length]
        assert is_filled(target, seed=seed), f"an object of {length} bytes came back changed"


async def _replace(backend: Backend) -> None:
    for seed, length in enumerate((50_000, 50_000, 300, 90_000)):
        await store(backend, filled(SPACE, key(1), length, seed=seed))
        target = item(SPACE, key(1), length)
        assert list(await backend.get([target])) == [length]
        assert is_filled(target, seed=seed)
    assert await names(backend) == {(label(SPACE), key(1), 90_000)}


async def _other_length(backend: Backend) -> None:
    await store(backend, filled(SPACE, key(1), 5_000, seed=3))
    for asked in (1, 4_999, 5_001, 8_192, 50_000):
        target = item(SPACE, key(1), asked)
        assert list(await backend.get([target])) == [5_000], f"asked with {asked} bytes"
        assert target.header == pattern(1_000_003, HEADER_BYTES)


async def _mixed_batch(backend: Backend) -> None:
    await store(backend, *(filled(SPACE, key(n), 1_000 + n, seed=n) for n in range(0, 20, 2)))
    targets = [item(SPACE, key(n), 1_000 + n) for n in range(20)]
    sizes = list(await backend.get(targets))
    assert sizes == [1_000 + n if n % 2 == 0 else ABSENT for n in range(20)]
    assert all(is_filled(targets[n], seed=n) for n in range(0, 20, 2))
    assert await found(backend, SPACE, [key(n) for n in range(20)]) == [
        n % 2 == 0 for n in range(20)
    ]


async def _empty_batch(backend: Backend) -> None:
    assert await found(backend, SPACE, []) == []
    assert list(await backend.get([])) == []
    assert list(await backend.put([])) == []
    await backend.delete(SPACE, [])


async def _neighbours(backend: Backend) -> None:
    keys = [key(1), key(1, world=2), key(1, world=2, rank=1), key(1, group=1), key(2)]
    places = [(space, name) for space in (SPACE, SALTED, OTHER) for name in keys]
    await store(backend, *(filled(*place, 200, seed=seed) for seed, place in enumerate(places)))
    for seed, place in enumerate(places):
        target = item(*place, 200)
        assert list(await backend.get([target])) == [200]
        assert is_filled(target, seed=seed), f"{place} has another object's bytes"


async def _delete(backend: Backend) -> None:
    await _delete_some(backend, broken=False)


async def _delete_broken(backend: Backend) -> None:
    await _delete_some(backend, broken=True)


async def _delete_some(backend: Backend, *, broken: bool) -> None:
    await store(backend, *(filled(SPACE, key(n), 9_000, seed=n) for n in range(4)))
    await store(backend, filled(SALTED, key(1), 9_000))
    await backend.delete(SPACE, [key(1), key(3), key(9)], broken=broken)
    keys = [key(n) for n in range(4)]
    assert await found(backend, SPACE, keys) == [True, False, True, False]
    assert await found(backend, SALTED, [key(1)]) == [True]
    targets = [item(SPACE, name, 9_000) for name in keys]
    assert list(await backend.get(targets)) == [9_000, ABSENT, 9_000, ABSENT]
    assert {name for _, name, _ in await names(backend)} == {key(0), key(1), key(2)}
    await store(backend, filled(SPACE, key(1), 7_000, seed=7))
    again = item(SPACE, key(1), 7_000)
    assert list(await backend.get([again])) == [7_000]
    assert is_filled(again, seed=7)


async def _forget(backend: Backend) -> None:
    for space in (SPACE, SALTED, OTHER):
        await store(backend, *(filled(space, key(n), 300, seed=n) for n in range(3)))
    await backend.forget(SALTED)
    keys = [key(n) for n in range(3)]
    assert not any(await found(backend, SPACE, keys))
    assert not any(await found(backend, SALTED, keys))
    assert all(await found(backend, OTHER, keys))
    assert list(await backend.get([item(SPACE, key(0), 300)])) == [ABSENT]
    assert {space for space, _, _ in await names(backend)} == {label(OTHER)}
    await store(backend, filled(SPACE, key(0), 300))
    assert await found(backend, SPACE, keys) == [True, False, False]


async def _names(backend: Backend) -> None:
    places = [(space, key(n, rank=n, world=9)) for space in (SPACE, SALTED) for n in range(9)]
    await store(backend, *(filled(*place, 100 + n, seed=n) for n, place in enumerate(places)))
    expected = {(label(space), name, 100 + n) for n, (space, name) in enumerate(places)}
    assert await names(backend) == expected


async def _concurrent(backend: Backend) -> None:
    lengths = [1 + 977 * n for n in range(40)]
    await asyncio.gather(
        *(store(backend, filled(SPACE, key(n), size, seed=n)) for n, size in enumerate(lengths))
    )
    targets = [item(SPACE, key(n), size) for n, size in enumerate(lengths)]
    answers = await asyncio.gather(*(backend.get([target]) for target in targets))
    assert [list(sizes) for sizes in answers] == [[size] for size in lengths]
    assert all(is_filled(target, seed=n) for n, target in enumerate(targets))


async def _one_of_two_writers(backend: Backend) -> None:
    length = 200_000
    for round_ in range(5):
        seeds = range(4 * round_, 4 * round_ + 4)
        await asyncio.gather(
            *(store(backend, filled(SPACE, key(1), length, seed=seed)) for seed in seeds)
        )
        target = item(SPACE, key(1), length)
        assert list(await backend.get([target])) == [length]
        assert any(is_filled(target, seed=seed) for seed in seeds), "two writes were mixed"
    assert len(await names(backend)) == 1


async def _memory_is_left_alone(backend: Backend) -> None:
    source = filled(SPACE, key(1), 30_000, seed=1)
    await store(backend, source)
    source.header[:] = bytes(HEADER_BYTES)
    source.payload[:] = bytes(len(source.payload))
    target = item(SPACE, key(1), 30_000)
    assert list(await backend.get([target])) == [30_000]
    assert is_filled(target, seed=1), "the backend kept the memory instead of the bytes"
    target.header[:] = b"\x3c" * HEADER_BYTES
    target.payload[:] = b"\x3c" * len(target.payload)
    await store(backend, *(filled(SPACE, key(n), 30_000, seed=n) for n in range(2, 6)))
    await backend.get([item(SPACE, key(n), 30_000) for n in range(1, 6)])
    assert target.header == b"\x3c" * HEADER_BYTES
    assert target.payload == b"\x3c" * len(target.payload)


async def _probe(backend: Backend) -> None:
    await store(backend, filled(SPACE, key(1), 100))
    for _ in range(3):
        await backend.probe()
    assert await names(backend) == {(label(SPACE), key(1), 100)}


async def _usage(backend: Backend) -> None:
    before = backend.usage()
    assert before.objects in (0, None)
    await store(backend, *(filled(SPACE, key(n), 10_000, seed=n) for n in range(5)))
    await store(backend, filled(SPACE, key(0), 10_000, seed=9))
    full = backend.usage()
    assert full.objects in (5, None)
    if full.used_bytes is not None:
        assert full.used_bytes >= 50_000
        assert full.capacity_bytes is None or full.used_bytes <= full.capacity_bytes
    await backend.delete(SPACE, [key(n) for n in range(5)])
    assert backend.usage().objects in (0, None)
    await until(lambda: backend.usage().used_bytes in (before.used_bytes, None))


async def _nasty_names(backend: Backend) -> None:
    spaces = [Namespace(SPACE.fingerprint, text, text) for text in NASTY]
    for seed, space in enumerate(spaces):
        await store(backend, filled(space, key(1), 500, seed=seed))
    for seed, space in enumerate(spaces):
        target = item(space, key(1), 500)
        assert list(await backend.get([target])) == [500]
        assert is_filled(target, seed=seed)


async def _store_some(backend: Backend) -> None:
    for space in (SPACE, SALTED):
        await store(backend, *(filled(space, key(n), 6_000 + n, seed=n) for n in range(8)))
    await backend.delete(SPACE, [key(0)])
    await backend.delete(SPACE, [key(1)], broken=True)


async def _find_some(backend: Backend) -> None:
    keys = [key(n) for n in range(8)]
    assert await found(backend, SPACE, keys) == [False] * 2 + [True] * 6
    assert all(await found(backend, SALTED, keys))
    targets = [item(space, key(n), 6_000 + n) for space in (SPACE, SALTED) for n in range(2, 8)]
    assert list(await backend.get(targets)) == [target.length for target in targets]
    assert all(is_filled(target, seed=2 + n % 6) for n, target in enumerate(targets))
    assert backend.usage().objects in (14, None)
    assert len(await names(backend)) == 14
