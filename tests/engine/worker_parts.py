"""A worker side on real shared memory and real blocks, without a server or an engine."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

from kvkeep.shm import GenerationTable, Mapping, SharedArena

EPOCH = 7
MIB = 1 << 20


class Parts:
    """An arena of 32 MiB, its table, a client's mapping of both, and a worker on top."""

    def __init__(self) -> None:
        import torch

        from kvkeep.connectors.blocks import DeviceBlocks
        from kvkeep.connectors.vllm.worker_side import WorkerSide

        self.arena, self.table = SharedArena(32 * MIB), GenerationTable(16)
        self.arena.populate_step()
        self.mapping = Mapping(
            os.dup(self.arena.fd),
            os.dup(self.table.fd),
            arena_bytes=32 * MIB,
            slots=16,
            write=True,
            epoch=EPOCH,
        )
        storage = torch.arange(2 * 8 * 256, dtype=torch.int64).view(2, 8, 256)
        self.pool = storage.clone()
        caches = {f"layer{i}": storage[i] for i in range(2)}
        self.storage = storage
        client: Any = SimpleNamespace(mapping=self.mapping)
        self.side = WorkerSide(DeviceBlocks.from_kv_caches(caches, 8), client, rank=0)

    def bytes_at(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.mapping.address + offset, size)

    def close(self) -> None:
        self.side.loader.close()
        self.side.client.mapping = None
        assert self.mapping.close()
        self.table.close()
        self.arena.close()
