"""Copies between CUDA device blocks and extents, by DMA on a side stream.

Not proven on a GPU: written from the CUDA and torch documentation and only the arithmetic
(`segments`, `pieces`) is tested, on machines without one. Treat the first run on a GPU as its test.

The arena's mapping is registered with CUDA in segments. One DMA may not cross two registrations,
so a copy is cut where segments meet. A chunk goes through a flat staging tensor on the device,
which turns many small runs into one DMA; torch's allocator reuses that memory in stream order.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import torch

from kvkeep.connectors.blocks_geometry import Transfer, stack_parts
from kvkeep.errors import MemoryRefused

SEGMENT_BYTES = 1 << 30


class CudaCopier:
    """Enqueues copies on its own stream, after what the current stream has been given so far."""

    def __init__(
        self,
        stacks: Sequence[torch.Tensor],
        registered: list[tuple[int, int]] | None = None,
    ) -> None:
        self._stacks = stacks
        self._device = stacks[0].device
        self._stream = torch.cuda.Stream(self._device)
        self._done = torch.cuda.Event()
        self._segments = registered if registered is not None else []  # shared with twins

    def gather(self, transfers: Sequence[Transfer]) -> None:
        """Device blocks -> extents."""
        selections = [self._upload(transfer.block_ids) for transfer in transfers]
        with self._ordered():
            for transfer, blocks in zip(transfers, selections, strict=True):
                staging = torch.empty_like(transfer.extent, device=self._device)
                parts = stack_parts(staging, self._stacks, len(transfer.block_ids))
                for stack, part in zip(self._stacks, parts, strict=True):
                    torch.index_select(stack, 1, blocks, out=part)
                self._dma(transfer, transfer.extent, staging)
            self._done.record(self._stream)

    def scatter(self, transfers: Sequence[Transfer]) -> None:
        """Extents -> device blocks; blocks marked None keep their bytes."""
        selections = [self._targets(transfer) for transfer in transfers]
        with self._ordered():
            for transfer, (positions, blocks) in zip(transfers, selections, strict=True):
                staging = torch.empty_like(transfer.extent, device=self._device)
                self._dma(transfer, staging, transfer.extent)
                parts = stack_parts(staging, self._stacks, len(transfer.block_ids))
                for stack, part in zip(self._stacks, parts, strict=True):
                    stack.index_copy_(1, blocks, part.index_select(1, positions))
            self._done.record(self._stream)

    def pin(self, address: int, length_bytes: int) -> None:
        """Register the mapping with CUDA; raises MemoryRefused, and then nothing is registered."""
        cudart = torch.cuda.cudart()
        for start, length in segments(address, length_bytes):
            status = cudart.cudaHostRegister(start, length, 0)
            if status.value != 0:
                self._forget_error()
                self.unpin()
                raise MemoryRefused(
                    f"CUDA cannot register {length} bytes of the arena (error {status.value}): "
                    "raise the locked-memory limit (ulimit -l) of the engine"
                )
            self._segments.append((start, length))

    def unpin(self) -> None:
        """Wait for the copies, then undo `pin`."""
        self.synchronize()
        cudart = torch.cuda.cudart()
        while self._segments:
            start, _ = self._segments.pop()
            cudart.cudaHostUnregister(start)

    def fence(self) -> None:
        """The current stream waits for every copy so far."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        """This thread waits, without the interpreter lock, for every copy so far."""
        self._done.synchronize()

    def mark(self) -> torch.cuda.Event:
        """An event on the copies' stream."""
        mark = torch.cuda.Event()
        mark.record(self._stream)
        return mark

    def twin(self) -> "CudaCopier":
        """A copier with a stream of its own; it copies only while the mapping is pinned here."""
        return CudaCopier(self._stacks, self._segments)

    def _ordered(self) -> torch.cuda.StreamContext:
        # The blocks must have been computed, and nothing may still read the ones overwritten.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)

    def _forget_error(self) -> None:
        # torch reads CUDA's last error after every launch: a refused registration must surface in
        # this launch, not in the engine's next one.
        with suppress(RuntimeError):
            torch.ones(1, device=self._device)

    def _upload(self, indices: Sequence[int | None]) -> torch.Tensor:
        # Pinned, or the copy would wait for the stream; and on the stream that will use it.
        with torch.cuda.stream(self._stream):
            host = torch.tensor(indices, dtype=torch.int64, pin_memory=True)
            return host.to(self._device, non_blocking=True)

    def _targets(self, transfer: Transfer) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in the chunk, and the device blocks they go to."""
        wanted = [(at, block) for at, block in enumerate(transfer.block_ids) if block is not None]
        return self._upload([at for at, _ in wanted]), self._upload([block for _, block in wanted])

    def _dma(self, transfer: Transfer, target: torch.Tensor, source: torch.Tensor) -> None:
        unit = source.element_size()
        for start, length in pieces(transfer.address, source.nbytes, self._segments):
            words = slice(start // unit, (start + length) // unit)
            target[words].copy_(source[words], non_blocking=True)


def segments(address: int, length_bytes: int) -> list[tuple[int, int]]:
    """A mapping cut into registrations of at most SEGMENT_BYTES: (address, length)."""
    starts = range(address, address + length_bytes, SEGMENT_BYTES)
    return [(start, min(SEGMENT_BYTES, address + length_bytes - start)) for start in starts]


def pieces(
    address: int, length_bytes: int, registered: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """An extent cut where registered segments begin: (offset in the extent, length)."""
    cuts = [start - address for start, _ in registered if 0 < start - address < length_bytes]
    edges = [0, *sorted(cuts), length_bytes]
    return [(here, after - here) for here, after in pairwise(edges)]
