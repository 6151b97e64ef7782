"""The `fs` backend as a whole: what it evicts and forgets, and full or broken disks."""

import asyncio
import errno
import fcntl
import json
import os
import threading
from pathlib import Path
from time import time_ns

import pytest
from tests.backends.fs_cases import (
    CAPACITY_BYTES,
    DISK_BYTES,
    LENGTH,
    disk_usage,
    has,
    opened,
    put,
)

from kvkeep.backends import fs_scan
from kvkeep.backends.fs import from_url
from kvkeep.backends.fs_files import Direct, Files
from kvkeep.backends.fs_index import NS
from kvkeep.backends.fs_place import Place
from kvkeep.backends.fs_trouble import READ_ONLY_AGAIN_NS
from kvkeep.backends.header import label
from kvkeep.backends.registry import BackendUrl
from kvkeep.errors import ConfigError
from kvkeep.testing.backend_contract import (
    OTHER,
    SALTED,
    SPACE,
    filled,
    found,
    item,
    key,
    ready,
    store,
    until,
)
from kvkeep.types import IoOutcome

# ---- a full or broken disk


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_evicts_and_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real, calls = os.pwritev, [0]

    def full(fd: int, memory: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if calls[0] == 1:
            real(fd, [memory[0]], offset)
            raise OSError(code, os.strerror(code))
        return real(fd, memory, offset)

    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1, 2)
            monkeypatch.setattr(os, "pwritev", full)
            await put(backend, 3)
            assert [n for n in (1, 2, 3) if await has(backend, n)] == [2, 3]
            assert "the disk is full at" in backend.last_error
            assert not list((tmp_path / "l2" / "tmp").iterdir())
            assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == 2 * DISK_BYTES

    asyncio.run(main())


def test_a_disk_that_stays_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", full)
                assert list(await backend.put([filled(SPACE, key(2), LENGTH)])) == [IoOutcome.FULL]
            assert backend.usage().used_bytes == disk_usage(tmp_path / "l2")
            await put(backend, 2)

    asyncio.run(main())


def test_a_disk_that_turns_read_only_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_ns = 10**18

    def refuse(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async def main() -> None:
        nonlocal now_ns
        async with opened(tmp_path / "l2", clock=lambda: now_ns) as backend:
            await put(backend, 1)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", refuse)
                assert await backend.put([filled(SPACE, key(2), LENGTH)]) == [IoOutcome.REFUSED]
            assert backend.usage().read_only
            assert "Read-only" in backend.usage().last_error
            assert await backend.put([filled(SPACE, key(2), LENGTH)]) == [IoOutcome.REFUSED]
            assert await has(backend, 1)
            now_ns += READ_ONLY_AGAIN_NS
            await put(backend, 2)  # tried again, and now it works
            assert not backend.usage().read_only

    asyncio.run(main())


def test_other_errors_come_out_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = errno.EIO

    def broken(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1)
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", broken)
                patch.setattr(os, "preadv", broken)
                for call in (
                    backend.put([filled(SPACE, key(2), LENGTH)]),
                    backend.get([item(SPACE, key(1), LENGTH)]),
                    backend.probe(),
                ):
                    with pytest.raises(OSError, match=os.strerror(code)):
                        await call
            assert await has(backend, 1)
            await backend.probe()
            assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == DISK_BYTES

    asyncio.run(main())


# ---- what is evicted


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2", 4 * DISK_BYTES) as backend:
            await put(backend, 0, 1, 2, 3)
            assert await has(backend, 0)
            await put(backend, 4, 5)
            assert [n for n in range(6) if await has(backend, n)] == [0, 3, 4, 5]
            assert backend.usage().evicted_objects == 2

    asyncio.run(main())


def test_a_chunk_goes_before_its_ancestors_also_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            for depth in range(8):
                one = filled(SPACE, key(depth), LENGTH, seed=depth)
                deeper = type(one)(SPACE, one.key, one.header, one.payload, LENGTH, depth)
                await store(backend, deeper)
        async with opened(tmp_path / "l2", 4 * DISK_BYTES) as backend:
            held = backend.contains(SPACE, [key(n) for n in range(8)])
            assert held == [True] * 4 + [False] * 4

    asyncio.run(main())


def test_use_survives_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, *range(6))
            assert await has(backend, 1)
            assert await has(backend, 4)
        async with opened(tmp_path / "l2", 2 * DISK_BYTES) as backend:
            assert [n for n in range(6) if await has(backend, n)] == [1, 4]

    asyncio.run(main())


def test_quarantine_goes_before_any_object(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2", 4 * DISK_BYTES) as backend:
            await put(backend, 0, 1, 2, 3)
            await backend.delete(SPACE, [key(2)], broken=True)
            assert backend.usage().quarantined_objects == 1
            assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == 4 * DISK_BYTES
            await put(backend, 4)
            assert [n for n in range(5) if await has(backend, n)] == [0, 1, 3, 4]
            assert backend.usage().quarantined_objects == 0
            assert disk_usage(tmp_path / "l2") == 4 * DISK_BYTES

    asyncio.run(main())


def test_what_is_being_read_is_not_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, reading = threading.Event(), threading.Event()
    real = os.preadv

    def slowly(fd: int, memory: list[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(20)
        return real(fd, memory, offset)

    async def main() -> None:
        async with opened(tmp_path / "l2", 2 * DISK_BYTES) as backend:
            await put(backend, 0, 1)
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", slowly)
                read = asyncio.ensure_future(backend.get([item(SPACE, key(0), LENGTH)]))
                await asyncio.to_thread(reading.wait)
                later = time_ns() + 86_400 * NS  # so that what is being read is worth least
                patch.setattr(backend, "_clock", lambda: later)
                await put(backend, 2, 3, 4)
                there = await found(backend, SPACE, [key(n) for n in range(5)])
                assert there == [True, False, False, False, True]
                go_on.set()
                assert list(await read) == [LENGTH]

    asyncio.run(main())


def test_larger_than_everything_is_full(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2", 4 * DISK_BYTES) as backend:
            await put(backend, 0)
            large = filled(SPACE, key(1), 4 * DISK_BYTES)
            assert list(await backend.put([large])) == [IoOutcome.FULL]
            assert await has(backend, 0)

    asyncio.run(main())


def test_what_cannot_be_evicted_ends_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def main() -> None:
        async with opened(tmp_path / "l2", 2 * DISK_BYTES) as backend:
            await put(backend, 0, 1)
            with monkeypatch.context() as patch:
                patch.setattr(os, "unlink", broken)
                with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                    await backend.put([filled(SPACE, key(2), LENGTH)])
            assert backend.usage().used_bytes == disk_usage(tmp_path / "l2")
            await put(backend, 2)
            assert [n for n in range(3) if await has(backend, n)] == [0, 2]

    asyncio.run(main())


# ---- forgetting


def test_forgotten_files_are_deleted_and_their_room_is_free(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            for space in (SPACE, SALTED, OTHER):
                await store(backend, *(filled(space, key(n), LENGTH) for n in range(30)))
            await backend.forget(SPACE)
            await until(lambda: backend.usage().used_bytes == 30 * DISK_BYTES)
            await until(lambda: disk_usage(tmp_path / "l2") == 30 * DISK_BYTES)
            assert not any((tmp_path / "l2" / label(space)).exists() for space in (SPACE, SALTED))
            assert (await found(backend, OTHER, [key(1)])) == [True]

    asyncio.run(main())


def test_a_store_under_way_does_not_outlive_forgetting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            loop = asyncio.get_running_loop()
            arrived, go_on = asyncio.Event(), asyncio.Event()
            real = os.pwritev

            def slowly(fd: int, memory: list[memoryview], offset: int) -> int:
                loop.call_soon_threadsafe(arrived.set)
                asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
                return real(fd, memory, offset)

            monkeypatch.setattr(os, "pwritev", slowly)
            storing = asyncio.create_task(backend.put([filled(SPACE, key(1), LENGTH)]))
            await arrived.wait()
            await backend.forget(SPACE)
            go_on.set()
            assert list(await storing) == [IoOutcome.REFUSED]
            assert not await has(backend, 1)
            await until(lambda: disk_usage(tmp_path / "l2") == 0)
            assert backend.usage().used_bytes == 0

    asyncio.run(main())


def test_leftovers_of_earlier_runs_are_deleted(tmp_path: Path) -> None:
    root = tmp_path / "l2"

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1)
        (root / "tmp" / "0123456789abcdef").write_bytes(bytes(100))
        (root / label(SPACE)).rename(root / "trash-0123456789abcdef")
        async with opened(root) as backend:
            assert disk_usage(root) == 0
            assert not list(root.glob("trash-*"))
            assert backend.usage().used_bytes == 0

    asyncio.run(main())


# ---- the URL and O_DIRECT


def test_the_url_sets_everything(tmp_path: Path) -> None:
    url = BackendUrl(f"fs://{tmp_path}/a%20b?capacity=10MiB&direct=off&readers=3&writers=2&name=x")
    backend = from_url(url)
    url.refuse_unknown()
    assert backend.name == "x"

    async def main() -> None:
        await backend.open()
        await ready(backend)
        await backend.close()

    asyncio.run(main())
    identity = json.loads((tmp_path / "a b" / "kvkeep.json").read_text())
    assert identity["capacity_bytes"] == 10 << 20


@pytest.mark.parametrize(
    "text",
    [
        "fs:///",
        "fs://host/path",
        "fs:///l2?direct=maybe",
        "fs:///l2?readers=0",
        "fs:///l2?capacity=1KiB",
        "fs:///l2?capacity=much",
    ],
)
def test_a_bad_url_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        from_url(BackendUrl(text))


def test_without_o_direct_io_is_buffered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest, **more)

    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            monkeypatch.setattr(os, "open", refuse)
            await put(backend, 1, 2)
            assert await has(backend, 1)

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records].count("l2_buffered") == 1
    place = Place(tmp_path, os.open(tmp_path, os.O_RDONLY))
    with pytest.raises(OSError, match="Invalid"):
        Files(Direct.ON).write(place, "x", (memoryview(b""), memoryview(b"")), 0, value_ns=0)


def test_the_scan_module_names_files_as_documented() -> None:
    name = fs_scan.object_path(label(SPACE), key(1))
    assert name == f"{label(SPACE)}/{key(1).chunk.hex()[:2]}/{key(1).chunk.hex()}.1-0.0.kv"


def test_closing_gives_up_the_lock_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2", CAPACITY_BYTES) as backend:
            await put(backend, 1)
        with (tmp_path / "l2" / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    asyncio.run(main())
