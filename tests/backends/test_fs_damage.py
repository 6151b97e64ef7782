"""Files that are not what was stored: never served, the reason named, set aside, written anew."""

import asyncio
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.backends.fs_cases import content, path_of, stored, wanted

from kvkeep.backends.base import HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.checked import Store
from kvkeep.testing.backend_contract import OTHER, SALTED, SPACE, key
from kvkeep.types import IoOutcome

LENGTH = 3 * PAGE_BYTES + 77
FLIPS_IN_PAYLOAD = 1_000
BORDERS = sorted(
    {
        max(0, page * PAGE_BYTES + off)
        for page in range(7)
        for off in (-513, -512, -1, 0, 1, 511, 512)
    }
    | {HEADER_BYTES + LENGTH - 1, HEADER_BYTES + LENGTH + 1}
)


async def put(store: Store, number: int = 1, length: int = LENGTH) -> None:
    assert list(await store.put([wanted(number, length, fill=True)])) == [IoOutcome.OK]


async def read(store: Store, number: int = 1, length: int = LENGTH) -> IoOutcome:
    """The outcome; an OK has the right bytes."""
    one = wanted(number, length)
    [outcome] = await store.get([one])
    if outcome is IoOutcome.OK:
        assert one.payload[:length] == content(number, length)
    return outcome


def problems(store: Store) -> dict[str, int]:
    found: dict[str, int] = store.status()["corrupt"]
    return found


async def damaged(
    store: Store, root: Path, damage: Callable[[Path], None], *, number: int = 1
) -> tuple[IoOutcome, str]:
    """Damage a good object: how reading it ends and the reason; then a store makes it good."""
    path = path_of(root, key(number))
    before = problems(store)
    damage(path)
    outcome = await read(store, number)
    new = {why: n - before.get(why, 0) for why, n in problems(store).items()}
    reasons = [why for why, count in new.items() if count]
    assert len(reasons) == 1, f"{outcome.name} with reasons {reasons}"
    assert not os.path.lexists(path)
    assert list(store.contains(SPACE, [key(number)])) == [False]  # type: ignore[arg-type]
    assert await read(store, number) is IoOutcome.MISSING
    await put(store, number)
    assert await read(store, number) is IoOutcome.OK
    return outcome, reasons[0]


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        [old] = file.read(1)
        file.seek(place)
        file.write(bytes([old ^ (1 << bit)]))


def copy_over(source: Path, path: Path) -> None:
    shutil.copyfile(source, path)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_any_flipped_header_byte(tmp_path: Path, step: int) -> None:
    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            await put(store)
            for place in range(0, HEADER_BYTES, step):
                flip(path_of(tmp_path / "l2", key(1)), place, place % 8)
                assert await read(store) is IoOutcome.CORRUPT, place
                await put(store)
            magic = len(range(0, 8, step))
            flips = len(range(0, HEADER_BYTES, step))
            assert problems(store) == {"bad_magic": magic, "header_checksum": flips - magic}
            assert await read(store) is IoOutcome.OK

    asyncio.run(main())


@pytest.mark.slow
def test_flips_anywhere_in_the_payload(tmp_path: Path) -> None:
    places = random.Random(1).sample(range(LENGTH), FLIPS_IN_PAYLOAD)

    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            await put(store)
            for place in places:
                found = await damaged(
                    store, tmp_path / "l2", partial(flip, place=HEADER_BYTES + place, bit=place % 8)
                )
                assert found == (IoOutcome.CORRUPT, "payload_checksum"), place

    asyncio.run(main())


@pytest.mark.parametrize("size", BORDERS)
def test_cut_or_grown(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            await put(store)
            outcome, why = await damaged(store, tmp_path / "l2", lambda p: os.truncate(p, size))
            assert outcome is IoOutcome.CORRUPT
            assert why == ("truncated" if size < HEADER_BYTES + LENGTH else "too_long")

    asyncio.run(main())


def test_another_object_under_this_name(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            for space in (SPACE, SALTED, OTHER):
                await store.put([wanted(2, LENGTH, space=space, fill=True)])
            await put(store)
            for space, name, expected in (
                (SPACE, key(2), (IoOutcome.CORRUPT, "wrong_key")),
                (SALTED, key(2), (IoOutcome.CORRUPT, "wrong_key")),
                (OTHER, key(2), (IoOutcome.LAYOUT_MISMATCH, "other_fingerprint")),
            ):
                source = path_of(tmp_path / "l2", name, space)
                assert await damaged(store, tmp_path / "l2", partial(copy_over, source)) == expected

    asyncio.run(main())


def test_another_length_is_another_layout(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            await put(store, length=5_000)
            assert await read(store, length=6_000) is IoOutcome.LAYOUT_MISMATCH
            assert problems(store) == {"other_length": 1}

    asyncio.run(main())


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("place", [_fifo, _link, _folder, _device])
def test_no_regular_file(tmp_path: Path, place: Callable[[Path], None]) -> None:
    """Neither followed nor waited for; O_DIRECT stays on."""

    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            await put(store)
            await put(store, 2)
            assert await damaged(store, tmp_path / "l2", place) == (
                IoOutcome.CORRUPT,
                "truncated",
            )
            assert await read(store, 2) is IoOutcome.OK

    asyncio.run(main())


def test_a_file_that_somebody_deleted_is_missing(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            await put(store)
            path_of(tmp_path / "l2", key(1)).unlink()
            assert list(store.contains(SPACE, [key(1)])) == [True]  # type: ignore[arg-type]
            assert await read(store) is IoOutcome.MISSING
            assert list(store.contains(SPACE, [key(1)])) == [False]  # type: ignore[arg-type]
            assert store.usage().used_bytes == 0
            assert problems(store) == {}

    asyncio.run(main())


def test_quarantine_keeps_a_bounded_number(tmp_path: Path) -> None:
    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            for _ in range(70):
                await put(store)
                await damaged(store, tmp_path / "l2", lambda path: flip(path, 5, 1))
            assert store.usage().quarantined_objects == 64
            assert len(os.listdir(tmp_path / "l2" / "quarantine")) == 64

    asyncio.run(main())
