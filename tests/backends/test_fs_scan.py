"""The scan of `fs` at start: complete, in slices, in nobody's way, whatever lies around."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.backends.fs_cases import DISK_BYTES, LENGTH, disk_usage, has, opened, path_of, put
from tests.backends.fs_cases import settings as fs_settings

from kvkeep.backends import fs_rebuild, fs_scan
from kvkeep.backends.base import ABSENT, HEADER_BYTES
from kvkeep.backends.fs import FsBackend
from kvkeep.backends.fs_open import open_place
from kvkeep.backends.fs_place import Place
from kvkeep.backends.header import label
from kvkeep.testing.backend_contract import (
    OTHER,
    SPACE,
    filled,
    found,
    item,
    key,
    names,
    ready,
    until,
)
from kvkeep.types import IoOutcome

SECONDS_FOR_ALL = 20.0  # generous: a shared machine under load


def sow(root: Path, count: int) -> None:
    """That many files of a header page and one byte, under objects' names."""
    place = open_place(root, capacity_bytes=1 << 40)
    place.release()
    made = set()
    for number in range(count):
        path = path_of(root, key(number))
        if path.parent not in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            made.add(path.parent)
        fd = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.ftruncate(fd, HEADER_BYTES + 1)
        os.close(fd)


def check_everything_is_known(root: Path, count: int) -> None:
    sow(root, count)

    async def main() -> None:
        slices: list[int] = []
        real = fs_rebuild._Walk._take

        def counted(walk: fs_rebuild._Walk, *batch: object) -> None:
            assert isinstance(batch[1], list)
            slices.append(len(batch[1]))
            real(walk, *batch)  # type: ignore[arg-type]

        fs_rebuild._Walk._take = counted  # type: ignore[method-assign,assignment]
        try:
            started = time.monotonic()
            async with opened(root, None) as backend:
                took_s = time.monotonic() - started
        finally:
            fs_rebuild._Walk._take = real  # type: ignore[method-assign]
        assert backend.usage().objects == count == sum(slices)
        assert backend.usage().used_bytes == 2 * 4096 * count
        assert max(slices) <= fs_scan.SLICE
        assert took_s < SECONDS_FOR_ALL
        assert backend.contains(SPACE, [key(0), key(count - 1), key(count)]) == [True, True, False]

    asyncio.run(main())


def test_two_thousand_files(tmp_path: Path) -> None:
    check_everything_is_known(tmp_path / "l2", 2_000)


@pytest.mark.slow
def test_a_hundred_thousand_files(tmp_path: Path) -> None:
    check_everything_is_known(tmp_path / "l2", 100_000)


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "l2"

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1)
        good = path_of(root, key(1))
        strange = [
            root / "README",
            root / "lost+found",
            root / label(SPACE) / "zz",
            good.with_suffix(".bak"),
            good.with_name(f"0{good.name}"),
            good.with_name(good.name.replace("1-0.0", "01-0.0")),
            root / label(SPACE) / "not a shard",
        ]
        for path in strange:
            path.write_bytes(b"x")
        (good.parent / key(1).chunk.hex()).symlink_to(good)
        (root / ("f" * 32)).mkdir()
        async with opened(root) as backend:
            assert await has(backend, 1)
            assert await names(backend) == {(label(SPACE), key(1), LENGTH)}
            assert backend.usage().used_bytes == DISK_BYTES
        assert all(path.exists() for path in strange)

    asyncio.run(main())


class Held:
    """Stops the scan with the first directory in its hands until told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.has_listed = threading.Event()
        real = fs_scan.listing

        def slowly(place: Place, name: str, shard: str) -> fs_scan.Listing:
            found = real(place, name, shard)  # what was there before anything changes
            self.has_listed.set()
            assert self.go_on.wait(20)
            return found

        monkeypatch.setattr(fs_scan, "listing", slowly)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    gate = Held(monkeypatch)
    yield gate
    gate.go_on.set()


async def scanning(root: Path, held: Held) -> FsBackend:
    """A backend whose scan is held up."""
    backend = FsBackend(fs_settings(root))
    held.has_listed.clear()
    await backend.open()
    assert await asyncio.to_thread(held.has_listed.wait, 20)
    assert backend.usage().scanned < 1.0
    return backend


async def _store_five(root: Path) -> None:
    async with opened(root) as backend:
        await put(backend, *range(5))


def test_serving_does_not_wait_for_the_scan(tmp_path: Path, held: Held) -> None:
    held.go_on.set()
    asyncio.run(_store_five(tmp_path / "l2"))
    held.go_on.clear()

    async def main() -> None:
        backend = await scanning(tmp_path / "l2", held)
        assert await found(backend, SPACE, [key(n) for n in range(7)]) == [True] * 5 + [False] * 2
        assert await found(backend, OTHER, [key(1)]) == [False]
        assert await has(backend, 3)
        assert not await has(backend, 6)
        refused = await backend.put([filled(SPACE, key(9), LENGTH)])
        assert list(refused) == [IoOutcome.REFUSED]
        held.go_on.set()
        await ready(backend)
        assert isinstance(backend.contains(SPACE, [key(1)]), list)
        await put(backend, 9)
        assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == 6 * DISK_BYTES
        await backend.close()

    asyncio.run(main())


def test_what_changes_during_the_scan_is_right_after_it(tmp_path: Path, held: Held) -> None:
    held.go_on.set()
    asyncio.run(_store_five(tmp_path / "l2"))
    held.go_on.clear()

    async def main() -> None:
        backend = await scanning(tmp_path / "l2", held)
        keys = sorted(key(n) for n in range(5))  # the first one is listed already
        await backend.delete(SPACE, [keys[0]])
        await backend.delete(SPACE, [keys[1]], broken=True)
        for _ in range(2):
            assert await found(backend, SPACE, keys) == [False] * 2 + [True] * 3
            assert list(await backend.get([item(SPACE, keys[0], LENGTH)])) == [ABSENT]
            held.go_on.set()
            await ready(backend)
        assert backend.usage().objects == 3
        assert backend.usage().quarantined_objects == 1
        assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == 4 * DISK_BYTES
        await backend.close()

    asyncio.run(main())


def test_forgetting_during_the_scan(tmp_path: Path, held: Held) -> None:
    held.go_on.set()
    asyncio.run(_store_five(tmp_path / "l2"))
    held.go_on.clear()

    async def main() -> None:
        backend = await scanning(tmp_path / "l2", held)
        await backend.forget(SPACE)
        assert not any(await found(backend, SPACE, [key(n) for n in range(5)]))
        held.go_on.set()
        await ready(backend)
        assert backend.usage().objects == 0
        assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == 0
        await backend.close()

    asyncio.run(main())


@pytest.mark.slow
def test_closing_during_the_scan(tmp_path: Path, held: Held) -> None:
    held.go_on.set()
    asyncio.run(_store_five(tmp_path / "l2"))
    held.go_on.clear()

    async def main() -> None:
        backend = await scanning(tmp_path / "l2", held)
        await backend.close()  # though its thread is stuck
        async with asyncio.timeout(20):
            again = await scanning(tmp_path / "l2", held)
            held.go_on.set()
            await ready(again)
            await again.close()

    asyncio.run(main())


def test_a_failing_scan_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(_store_five(tmp_path / "l2"))
    real, calls = fs_scan.listing, [0]

    def broken(place: Place, name: str, shard: str) -> fs_scan.Listing:
        calls[0] += 1
        if calls[0] == 3:
            raise OSError(5, "Input/output error")
        return real(place, name, shard)

    monkeypatch.setattr(fs_scan, "listing", broken)
    monkeypatch.setattr(fs_rebuild, "AGAIN_S", 0.01)

    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            assert backend.usage().objects == 5
            assert backend.usage().used_bytes == 5 * DISK_BYTES
            assert "Input/output" in backend.last_error

    asyncio.run(main())


def test_a_stuck_disk_holds_up_neither_close_nor_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All readers hang; stores go on; closing leaves the threads behind."""
    go_on, stuck = threading.Event(), list[int]()
    real = os.preadv

    def hangs(fd: int, memory: list[memoryview], offset: int) -> int:
        stuck.append(fd)
        assert go_on.wait(60)
        return real(fd, memory, offset)

    async def main() -> None:
        backend = FsBackend(fs_settings(tmp_path / "l2"))
        await backend.open()
        await ready(backend)
        await put(backend, *range(8))
        monkeypatch.setattr(os, "preadv", hangs)
        reads = [
            asyncio.ensure_future(backend.get([item(SPACE, key(n), LENGTH)])) for n in range(8)
        ]
        await until(lambda: len(stuck) == 8)
        await put(backend, 9)
        await backend.close()
        assert not any(read.done() for read in reads)
        go_on.set()
        assert [list(sizes) for sizes in await asyncio.gather(*reads)] == [[LENGTH]] * 8

    asyncio.run(main())
