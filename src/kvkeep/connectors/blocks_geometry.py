"""Reads how an engine's KV tensors lie in memory: which bytes are a block, and in what order.

A block of a layer must be one contiguous run. The layers of a group then form stacks of planes:
one stack where they are views of one storage with a constant step (layer-major, or block-major,
where a block is contiguous over all layers), else one stack per layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch

from kvkeep.errors import LayoutUnsupported

# Elements are copied as the widest word that divides every address, stride and size.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where one KV group's blocks lie: one stack of planes, or one stack per layer."""

    layers: tuple[str, ...]  # in the order of their bytes in an extent
    num_blocks: int
    block_bytes: int  # of one block in one layer
    block_major: bool
    stacks: tuple[torch.Tensor, ...]  # each [planes, num_blocks, words]
    interior: Mapping[str, object]  # shape, stride and dtype inside a block


@dataclass(frozen=True, slots=True)
class Transfer:
    """One chunk to copy: its extent as flat words, and a device block (or None) per block."""

    address: int
    extent: torch.Tensor  # [words of the chunk]
    block_ids: Sequence[int | None]


def read_geometry(kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None) -> Geometry:
    """Where the blocks of one KV group lie; raises LayoutUnsupported.

    All layers must agree on shape, stride and dtype: a group whose layers differ is several groups.
    """
    if not kv_caches:
        raise LayoutUnsupported("the engine registered no KV layers")
    planes = [_Plane.of(name, tensor, num_blocks) for name, tensor in kv_caches.items()]
    first = planes[0]
    for plane in planes:
        if plane.shape() != first.shape():
            raise LayoutUnsupported(
                f"layers {first.name} and {plane.name} of one KV group differ: "
                f"{first.shape()} and {plane.shape()}"
            )
    by_address: dict[int, _Plane] = {}
    for plane in planes:  # layers that share KV are several names for one plane
        by_address.setdefault(_address(plane), plane)
    planes = list(by_address.values())
    step_bytes = _constant_step(planes)
    if step_bytes is not None:
        planes.sort(key=_address)
    block_major = (
        len(planes) > 1
        and step_bytes == first.block_bytes
        and first.stride_bytes >= len(planes) * first.block_bytes
    )
    interior = {
        "shape": list(first.interior_shape),
        "stride": list(first.interior_stride),
        "dtype": str(first.tensor.dtype).removeprefix("torch."),
    }
    return Geometry(
        layers=tuple(plane.name for plane in planes),
        num_blocks=first.num_blocks,
        block_bytes=first.block_bytes,
        block_major=block_major,
        stacks=_stacks(planes, step_bytes, block_major=block_major),
        interior=interior,
    )


@dataclass(frozen=True, slots=True)
class _Plane:
    """One layer: block b is the `block_bytes` bytes at address + b * stride_bytes."""

    name: str
    tensor: torch.Tensor
    num_blocks: int
    block_bytes: int
    stride_bytes: int
    interior_shape: tuple[int, ...]
    interior_stride: tuple[int, ...]  # of every dimension but the first

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, num_blocks: int | None) -> Self:
        rows = tensor.shape[0] if tensor.ndim else 0
        blocks = num_blocks or rows
        if not rows or not tensor.numel() or rows % blocks:
            raise LayoutUnsupported(
                f"layer {name} has shape {tuple(tensor.shape)}: dimension 0 does not hold "
                f"{blocks} blocks"
            )
        per_block = rows // blocks
        # The same memory with the block's own rows inside it; a view by definition.
        shape = (per_block, *tensor.shape[1:])
        stride = tuple(tensor.stride())
        if not _is_dense(shape, stride) or (blocks > 1 and stride[0] * per_block < _size(shape)):
            raise LayoutUnsupported(
                f"layer {name} has stride {stride} for shape {tuple(tensor.shape)}: "
                "a block is not one contiguous run; ask the engine for another KV layout"
            )
        return cls(
            name=name,
            tensor=tensor,
            num_blocks=blocks,
            block_bytes=_size(shape) * tensor.element_size(),
            stride_bytes=stride[0] * per_block * tensor.element_size(),
            interior_shape=shape,
            interior_stride=stride[1:],
        )

    def shape(self) -> tuple[object, ...]:
        """What must be equal over the layers of a group."""
        return (
            self.num_blocks,
            self.interior_shape,
            self.stride_bytes,
            self.interior_stride,
            self.tensor.dtype,
            self.tensor.device,
        )


def _address(plane: _Plane) -> int:
    address: int = plane.tensor.data_ptr()
    return address


def _size(shape: Sequence[int]) -> int:
    total = 1
    for extent in shape:
        total *= extent
    return total


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements fill one run without gaps, in whatever order of dimensions."""
    expected = 1
    for step, extent in sorted(zip(stride, shape, strict=True)):
        if extent > 1:
            if step != expected:
                return False
            expected *= extent
    return True


def _constant_step(planes: Sequence[_Plane]) -> int | None:
    """Bytes from each plane to the next in one storage; None where they lie apart or unevenly."""
    storages = {plane.tensor.untyped_storage().data_ptr() for plane in planes}
    addresses = sorted(_address(plane) for plane in planes)
    steps = {after - before for before, after in pairwise(addresses)}
    if len(storages) > 1 or len(steps) > 1:
        return None
    return steps.pop() if steps else planes[0].block_bytes


def _stacks(
    planes: Sequence[_Plane], step_bytes: int | None, *, block_major: bool
) -> tuple[torch.Tensor, ...]:
    """Views of the engine's memory as words, each [planes, num_blocks, words of a block]."""
    word = _word(planes, step_bytes or 0)
    if block_major:  # all layers of a block are one run: one plane of blocks that much longer
        return (_stack(planes[0], word, planes=1, step_bytes=0, runs=len(planes)),)
    if step_bytes is not None:
        return (_stack(planes[0], word, planes=len(planes), step_bytes=step_bytes, runs=1),)
    return tuple(_stack(plane, word, planes=1, step_bytes=0, runs=1) for plane in planes)


def _word(planes: Sequence[_Plane], step_bytes: int) -> torch.dtype:
    """The widest word that divides every address, step and size."""
    sizes = {step_bytes, planes[0].block_bytes, planes[0].stride_bytes}
    sizes |= {_address(plane) for plane in planes}
    sizes |= {plane.tensor.untyped_storage().data_ptr() for plane in planes}
    return next(word for word in _WORDS if not any(size % word.itemsize for size in sizes))


def _stack(
    first: _Plane, word: torch.dtype, *, planes: int, step_bytes: int, runs: int
) -> torch.Tensor:
    """`planes` planes from `first` on, whose blocks are `runs` block runs long."""
    storage = first.tensor.untyped_storage()
    unit = word.itemsize
    # A tensor made in an engine's inference mode could not be written outside of it.
    with torch.inference_mode(mode=False):
        return torch.empty(0, dtype=word, device=first.tensor.device).set_(
            storage,
            (_address(first) - storage.data_ptr()) // unit,
            (planes, first.num_blocks, runs * first.block_bytes // unit),
            (step_bytes // unit, first.stride_bytes // unit, 1),
        )


def stack_parts(
    flat: torch.Tensor, stacks: Sequence[torch.Tensor], blocks: int
) -> list[torch.Tensor]:
    """A chunk's flat words as one view per stack, each [planes, blocks, words]."""
    shapes = [(stack.shape[0], blocks, stack.shape[2]) for stack in stacks]
    parts = flat.split_with_sizes([planes * blocks * words for planes, blocks, words in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
