"""A file that is not as long as its object: nothing beyond the object's own memory is touched."""

import asyncio
import mmap
import os
from functools import partial
from pathlib import Path

import pytest
from tests.backends import fs_cases
from tests.backends.fs_cases import content, path_of, stored, wanted

from kvkeep.backends.base import HEADER_BYTES, PAGE_BYTES
from kvkeep.backends.checked import Wanted
from kvkeep.backends.fs import FsSettings
from kvkeep.backends.fs_files import Direct
from kvkeep.testing.backend_contract import SPACE, key
from kvkeep.types import IoOutcome

LENGTH = 3 * PAGE_BYTES + 77
WHOLE = 4 * PAGE_BYTES


def _settings(direct: Direct, root: Path, capacity_bytes: int | None = None) -> FsSettings:
    return FsSettings(root, capacity_bytes=capacity_bytes, direct=direct)


@pytest.mark.parametrize("grown_bytes", [1, PAGE_BYTES, 40 * PAGE_BYTES])
@pytest.mark.parametrize("direct", [Direct.AUTO, Direct.OFF])
def test_a_longer_file_does_not_reach_its_neighbours_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grown_bytes: int, direct: Direct
) -> None:
    monkeypatch.setattr(fs_cases, "settings", partial(_settings, direct))
    root = tmp_path / "l2"
    memory = memoryview(mmap.mmap(-1, 3 * WHOLE))
    memory[:] = b"\x5a" * len(memory)

    async def main() -> None:
        async with stored(root) as store:
            assert list(await store.put([wanted(1, LENGTH, fill=True)])) == [IoOutcome.OK]
            os.truncate(path_of(root, key(1)), HEADER_BYTES + LENGTH + grown_bytes)
            mine = Wanted(SPACE, key(1), memory[WHOLE : 2 * WHOLE], LENGTH)
            assert list(await store.get([mine])) == [IoOutcome.CORRUPT]

    asyncio.run(main())
    assert bytes(memory[:WHOLE]) == b"\x5a" * WHOLE
    assert bytes(memory[2 * WHOLE :]) == b"\x5a" * WHOLE


def test_a_read_fills_its_own_memory_only(tmp_path: Path) -> None:
    memory = memoryview(mmap.mmap(-1, 3 * WHOLE))
    memory[:] = b"\x5a" * len(memory)

    async def main() -> None:
        async with stored(tmp_path / "l2") as store:
            assert list(await store.put([wanted(1, LENGTH, fill=True)])) == [IoOutcome.OK]
            mine = Wanted(SPACE, key(1), memory[WHOLE : 2 * WHOLE], LENGTH)
            assert list(await store.get([mine])) == [IoOutcome.OK]

    asyncio.run(main())
    assert memory[WHOLE : WHOLE + LENGTH] == content(1, LENGTH)
    assert bytes(memory[:WHOLE]) == bytes(memory[2 * WHOLE :]) == b"\x5a" * WHOLE
