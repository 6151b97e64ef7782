"""`fs` and trouble: one bad file is its own matter, and each trouble is said once."""

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.backends.fs_cases import (
    DISK_BYTES,
    LENGTH,
    disk_usage,
    has,
    opened,
    path_of,
    put,
    stored,
    wanted,
)

from kvkeep.backends import fs_rebuild
from kvkeep.backends.fs_trouble import FULL_ENDS_NS, READ_ONLY_AGAIN_NS
from kvkeep.testing.backend_contract import SPACE, filled, item, key, until
from kvkeep.types import IoOutcome

ONE_FILE = [errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENOTDIR]
LOGGER = "kvkeep.server.fs"


def refuse(
    patch: pytest.MonkeyPatch, call: str, code: int, concerns: Callable[[str], bool]
) -> None:
    """This call fails for these names."""
    real = getattr(os, call)

    def broken(*names: object, **more: object) -> object:
        if any(isinstance(name, str) and concerns(name) for name in names):
            raise OSError(code, os.strerror(code))
        return real(*names, **more)

    patch.setattr(os, call, broken)


def is_of(number: int) -> Callable[[str], bool]:
    return lambda name: key(number).chunk.hex() in name


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if not record.message.startswith("l2_scan")]


# ---- one bad file


@pytest.mark.parametrize("code", ONE_FILE)
def test_a_file_that_cannot_be_opened_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            for number in (1, 2):
                await store.put([wanted(number, LENGTH, fill=True)])
            with monkeypatch.context() as patch:
                refuse(patch, "open", code, is_of(1))
                for _ in range(10):
                    [outcome] = await store.get([wanted(1, LENGTH)])
                    assert outcome in (IoOutcome.CORRUPT, IoOutcome.MISSING)
            assert store.usage().quarantined_objects == 1
            assert await store.get([wanted(2, LENGTH)]) == [IoOutcome.OK]
            assert store.status()["state"] == "closed"
            assert await store.put([wanted(1, LENGTH, fill=True)]) == [IoOutcome.OK]
            assert store.usage().used_bytes == disk_usage(tmp_path / "l2")

    asyncio.run(main())


def test_the_header_page_of_a_bad_file_is_zeroed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1)
            refuse(monkeypatch, "open", errno.EACCES, is_of(1))
            one = item(SPACE, key(1), LENGTH)
            one.header[:] = b"x" * len(one.header)
            assert await backend.get([one]) == [0]
            assert not any(one.header)

    asyncio.run(main())


def test_a_root_that_is_shut_is_no_matter_of_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1)
            with monkeypatch.context() as patch:
                refuse(patch, "open", errno.EACCES, is_of(1))
                patch.setattr(os, "access", lambda path, mode: False)
                with pytest.raises(PermissionError):
                    await backend.get([item(SPACE, key(1), LENGTH)])
            assert await has(backend, 1)

    asyncio.run(main())


def test_what_is_in_the_way_of_a_store_is_moved(tmp_path: Path) -> None:
    root = tmp_path / "l2"

    async def main() -> None:
        async with opened(root) as backend:
            path_of(root, key(1)).mkdir(parents=True)
            (path_of(root, key(1)) / "inside").write_text("x")
            path_of(root, key(300)).parent.parent.mkdir(exist_ok=True)
            path_of(root, key(300)).parent.write_text("a file where a shard belongs")
            await put(backend, 1, 300)
            assert await has(backend, 1)
            assert await has(backend, 300)
            assert backend.usage().quarantined_objects == 2
            aside = sorted((root / "quarantine").iterdir(), key=lambda path: path.is_dir())
            assert aside[0].read_text() == "a file where a shard belongs"
            assert (aside[1] / "inside").read_text() == "x"
        async with opened(root) as backend:
            assert backend.usage().objects == backend.usage().quarantined_objects == 2

    assert path_of(root, key(1)).parent != path_of(root, key(300)).parent
    asyncio.run(main())


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR])
def test_what_cannot_be_moved_is_full_for_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1)
            with monkeypatch.context() as patch:
                refuse(patch, "rename", code, is_of(1))
                both = [filled(SPACE, key(1), LENGTH), filled(SPACE, key(2), LENGTH)]
                assert await backend.put(both) == [IoOutcome.FULL, IoOutcome.OK]
                assert os.strerror(code) in backend.last_error
                await backend.delete(SPACE, [key(1)], broken=True)  # stays on disk, and counts
                assert backend.usage().objects == 1
                assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == 2 * DISK_BYTES
            await put(backend, 1)
            assert backend.usage().used_bytes == disk_usage(tmp_path / "l2") == 2 * DISK_BYTES

    asyncio.run(main())


@pytest.mark.parametrize("can_move", [True, False])
def test_one_file_that_cannot_be_evicted_fails_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_move: bool
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2", 3 * DISK_BYTES) as backend:
            await put(backend, 0, 1, 2)
            refuse(monkeypatch, "unlink", errno.EPERM, is_of(0))
            if not can_move:
                refuse(monkeypatch, "rename", errno.EPERM, is_of(0))
            await put(backend, 3, 4, 5)
            assert [n for n in range(6) if await has(backend, n)] == [4, 5]
            usage = backend.usage()
            assert usage.used_bytes == disk_usage(tmp_path / "l2") == 3 * DISK_BYTES
            assert usage.quarantined_objects == 0

    asyncio.run(main())


def test_an_object_that_became_a_directory_is_deleted(tmp_path: Path) -> None:
    root = tmp_path / "l2"

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1)
            path_of(root, key(1)).unlink()
            path_of(root, key(1)).mkdir()
            await backend.delete(SPACE, [key(1)])
            assert not path_of(root, key(1)).exists()
            assert backend.usage().used_bytes == 0
            assert backend.usage().quarantined_objects == 1

    asyncio.run(main())


# ---- said once


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", LOGGER)
    now_ns = 10**18

    async def main() -> None:
        nonlocal now_ns
        async with opened(tmp_path / "l2", clock=lambda: now_ns) as backend:
            await put(backend, *range(8))
            caplog.clear()
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", _no_room)
                for number in (10, 11):
                    full = await backend.put([filled(SPACE, key(number), LENGTH)])
                    assert full == [IoOutcome.FULL]
            await put(backend, 12)  # near the edge: not over yet
            assert said(caplog) == ["l2_disk_full"]
            assert backend.usage().last_error == (
                "the disk is full at 128KiB of capacity 64MiB: set capacity to less"
            )
            now_ns += FULL_ENDS_NS
            await put(backend, 13, 14)
            assert said(caplog) == ["l2_disk_full", "l2_disk_has_room"]
            assert backend.usage().last_error == ""

    asyncio.run(main())


def _no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_read_only_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", LOGGER)
    now_ns = 10**18

    def refuses(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    async def main() -> None:
        nonlocal now_ns
        async with opened(tmp_path / "l2", clock=lambda: now_ns) as backend:
            await put(backend, 1)
            caplog.clear()
            with monkeypatch.context() as patch:
                patch.setattr(os, "pwritev", refuses)
                for number in range(5):
                    refused = await backend.put([filled(SPACE, key(number), LENGTH)])
                    assert refused == [IoOutcome.REFUSED]
                    now_ns += READ_ONLY_AGAIN_NS
            assert said(caplog) == ["l2_read_only"]
            await put(backend, 2, 3)
            assert said(caplog) == ["l2_read_only", "l2_writable"]

    asyncio.run(main())


def test_an_object_above_the_capacity_is_said_once_per_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2", 2 << 20) as backend:
            for number, length in enumerate((2 << 20, (2 << 20) + 1, 3 << 20, 4 << 20, 5 << 20)):
                large = filled(SPACE, key(number), length)
                assert await backend.put([large]) == [IoOutcome.FULL]

    asyncio.run(main())
    fields = [r.fields for r in caplog.records if r.message == "l2_object_too_large"]  # type: ignore[attr-defined]
    assert [(f["object_bytes"], f["capacity_bytes"]) for f in fields] == [
        (2 << 20, 2 << 20),
        (4 << 20, 2 << 20),
    ]


@pytest.mark.parametrize(("capacity_bytes", "times"), [(1 << 30, 0), (1 << 59, 1)])
def test_a_capacity_above_the_disk_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capacity_bytes: int, times: int
) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2", capacity_bytes):
            pass

    asyncio.run(main())
    assert [r.message for r in caplog.records].count("l2_capacity_above_disk") == times


@pytest.mark.parametrize(("again_s", "most"), [(3_600.0, 0), (0.0, 10)])
def test_the_scan_reports_tenths_but_not_in_a_hurry(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    again_s: float,
    most: int,
) -> None:
    caplog.set_level("INFO", LOGGER)
    monkeypatch.setattr(fs_rebuild, "SAY_AGAIN_S", again_s)

    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, *range(37))
        caplog.clear()
        async with opened(tmp_path / "l2") as backend:
            await until(lambda: backend.usage().objects == 37)

    asyncio.run(main())
    lines = [r.message for r in caplog.records].count("l2_scanning")
    assert (lines > 0) == (most > 0)
    assert lines <= most
