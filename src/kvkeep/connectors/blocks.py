"""Device blocks <-> extents: how an engine's blocks lie in memory, and how their bytes move.

A block is opaque: a run of bytes per layer that nothing slices. Extents are raw addresses of a
shared mapping, and the caller keeps that mapping alive during a copy. Bytes of one chunk's extent:

    layer-major engine memory, or layers that lie apart   [layer][block of the chunk][block bytes]
    block-major engine memory                             [block of the chunk][layer][block bytes]

Which operation copies was measured per direction and run length (docs/performance.md).
"""

import ctypes
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch

from kvkeep.connectors.blocks_cuda import CudaCopier
from kvkeep.connectors.blocks_geometry import Geometry, Transfer, read_geometry, stack_parts
from kvkeep.errors import LayoutUnsupported

# One chunk: the extent's address, then the device block of each block of the chunk.
GatherJob = tuple[int, Sequence[int]]
# None leaves a block where it is: a local prefix hit may end inside a chunk.
ScatterJob = tuple[int, Sequence[int | None]]


class Run(NamedTuple):
    """`length` blocks in a row, in the chunk and from device block `first` on (None: a gap)."""

    first: int | None
    length: int


class Mark(Protocol):
    """A point in the order of copies."""

    def query(self) -> bool:
        """Whether every copy before it is done."""

    def synchronize(self) -> None:
        """Return when they are."""


class Copier(Protocol):
    """Moves checked transfers; one per kind of device."""

    def gather(self, transfers: Sequence[Transfer]) -> None:
        """Device blocks -> extents."""

    def scatter(self, transfers: Sequence[Transfer]) -> None:
        """Extents -> device blocks; blocks marked None keep their bytes."""

    def pin(self, address: int, length_bytes: int) -> None:
        """Prepare a mapping for fast copies, once, before the first copy."""

    def unpin(self) -> None:
        """Undo `pin`; the mapping may be unmapped afterwards."""

    def fence(self) -> None:
        """Make the device's current stream wait for every copy so far."""

    def synchronize(self) -> None:
        """Return when every copy so far is done."""

    def mark(self) -> Mark:
        """A mark after every copy so far."""

    def twin(self) -> "Copier":
        """Another for the same blocks and pinned mapping, whose copies run beside this one's."""


class DeviceBlocks:
    """The blocks of one KV group in one engine process, and their copies to and from extents.

    On a CPU a copy is done when the call returns. On CUDA it is only enqueued: call `synchronize`
    before an extent is reported written, before generations are compared, and before memory is
    reused; `fence` is enough before a forward. Both cost nothing on a CPU.
    """

    def __init__(self, geometry: Geometry, copier: Copier) -> None:
        self._geometry = geometry
        self._copier = copier
        self._word = geometry.stacks[0].dtype
        self._device: str = geometry.stacks[0].device.type

    @classmethod
    def from_kv_caches(
        cls, kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None = None
    ) -> Self:
        """Blocks of `kv_caches` (layer name -> tensor, blocks along dimension 0).

        `num_blocks` is the block table's count when the engine splits a block into several kernel
        blocks; None takes dimension 0. Raises LayoutUnsupported.
        """
        geometry = read_geometry(kv_caches, num_blocks)
        return cls(geometry, copier_for(geometry.stacks))

    @property
    def device(self) -> str:
        """The kind of device the blocks are on: cpu, cuda."""
        return self._device

    @property
    def layers(self) -> tuple[str, ...]:
        """Layer names in extent order; a layer that shares another's memory is not repeated."""
        return self._geometry.layers

    @property
    def num_blocks(self) -> int:
        """Blocks in the engine's pool."""
        return self._geometry.num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self._geometry.block_bytes

    def chunk_bytes(self, blocks_per_chunk: int) -> int:
        """Bytes of an extent that holds this many blocks of every layer."""
        return blocks_per_chunk * self.block_bytes * len(self.layers)

    def describe(self, *, attention_isa: str | None = None) -> dict[str, object]:
        """What an extent's bytes mean, JSON-able, for the layout fingerprint.

        The pool's size is not in it: it does not change a block. On a CPU the kernels pack the
        inside of a block by instruction set (vLLM: `v1/attention/backends/cpu_attn.py`), so both
        the processor's and, where known, the backend's own name for it are.
        """
        described: dict[str, object] = {
            "layers": list(self.layers),
            "order": "block,layer" if self._geometry.block_major else "layer,block",
            "block_bytes": self.block_bytes,
            "device": self._device,
            **self._geometry.interior,
        }
        if self._device == "cpu":
            described["instruction_set"] = instruction_set()
            described["attention_isa"] = attention_isa
        return described

    def gather(self, jobs: Sequence[GatherJob]) -> int:
        """Copy device blocks into extents; returns the bytes copied.

        Raises ValueError, with nothing copied, for a block id outside the pool.
        """
        self._check([block for _, block_ids in jobs for block in block_ids])
        self._copier.gather(self._transfers(jobs))
        return self._bytes(jobs)

    def scatter(self, jobs: Sequence[ScatterJob]) -> int:
        """Copy extents into device blocks; returns the bytes copied.

        A chunk's list names all its blocks, with None for those to leave alone. Raises ValueError,
        with nothing copied, for a block id outside the pool or named twice.
        """
        written = [block for _, block_ids in jobs for block in block_ids if block is not None]
        self._check(written)
        if len(set(written)) != len(written):
            raise ValueError("a device block is the target of two blocks of the same load")
        self._copier.scatter(self._transfers(jobs))
        return self._bytes(jobs)

    def pin(self, address: int, length_bytes: int) -> None:
        """Prepare the arena's mapping for DMA; `unpin` before it is unmapped. No-op on a CPU."""
        self._copier.pin(address, length_bytes)

    def unpin(self) -> None:
        """Wait for all copies, then undo `pin`."""
        self._copier.unpin()

    def fence(self) -> None:
        """The device's current stream, so the next forward, waits for every copy so far."""
        self._copier.fence()

    def synchronize(self) -> None:
        """Return when every copy so far is done."""
        self._copier.synchronize()

    def mark(self) -> Mark:
        """A mark after every copy so far, to ask or wait for."""
        return self._copier.mark()

    def twin(self) -> "DeviceBlocks":
        """The same blocks, whose copies neither wait for this object's nor delay them."""
        return DeviceBlocks(self._geometry, self._copier.twin())

    def _check(self, block_ids: list[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            bad = next(block for block in block_ids if not 0 <= block < self.num_blocks)
            raise ValueError(f"block {bad} is outside the pool of {self.num_blocks} blocks")

    def _transfers(self, jobs: Sequence[ScatterJob]) -> list[Transfer]:
        word_bytes = self._word.itemsize
        for address, _ in jobs:
            if address % word_bytes:
                raise ValueError(f"extent address {address:#x} is not a multiple of {word_bytes}")
        return [
            Transfer(address, self._extent(address, len(block_ids)), block_ids)
            for address, block_ids in jobs
            if any(block is not None for block in block_ids)
        ]

    def _extent(self, address: int, blocks: int) -> torch.Tensor:
        memory = (ctypes.c_char * self.chunk_bytes(blocks)).from_address(address)
        return torch.frombuffer(memory, dtype=self._word)

    def _bytes(self, jobs: Sequence[ScatterJob]) -> int:
        moved = sum(block is not None for _, block_ids in jobs for block in block_ids)
        return self.chunk_bytes(moved)


class HostCopier:
    """Copies by this thread's processor; the interpreter is free during each large copy.

    Gathering is one `index_select` per chunk: the extent is written front to back. Scattering
    copies whole runs, each over all layers, and gives all runs of a call to torch at once.
    """

    def __init__(self, stacks: Sequence[torch.Tensor]) -> None:
        self._stacks = stacks
        # Every block as [planes, 1, words]: cutting these anew is 3 % of a scattered load. A view
        # costs 0.6 KiB, so not where each layer would need its own.
        self._single = stacks[0].split(1, dim=1) if len(stacks) == 1 else ()

    def gather(self, transfers: Sequence[Transfer]) -> None:
        """Device blocks -> extents."""
        selections: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for transfer in transfers:
            blocks = torch.tensor(transfer.block_ids)
            parts = stack_parts(transfer.extent, self._stacks, len(transfer.block_ids))
            selections += [(s, blocks, part) for s, part in zip(self._stacks, parts, strict=True)]
        # Views first, copies second: a large copy pushes the interpreter out of the caches.
        for stack, blocks, part in selections:
            torch.index_select(stack, 1, blocks, out=part)

    def scatter(self, transfers: Sequence[Transfer]) -> None:
        """Extents -> device blocks; blocks marked None keep their bytes."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for transfer in transfers:
            block_runs = runs(transfer.block_ids)
            lengths = [run.length for run in block_runs]
            parts = stack_parts(transfer.extent, self._stacks, len(transfer.block_ids))
            for stack, part in zip(self._stacks, parts, strict=True):
                for run, source in zip(block_runs, part.split_with_sizes(lengths, 1), strict=True):
                    if run.first is not None:
                        targets.append(self._blocks(stack, run.first, run.length))
                        sources.append(source)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _blocks(self, stack: torch.Tensor, first: int, length: int) -> torch.Tensor:
        if self._single and length == 1:
            return self._single[first]
        return stack.narrow(1, first, length)

    def pin(self, address: int, length_bytes: int) -> None:
        """Nothing to prepare: a processor reads any mapping at full speed."""

    def unpin(self) -> None:
        """Nothing was prepared."""

    def fence(self) -> None:
        """Every copy is done already."""

    def synchronize(self) -> None:
        """Every copy is done already."""

    def mark(self) -> Mark:
        """Every copy is done already."""
        return _Past()

    def twin(self) -> "HostCopier":
        """This one: it keeps no order between copies."""
        return self


class _Past:
    """A mark that everything is behind."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


def copier_for(stacks: Sequence[torch.Tensor]) -> Copier:
    """The copier of the device that holds `stacks`; raises LayoutUnsupported for an unknown one."""
    kind = stacks[0].device.type
    if kind == "cpu":
        return HostCopier(stacks)
    if kind == "cuda":
        return CudaCopier(stacks)
    raise LayoutUnsupported(f"no way to copy KV blocks of a {kind} device")


def runs(block_ids: Sequence[int | None]) -> list[Run]:
    """`block_ids` as the fewest runs of consecutive blocks and of gaps, in order."""
    found: list[Run] = []
    for block in block_ids:
        if found:
            first, length = found[-1]
            if block == (None if first is None else first + length):
                found[-1] = Run(first, length + 1)
                continue
        found.append(Run(block, 1))
    return found


def instruction_set() -> str:
    """The processor's vector instructions as torch dispatches them, AMX tiles included."""
    cpuinfo = Path("/proc/cpuinfo")
    tiles = cpuinfo.exists() and "amx_tile" in cpuinfo.read_text().split()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()} {capability}{' AMX' if tiles else ''}"
