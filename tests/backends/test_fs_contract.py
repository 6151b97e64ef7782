"""The `fs` backend keeps the contract: with and without O_DIRECT, with few threads and many."""

from pathlib import Path

from kvkeep.backends.base import Backend
from kvkeep.backends.fs import FsBackend, FsSettings
from kvkeep.backends.fs_files import Direct
from kvkeep.testing.backend_contract import BackendContract

CAPACITY_BYTES = 1 << 30


class TestDirect(BackendContract):
    async def make(self, place: Path) -> Backend:
        return FsBackend(FsSettings(place, capacity_bytes=CAPACITY_BYTES))


class TestBuffered(BackendContract):
    async def make(self, place: Path) -> Backend:
        return FsBackend(
            FsSettings(
                place, capacity_bytes=CAPACITY_BYTES, direct=Direct.OFF, readers=1, writers=1
            )
        )


class TestNearlyFull(BackendContract):
    """Every test fits, but only just: rooms are waited for, nothing is lost."""

    async def make(self, place: Path) -> Backend:
        return FsBackend(FsSettings(place, capacity_bytes=6 << 20, writers=16))
