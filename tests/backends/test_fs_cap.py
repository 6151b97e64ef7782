"""`fs` never takes more than its capacity: at every step, and when it is killed in the middle."""

import asyncio
import contextlib
import mmap
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.backends.fs_cases import content, disk_usage, opened, stored, wanted

from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.checked import Wanted
from kvkeep.testing.backend_contract import SPACE, filled, key
from kvkeep.types import IoOutcome

CAPACITY_BYTES = 8 << 20
LENGTH = 250_000
OBJECTS = 320  # ten times the capacity
DISK_BYTES = -(-(PAGE_BYTES + LENGTH) // PAGE_BYTES) * PAGE_BYTES
KILLS = 6


class Watch:
    """Looks at the disk again and again, from a thread of its own."""

    def __init__(self, root: Path) -> None:
        self.most_bytes = 0
        self.looks = 0
        self._root = root
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.002):
            self.most_bytes = max(self.most_bytes, at_one_moment(self._root))
            self.looks += 1


def at_one_moment(root: Path) -> int:
    """Bytes of files that were all there at once.

    A walk takes a while, and may count a file and later the one that replaced it. What is still
    there afterwards was there all the time.
    """
    sizes: dict[Path, int] = {}
    for path in root.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and path.parent != root:
                sizes[path] = -(-path.lstat().st_size // PAGE_BYTES) * PAGE_BYTES
    return sum(size for path, size in sizes.items() if path.exists())


def test_usage_stays_below_the_capacity(tmp_path: Path) -> None:
    """A listing while files come and go may count one that has just been replaced."""
    root = tmp_path / "l2"

    async def main() -> None:
        async with opened(root, CAPACITY_BYTES) as backend:
            with Watch(root) as watch:
                for start in range(0, OBJECTS, 16):
                    items = [filled(SPACE, key(n), LENGTH) for n in range(start, start + 16)]
                    assert list(await backend.put(items)) == [IoOutcome.OK] * 16
                    usage = backend.usage()
                    assert usage.used_bytes is not None
                    assert disk_usage(root) <= usage.used_bytes <= CAPACITY_BYTES
                    if start % 64 == 0:
                        await backend.delete(SPACE, [key(start + 3)], broken=True)
            assert watch.looks > 3
            assert watch.most_bytes <= CAPACITY_BYTES + DISK_BYTES
            usage = backend.usage()
            assert usage.objects == CAPACITY_BYTES // DISK_BYTES
            assert usage.used_bytes == disk_usage(root)

    asyncio.run(main())


def test_many_at_once_all_fit_through(tmp_path: Path) -> None:
    """A capacity of two objects, more writers than that: each waits for its room."""

    async def main() -> None:
        async with opened(tmp_path / "l2", 2 * DISK_BYTES) as backend:
            items = [filled(SPACE, key(n), LENGTH) for n in range(20)]
            assert list(await backend.put(items)) == [IoOutcome.OK] * 20
            assert disk_usage(tmp_path / "l2") == 2 * DISK_BYTES

    asyncio.run(main())


async def write_for_ever(root: Path, first: int) -> None:
    """The child: store, read back and break objects until it is killed."""
    async with stored(root, CAPACITY_BYTES) as store:
        number = first
        while True:
            batch = [wanted(number + n, LENGTH, fill=True) for n in range(8)]
            assert list(await store.put(batch)) == [IoOutcome.OK] * 8
            await store.delete(SPACE, [key(number)], broken=True)
            number += 8
            print(number, flush=True)


def _killed_child(root: Path, first: int, pause: random.Random) -> int:
    """The next free number, after a child has written for a while and was killed."""
    script = (
        "import asyncio, sys; from pathlib import Path;"
        "from tests.backends.test_fs_cap import write_for_ever;"
        "asyncio.run(write_for_ever(Path(sys.argv[1]), int(sys.argv[2])))"
    )
    command = [sys.executable, "-c", script, str(root), str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        last = first
        for _ in range(pause.randint(1, 6)):
            last = int(child.stdout.readline())
        with Watch(root) as watch:
            threading.Event().wait(pause.random() * 0.02)
        child.send_signal(signal.SIGKILL)
        last = max([last, *map(int, child.stdout.read().split())])
        assert watch.most_bytes <= CAPACITY_BYTES + DISK_BYTES
    return last + 8


@pytest.mark.slow
def test_killed_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, pause = tmp_path / "l2", random.Random(4)
    monkeypatch.setenv("PYTHONPATH", ":".join(part for part in sys.path if part))

    async def look(upto: int) -> int:
        async with stored(root, CAPACITY_BYTES) as store:
            usage = store.usage()
            assert usage.used_bytes == disk_usage(root) <= CAPACITY_BYTES
            hits = 0
            for number in range(upto):
                one = wanted(number, LENGTH)
                [outcome] = await store.get([one])
                assert outcome in (IoOutcome.OK, IoOutcome.MISSING)
                if outcome is IoOutcome.OK:
                    assert one.payload[:LENGTH] == content(number, LENGTH)
                    hits += 1
            assert hits == usage.objects
            return hits

    number = 0
    for _ in range(KILLS):
        number = _killed_child(root, number, pause)
        assert disk_usage(root) <= CAPACITY_BYTES + DISK_BYTES
        assert asyncio.run(look(number)) > 0


# ---- the long form: 10 GiB through 1 GiB

BIG_CAPACITY_BYTES = 1 << 30
BIG_LENGTH = 5_898_240
BIG_DISK_BYTES = PAGE_BYTES + BIG_LENGTH
BIG_OBJECTS = 10 * BIG_CAPACITY_BYTES // BIG_LENGTH + 1


async def write_big(root: Path, first: int) -> None:
    """The child: store objects until it is killed, one line for each batch."""
    payload = memoryview(mmap.mmap(-1, BIG_LENGTH))
    payload[:] = random.Random(1).randbytes(BIG_LENGTH)
    async with stored(root, BIG_CAPACITY_BYTES) as store:
        for number in range(first, BIG_OBJECTS, 8):
            batch = [Wanted(SPACE, key(n), payload, BIG_LENGTH) for n in range(number, number + 8)]
            assert list(await store.put(batch)) == [IoOutcome.OK] * 8
            print(number + 8, flush=True)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_ten_gibibytes_through_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed every 2 GiB, and looked at all the time."""
    root, number = tmp_path / "l2", 0
    monkeypatch.setenv("PYTHONPATH", ":".join(part for part in sys.path if part))
    script = (
        "import asyncio, sys; from pathlib import Path;"
        "from tests.backends.test_fs_cap import write_big;"
        "asyncio.run(write_big(Path(sys.argv[1]), int(sys.argv[2])))"
    )
    with Watch(root) as watch:
        while number < BIG_OBJECTS:
            command = [sys.executable, "-c", script, str(root), str(number)]
            stop = number + 2 * BIG_CAPACITY_BYTES // BIG_LENGTH
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    number = int(line)
                    if number >= stop:
                        child.kill()
                        break
    assert watch.most_bytes <= BIG_CAPACITY_BYTES + BIG_DISK_BYTES

    async def look() -> None:
        async with stored(root, BIG_CAPACITY_BYTES) as store:
            usage = store.usage()
            assert usage.used_bytes == disk_usage(root) <= BIG_CAPACITY_BYTES

    asyncio.run(look())
