"""A backend by somebody else: `fs`, whose calls hang while a file exists beside its directory.

`stall` is for reads and probes, `stall_puts` for writes. Found by its entry point, like any plug-in
that is installed.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from kvkeep.backends.base import Item
from kvkeep.backends.fs import FsBackend, FsSettings
from kvkeep.backends.registry import BackendUrl
from kvkeep.types import IoOutcome


class Stalling(FsBackend):
    """The stalled disk."""

    def __init__(self, url: BackendUrl) -> None:
        super().__init__(FsSettings(Path(url.path), url.name, url.public, url.size("capacity")))
        self._beside = Path(url.path).parent

    async def _stall(self, flag: str = "stall") -> None:
        while (self._beside / flag).exists():
            await asyncio.sleep(0.01)

    async def get(self, items: Sequence[Item]) -> Sequence[int]:
        await self._stall()
        return await super().get(items)

    async def put(self, items: Sequence[Item]) -> Sequence[IoOutcome]:
        await self._stall("stall_puts")
        return await super().put(items)

    async def probe(self) -> None:
        await self._stall()
        await super().probe()


def from_url(url: BackendUrl) -> Stalling:
    """`stalling:///a/directory?capacity=10MiB`."""
    return Stalling(url)
