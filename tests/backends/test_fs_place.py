"""The directory of `fs`: one server each, a fixed capacity; read-only, vanished, and back."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
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
    settings,
)

from kvkeep.backends import fs_files, fs_scan
from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.fs import FsBackend
from kvkeep.backends.fs_open import open_place
from kvkeep.backends.fs_trouble import READ_ONLY_AGAIN_NS
from kvkeep.errors import BackendError
from kvkeep.testing.backend_contract import (
    SPACE,
    filled,
    item,
    key,
    ready,
)
from kvkeep.types import IoOutcome

# ---- the directory


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2"):
            with pytest.raises(
                BackendError, match=f"two backends of this server use {tmp_path}/l2"
            ):
                await FsBackend(settings(tmp_path / "l2")).open()
        async with opened(tmp_path / "l2"):
            pass

    asyncio.run(main())


def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    """Also with one that was killed."""
    script = (
        "import sys, time; from pathlib import Path;"
        "from kvkeep.backends.fs_open import open_place;"
        "place = open_place(Path(sys.argv[1]), capacity_bytes=1 << 20);"
        "print('open', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "l2")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        with pytest.raises(BackendError, match=f"pid {child.pid}"):
            open_place(tmp_path / "l2", capacity_bytes=None)
        child.kill()
    assert open_place(tmp_path / "l2", capacity_bytes=None).identity is not None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: None, "create .* first"),
        (lambda root: (root.parent.mkdir(), root.write_text("x")), "is not a directory"),
        (
            lambda root: (root.mkdir(parents=True), (root / "kvkeep.json").write_text("{")),
            "cannot be read",
        ),
        (
            lambda root: (root.mkdir(parents=True), root.chmod(0o757)),
            "may be written by everybody.*chmod o-w",
        ),
    ],
)
def test_a_place_that_cannot_be_used(tmp_path: Path, make: object, says: str) -> None:
    assert callable(make)
    make(tmp_path / "missing" / "l2")
    with pytest.raises(BackendError, match=says):
        asyncio.run(FsBackend(settings(tmp_path / "missing" / "l2")).open())


def test_the_directory_is_private(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1)
            assert (tmp_path / "l2").stat().st_mode & 0o777 == 0o700
            assert path_of(tmp_path / "l2", key(1)).stat().st_mode & 0o777 == 0o600

    asyncio.run(main())


def test_the_capacity_of_the_first_start_stays(tmp_path: Path) -> None:
    async def capacity(given: int | None) -> int | None:
        async with opened(tmp_path / "l2", given) as backend:
            return backend.usage().capacity_bytes

    first = asyncio.run(capacity(None))
    stat = os.statvfs(tmp_path)
    assert first is not None
    assert 0.5 * stat.f_bavail * stat.f_frsize < first < 0.9 * stat.f_bavail * stat.f_frsize
    assert asyncio.run(capacity(None)) == first
    assert asyncio.run(capacity(5 << 20)) == 5 << 20
    assert asyncio.run(capacity(None)) == 5 << 20


def test_a_smaller_capacity_evicts_at_start(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path / "l2") as backend:
            await put(backend, *range(40))
        async with opened(tmp_path / "l2", 10 * DISK_BYTES) as backend:
            assert backend.usage().objects == 10
            assert disk_usage(tmp_path / "l2") == 10 * DISK_BYTES
            assert [n for n in range(40) if await has(backend, n)] == list(range(30, 40))

    asyncio.run(main())


# ---- read-only, vanished, full


@contextlib.contextmanager
def read_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every attempt to write fails as on a disk that is mounted read-only."""
    real_open, real_access = os.open, os.access

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def opens(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return real_open(path, flags, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opens)
        patch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real_access(path, mode))
        for name in ("mkdir", "rename", "unlink", "utime"):
            patch.setattr(os, name, refuse)
        yield


def test_a_read_only_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 10**18

    async def main() -> None:
        nonlocal now_ns
        async with opened(tmp_path / "l2") as backend:
            await put(backend, 1)
        with contextlib.ExitStack() as disk:
            disk.enter_context(read_only(monkeypatch))
            async with opened(tmp_path / "l2", clock=lambda: now_ns) as backend:
                assert await has(backend, 1)
                assert await backend.put([filled(SPACE, key(2), LENGTH)]) == [IoOutcome.REFUSED]
                assert backend.usage().read_only
                await backend.probe()
                disk.close()
                assert await backend.put([filled(SPACE, key(2), LENGTH)]) == [IoOutcome.REFUSED]
                now_ns += READ_ONLY_AGAIN_NS
                await backend.put([filled(SPACE, key(2), LENGTH)])  # it looks: opened anew
                await ready(backend)
                await put(backend, 2)
                assert await has(backend, 1)
                assert not backend.usage().read_only

    asyncio.run(main())


def test_a_probe_beside_the_scan_keeps_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scan clears what earlier runs left in `tmp`, at the very moment when a probe writes."""
    place = open_place(tmp_path / "l2", capacity_bytes=1 << 20)
    left_over = tmp_path / "l2" / "tmp" / "0123456789abcdef"
    left_over.touch()
    real_close = os.close

    def close(fd: int) -> None:
        real_close(fd)
        with monkeypatch.context() as patch:
            patch.setattr(os, "close", real_close)
            fs_scan.clear_temporaries(place)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        fs_files.probe(place, memoryview(bytes(PAGE_BYTES)))
    assert not left_over.exists()


def test_a_vanished_directory_comes_back(tmp_path: Path) -> None:
    root, away = tmp_path / "l2", tmp_path / "away"

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1, 2)
            root.rename(away)
            for call in (
                backend.get([item(SPACE, key(1), LENGTH)]),
                backend.put([filled(SPACE, key(3), LENGTH)]),
                backend.probe(),
            ):
                with pytest.raises(BackendError, match=f"{root} has vanished"):
                    await call
            root.mkdir()
            (root / "other").touch()  # something else is mounted there
            with pytest.raises(BackendError, match="another directory"):
                await backend.probe()
            assert [path.name for path in root.iterdir()] == ["other"]
            (root / "other").unlink()
            root.rmdir()
            away.rename(root)
            path_of(root, key(2)).unlink()
            await backend.probe()
            await ready(backend)
            assert await has(backend, 1)
            assert not await has(backend, 2)
            await put(backend, 3)
            assert backend.usage().objects == 2

    asyncio.run(main())


@pytest.mark.parametrize("device", [0, 1])
def test_a_mount_point_without_its_disk_is_left_alone(tmp_path: Path, device: int) -> None:
    """An empty directory, on the same device or another, where ours was."""
    place = open_place(tmp_path / "l2", capacity_bytes=1 << 20)
    place.release()
    (tmp_path / "l2").rename(tmp_path / "away")
    (tmp_path / "l2").mkdir()
    place.device += device
    with pytest.raises(BackendError, match="another directory"):
        open_place(tmp_path / "l2", capacity_bytes=None, before=place)
    assert not list((tmp_path / "l2").iterdir())


def test_a_new_directory_at_the_same_path_is_not_adopted(tmp_path: Path) -> None:
    root = tmp_path / "l2"
    says = f"{root} is another directory than the one that was opened: mount its disk again, or"

    async def main() -> None:
        async with opened(root) as backend:
            await put(backend, 1)
            root.rename(tmp_path / "away")
            root.mkdir()
            for _ in range(2):
                for call in (
                    backend.get([item(SPACE, key(1), LENGTH)]),
                    backend.put([filled(SPACE, key(2), LENGTH)]),
                    backend.probe(),
                ):
                    with pytest.raises(BackendError, match=says):
                        await call
            assert not list(root.iterdir())
            root.rmdir()
            (tmp_path / "away").rename(root)
            assert await has(backend, 1)  # at once
            await backend.probe()
            await put(backend, 2)

    asyncio.run(main())


# ---- the lock


def test_a_removed_lock_file_lets_nobody_in(tmp_path: Path) -> None:
    root = tmp_path / "l2"

    async def main() -> None:
        async with opened(root):
            (root / "lock").unlink()
            with pytest.raises(BackendError, match=f"{root} is in use by another server"):
                await FsBackend(settings(root)).open()
            assert not (root / "lock").exists()
        async with opened(root):
            assert (root / "lock").read_text().startswith(f"{os.getpid()}\n")

    asyncio.run(main())


def test_where_directories_have_no_locks_the_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.flock

    def no_directories(fd: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", no_directories)
    place = open_place(tmp_path / "l2", capacity_bytes=1 << 20)
    with pytest.raises(BackendError, match="two backends of this server"):
        open_place(tmp_path / "l2", capacity_bytes=2 << 20)
    assert json.loads((tmp_path / "l2" / "kvkeep.json").read_text())["capacity_bytes"] == 1 << 20
    place.release()


def test_an_equal_pid_of_another_container_is_another_server(tmp_path: Path) -> None:
    place = open_place(tmp_path / "l2", capacity_bytes=1 << 20)
    (tmp_path / "l2" / "lock").write_text(f"{os.getpid()}\nanother boot pid:[1]\n")
    with pytest.raises(BackendError, match=rf"another server \(pid {os.getpid()}\)"):
        open_place(tmp_path / "l2", capacity_bytes=1 << 20)
    place.release()
