"""Fuzz target: the files of an L2 directory, spoiled under a running `fs` backend and its store.

An input is a script: objects are stored and read, and in between their files are changed, cut, put
in each other's place, or replaced by what is no file. A read gives the stored bytes or an outcome
that says why not, never other bytes; what is stored anew is served again.
"""

import asyncio
import contextlib
import logging
import mmap
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import shake_128
from pathlib import Path

from kvkeep.backends.base import PAGE_BYTES
from kvkeep.backends.checked import Store, Wanted
from kvkeep.backends.fs import LOGGER, FsBackend, FsSettings
from kvkeep.backends.fs_scan import object_path
from kvkeep.backends.guarded import GuardSettings
from kvkeep.backends.header import label
from kvkeep.backends.registry import compose
from kvkeep.errors import BackendError
from kvkeep.testing.fuzz_values import (
    Script,
    Step,
    Value,
    changed_data,
    pack,
    unpack,
)
from kvkeep.types import ChunkHash, Fingerprint, IoOutcome, Namespace, ObjectKey

_OBJECTS = 6
_FRESH = 99  # an object that no script touches
_LENGTHS = (1, 4096, 5000, 3 * 4096)
_CAPACITY_BYTES = 64 << 20
_LONGEST_BYTES = 1 << 44  # a file with a hole
_SCAN_S = 15.0
_GUARD = GuardSettings(get_timeout_s=10, put_timeout_s=10, breaker_failures=1000)
_WHATS = ("flip", "cut", "grow", "over", "swap", "gone", "dir", "link", "hard", "write", "junk")


class Files:
    """The target. Its directory is a new one for every input."""

    name = "file"

    def __init__(self) -> None:
        self._log = logging.getLogger(LOGGER)
        self._was_off, self._log.disabled = self._log.disabled, True  # each input says a lot

    def seeds(self) -> Mapping[str, bytes]:
        """Each thing that can happen to a file, once."""
        ready: Script = [[n, "put", None] for n in range(3)]
        read: Script = [[n, "get", None] for n in range(3)]
        rng = random.Random(1)
        scripts = {
            f"{what}-{'header' if early else 'payload'}": [*ready, _spoil(rng, what, early), *read]
            for what in _WHATS
            for early in (True, False)
        }
        scripts["restart"] = [*ready, [0, "restart", None], *read]
        scripts["no-directories"] = [*ready, [0, "folder", None], *read, *ready, *read]
        return {name: pack(script) for name, script in scripts.items()}

    def changed(self, rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
        """Steps and places changed."""
        return changed_data(rng, data, others, _new_step)

    def run(self, data: bytes) -> frozenset[str]:
        """Play it in a fresh directory."""
        with tempfile.TemporaryDirectory(prefix="kvkeep-fuzz-") as folder:
            rig = _Rig(Path(folder) / "l2")
            asyncio.run(rig.play(unpack(data) or []))
            return frozenset(rig.seen)

    def close(self) -> None:
        """The log speaks again."""
        self._log.disabled = self._was_off


class _Rig:
    """One directory, its store, and what is known of each object's file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seen: set[str] = set()
        self._sound: set[int] = set()  # stored, and not touched since
        self._linked = False
        self._store: Store

    async def play(self, script: Script) -> None:
        """All steps, and then everything must work again."""
        await self._open()
        await self._scanned()
        for step in script:
            if len(step) == 3 and isinstance(step[0], int) and isinstance(step[1], str):
                await self._take(step[0] % _OBJECTS, step[1], step[2])
        await self._scanned()
        for number in (*range(_OBJECTS), _FRESH):
            await self._put(number)
            await self._get(number)
        assert _FRESH in self._sound, "a new object is not stored"
        await self._store.close()

    async def _take(self, number: int, what: str, argument: Value) -> None:
        match what:
            case "put":
                await self._put(number)
            case "get":
                await self._get(number)
            case "restart":
                await self._store.close()
                await self._open()
            case "scanned":
                await self._scanned()
            case _:
                self._spoil(number, what, argument)

    async def _open(self) -> None:
        backend = FsBackend(FsSettings(self.root, capacity_bytes=_CAPACITY_BYTES))
        self._store = compose(backend, settings=_GUARD, log=_no_log, offload=_at_once)
        await self._store.open()

    async def _scanned(self) -> None:
        """Before that, nothing is stored."""
        until_s = asyncio.get_running_loop().time() + _SCAN_S
        while self._store.usage().scanned < 1.0:
            assert asyncio.get_running_loop().time() < until_s, "the scan does not end"
            await asyncio.sleep(0.001)

    async def _put(self, number: int) -> None:
        try:
            [outcome] = await self._store.put([_wanted(number, fill=True)])
        except BackendError as error:
            outcome = IoOutcome.ERROR
            self.seen.add(type(error).__name__)
        self.seen.add(f"put {outcome.name}")
        self._sound.discard(number)
        if outcome is IoOutcome.OK:
            self._sound.add(number)

    async def _get(self, number: int) -> None:
        wanted = _wanted(number)
        [outcome] = await self._store.get([wanted])
        self.seen.add(f"get {outcome.name}")
        self.seen.update(map(str, self._store.status()["corrupt"]))
        if outcome is IoOutcome.OK:
            right = _content(number, wanted.length)
            assert wanted.payload[: wanted.length] == right, "wrong bytes"
        else:
            why = self._store.status()["last_error"]
            assert number not in self._sound, f"stored, and not served: {outcome.name} ({why})"

    # ---- what happens to files

    def _spoil(self, number: int, what: str, argument: Value) -> None:
        """Do it when it can be done; from then on the file is not known to be sound."""
        other = argument % _OBJECTS if isinstance(argument, int) else 0
        path, there = self._path(number), self._path(other)
        self._sound -= {number, other}
        self._linked |= what in ("link", "hard")
        if self._linked or what == "folder":
            self._sound.clear()  # the change of one file may be one of another
        with contextlib.suppress(OSError):
            match what:
                case "over":
                    shutil.copyfile(there, path)
                case "swap":
                    aside = path.with_name("aside")
                    os.rename(path, aside)
                    os.rename(there, path)
                    os.rename(aside, there)
                case "gone":
                    path.unlink()
                case "dir":
                    path.unlink(missing_ok=True)
                    (path / "inside").mkdir(parents=True)
                case "link":
                    path.unlink(missing_ok=True)
                    path.symlink_to(there)
                case "hard":
                    path.unlink(missing_ok=True)
                    os.link(there, path)
                case "folder":
                    shutil.rmtree(path.parent.parent)
                case "pipe":
                    path.unlink(missing_ok=True)
                    os.mkfifo(path)
                case "junk" if isinstance(argument, bytes):
                    (path.parent / f"{path.name}{len(argument)}").write_bytes(argument[:8192])
                case _:
                    self._write(path, what, argument)

    def _write(self, path: Path, what: str, argument: Value) -> None:
        """In the file itself."""
        if not path.is_file():
            return
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            match what, argument:
                case "flip", int():
                    at = argument // 8 % max(1, size)
                    file.seek(at)
                    old = file.read(1) or b"\0"
                    file.seek(at)
                    file.write(bytes([old[0] ^ 1 << argument % 8]))
                case "cut", int():
                    file.truncate(max(0, min(argument, _LONGEST_BYTES)))
                case "grow", bytes():
                    file.seek(0, os.SEEK_END)
                    file.write(argument[:65536])
                case "write", [int() as at, bytes() as some]:
                    file.seek(max(0, at) % max(1, size))
                    file.write(some[:65536])

    def _path(self, number: int) -> Path:
        space, key = _name(number)
        return self.root / object_path(label(space), key)


def _spoil(rng: random.Random, what: str, early: bool) -> Step:
    """A step; `early`: in the header page."""
    at = rng.randrange(200) if early else PAGE_BYTES + rng.randrange(4096)
    match what:
        case "flip":
            return [1, what, 8 * at + rng.randrange(8)]
        case "cut":
            return [1, what, at]
        case "grow" | "junk":
            return [1, what, rng.randbytes(at)]
        case "write":
            return [1, what, [at, rng.randbytes(16)]]
        case _:
            return [1, what, 0 if early else 2]


def _new_step(rng: random.Random) -> Step:
    what = rng.choice((*_WHATS, "folder", "pipe", "restart", "scanned", "put", "put", "get", "get"))
    step = _spoil(rng, what, rng.random() < 0.5)
    step[0] = rng.randrange(_OBJECTS)
    return step


def _name(number: int) -> tuple[Namespace, ObjectKey]:
    space = Namespace(Fingerprint(b"\x11" * 32), (None, "", "tenant")[number % 3], "model")
    return space, ObjectKey(ChunkHash(bytes([number // 2 + 1]) * 32), 2, number % 2, 0)


def _content(number: int, length: int) -> bytes:
    return shake_128(number.to_bytes(4, "little")).digest(length)


def _wanted(number: int, *, fill: bool = False) -> Wanted:
    length = _LENGTHS[number % len(_LENGTHS)]
    payload = memoryview(mmap.mmap(-1, -(-length // PAGE_BYTES) * PAGE_BYTES))
    payload[:] = b"\xa5" * len(payload)
    if fill:
        payload[:length] = _content(number, length)
    return Wanted(*_name(number), payload, length)


def _no_log(event: str, **fields: object) -> None:
    """Lines are for people."""


async def _at_once(job: Callable[[], list[bytes]]) -> list[bytes]:
    return job()
