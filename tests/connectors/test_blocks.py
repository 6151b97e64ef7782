"""Device blocks <-> extents: every layout against a copy of one block at a time.

The reference knows only (layer tensor, block id) -> bytes and the documented extent order. What
needs a GPU is not tested here; the CUDA copier's arithmetic is.
"""

import ctypes
import json
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvkeep.connectors.blocks import DeviceBlocks, Run, copier_for, runs
from kvkeep.connectors.blocks_cuda import SEGMENT_BYTES, pieces, segments
from kvkeep.errors import LayoutUnsupported

Caches = dict[str, torch.Tensor]

LAYOUTS = ("layer_major", "block_major", "interleaved", "uneven", "separate", "reversed")
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


class Extents:
    """Slots of anonymous shared memory, as a client's mapping of the arena has them."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes + -slot_bytes % 64
        self._map = mmap.mmap(-1, slots * self._slot_bytes, mmap.MAP_SHARED)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def address(self, slot: int) -> int:
        return self._base + slot * self._slot_bytes

    def read(self, slot: int, length_bytes: int) -> bytes:
        return ctypes.string_at(self.address(slot), length_bytes)

    def write(self, slot: int, content: bytes) -> None:
        ctypes.memmove(self.address(slot), content, len(content))


def make_caches(layout: str, layers: int, blocks: int, dtype: torch.dtype, words: int) -> Caches:
    """KV tensors [blocks, 3, words] of each layer, filled with bytes that all differ by place."""
    size = blocks * 3 * words
    shape = (blocks, 3, words)
    match layout:
        case "layer_major" | "reversed":
            whole = torch.empty(layers, *shape, dtype=dtype)
            views = list(whole.unbind(0))
        case "block_major":
            whole = torch.empty(blocks, layers, 3, words, dtype=dtype)
            views = list(whole.unbind(1))
        case "interleaved":  # another group's layers lie between ours
            whole = torch.empty(blocks, 2 * layers + 1, 3, words, dtype=dtype)
            views = list(whole.unbind(1))[: 2 * layers : 2]
        case "uneven":
            whole = torch.empty(size * (layers + layers * layers), dtype=dtype)
            views = [whole[size * i * i :][:size].view(shape) for i in range(1, layers + 1)]
        case _:
            views = [torch.empty(shape, dtype=dtype) for _ in range(layers)]
    named = {f"layer.{i}": view for i, view in enumerate(views)}
    generator = torch.Generator().manual_seed(layers * 1000 + blocks)
    for view in views:
        content = torch.randint(0, 256, (view.nbytes,), dtype=torch.uint8, generator=generator)
        view.copy_(content.view(dtype).view(shape))
    return dict(reversed(named.items())) if layout == "reversed" else named


def block_content(tensor: torch.Tensor, block: int) -> bytes:
    flat = tensor[block].contiguous().view(-1).view(torch.uint8)
    return bytes(flat.tolist())


def pool_content(caches: Caches) -> dict[str, list[bytes]]:
    return {
        name: [block_content(tensor, block) for block in range(tensor.shape[0])]
        for name, tensor in caches.items()
    }


def expected_extent(device: DeviceBlocks, caches: Caches, block_ids: Sequence[int]) -> bytes:
    """The documented order, one block of one layer at a time."""
    if device.describe()["order"] == "block,layer":
        places = [(name, block) for block in block_ids for name in device.layers]
    else:
        places = [(name, block) for name in device.layers for block in block_ids]
    return b"".join(block_content(caches[name], block) for name, block in places)


@dataclass(frozen=True)
class Case:
    layout: str
    layers: int
    blocks: int
    dtype: torch.dtype
    words: int
    chunks: tuple[tuple[int, ...], ...]  # block ids of each chunk, all different


@st.composite
def cases(draw: st.DrawFn) -> Case:
    blocks = draw(st.integers(1, 12))
    order = draw(st.permutations(range(blocks)) | st.just(list(range(blocks))))
    per_chunk = draw(st.integers(1, blocks))
    starts = range(0, blocks - per_chunk + 1, per_chunk)
    return Case(
        layout=draw(st.sampled_from(LAYOUTS)),
        layers=draw(st.integers(1, 4)),
        blocks=blocks,
        dtype=draw(st.sampled_from(DTYPES)),
        words=draw(st.integers(1, 9)),
        chunks=tuple(tuple(order[start : start + per_chunk]) for start in starts),
    )


def build(case: Case) -> tuple[Caches, DeviceBlocks, Extents]:
    caches = make_caches(case.layout, case.layers, case.blocks, case.dtype, case.words)
    device = DeviceBlocks.from_kv_caches(caches, case.blocks)
    return caches, device, Extents(len(case.chunks) + 1, device.chunk_bytes(len(case.chunks[0])))


relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@relaxed
@given(cases())
def test_gather_writes_the_documented_order_and_nothing_else(case: Case) -> None:
    caches, device, extents = build(case)
    before = pool_content(caches)
    chunk_bytes = device.chunk_bytes(len(case.chunks[0]))
    extents.write(len(case.chunks), b"\xa5" * chunk_bytes)

    copied = device.gather([(extents.address(i), ids) for i, ids in enumerate(case.chunks)])

    assert copied == chunk_bytes * len(case.chunks)
    for i, ids in enumerate(case.chunks):
        assert extents.read(i, chunk_bytes) == expected_extent(device, caches, ids)
    assert extents.read(len(case.chunks), chunk_bytes) == b"\xa5" * chunk_bytes
    assert pool_content(caches) == before


@relaxed
@given(cases(), st.data())
def test_scatter_restores_exactly_the_blocks_asked_for(case: Case, data: st.DataObject) -> None:
    caches, device, extents = build(case)
    stored = pool_content(caches)
    device.gather([(extents.address(i), ids) for i, ids in enumerate(case.chunks)])
    for tensor in caches.values():
        tensor.zero_()
    blank = pool_content(caches)
    moved_to = data.draw(st.permutations(range(case.blocks)))
    kept = data.draw(st.sets(st.integers(0, case.blocks - 1)))
    jobs = [
        (extents.address(i), [moved_to[b] if b in kept else None for b in ids])
        for i, ids in enumerate(case.chunks)
    ]

    copied = device.scatter(jobs)

    loaded = [b for ids in case.chunks for b in ids if b in kept]
    assert copied == device.chunk_bytes(len(loaded))
    for name, content in pool_content(caches).items():
        expected = list(blank[name])
        for block in loaded:
            expected[moved_to[block]] = stored[name][block]
        assert content == expected


def test_a_tail_of_a_chunk_leaves_the_local_hit_alone() -> None:
    caches = make_caches("layer_major", 3, 8, torch.bfloat16, 16)
    device = DeviceBlocks.from_kv_caches(caches, 8)
    extents = Extents(1, device.chunk_bytes(4))
    device.gather([(extents.address(0), [0, 1, 2, 3])])
    before = pool_content(caches)
    assert device.scatter([(extents.address(0), [None, None, 6, 5])]) == device.chunk_bytes(2)
    after = pool_content(caches)
    for name in caches:
        assert after[name][6] == before[name][2]
        assert after[name][5] == before[name][3]
        assert [after[name][b] for b in (0, 1, 2, 3, 4, 7)] == [
            before[name][b] for b in (0, 1, 2, 3, 4, 7)
        ]


def test_nothing_to_copy_is_zero_bytes() -> None:
    device = DeviceBlocks.from_kv_caches(make_caches("layer_major", 2, 4, torch.float32, 8), 4)
    extents = Extents(1, device.chunk_bytes(2))
    assert device.gather([]) == device.scatter([]) == 0
    assert device.scatter([(extents.address(0), [None, None])]) == 0


# ---- what it refuses


@pytest.fixture
def small() -> tuple[Caches, DeviceBlocks, Extents]:
    caches = make_caches("layer_major", 2, 6, torch.float32, 8)
    device = DeviceBlocks.from_kv_caches(caches, 6)
    return caches, device, Extents(2, device.chunk_bytes(2))


@pytest.mark.parametrize("bad", [-1, 6, 1 << 40])
def test_a_bad_block_id_copies_nothing(
    small: tuple[Caches, DeviceBlocks, Extents], bad: int
) -> None:
    caches, device, extents = small
    before = pool_content(caches)
    first, second = extents.address(0), extents.address(1)
    with pytest.raises(ValueError, match=f"block {bad} is outside the pool of 6"):
        device.gather([(first, [0, 1]), (second, [2, bad])])
    assert extents.read(0, device.chunk_bytes(2)) == bytes(device.chunk_bytes(2))
    with pytest.raises(ValueError, match=f"block {bad} is outside the pool of 6"):
        device.scatter([(first, [0, 1]), (second, [None, bad])])
    assert pool_content(caches) == before


def test_one_target_for_two_blocks_copies_nothing(
    small: tuple[Caches, DeviceBlocks, Extents],
) -> None:
    caches, device, extents = small
    before = pool_content(caches)
    with pytest.raises(ValueError, match="target of two"):
        device.scatter([(extents.address(0), [0, 3]), (extents.address(1), [3, 4])])
    assert pool_content(caches) == before


def test_an_extent_off_its_word_copies_nothing(
    small: tuple[Caches, DeviceBlocks, Extents],
) -> None:
    caches, device, extents = small
    before = pool_content(caches)
    with pytest.raises(ValueError, match="not a multiple of 8"):
        device.scatter([(extents.address(0), [0]), (extents.address(1) + 4, [1])])
    assert pool_content(caches) == before


@pytest.mark.parametrize(
    "caches",
    [
        pytest.param({}, id="no layers"),
        pytest.param({"a": torch.empty(0, 4)}, id="no blocks"),
        pytest.param({"a": torch.tensor(1.0)}, id="no dimensions"),
        pytest.param({"a": torch.zeros(2, 8, 4)}, id="key and value planes apart"),
        pytest.param({"a": torch.zeros(4, 8).t()}, id="heads outermost"),
        pytest.param({"a": torch.zeros(8, 6)[:, :4].view(8, 2, 2)[:, :, :1]}, id="gaps in a block"),
        pytest.param({"a": torch.zeros(1, 4).expand(8, 4)}, id="blocks on one place"),
        pytest.param({"a": torch.zeros(8, 4), "b": torch.zeros(8, 5)}, id="other size"),
        pytest.param(
            {"a": torch.zeros(8, 4), "b": torch.zeros(8, 4).to(torch.int32)}, id="other dtype"
        ),
        pytest.param({"a": torch.zeros(8, 4, device="meta")}, id="unknown device"),
    ],
)
def test_an_unsupported_layout_is_refused(caches: Caches) -> None:
    with pytest.raises(LayoutUnsupported):
        DeviceBlocks.from_kv_caches(caches, 8 if caches else None)


# ---- what it reads from the tensors


def test_the_shape_of_vllm_on_a_cpu() -> None:
    storage = torch.zeros(30, 4, 3, 32, 128, dtype=torch.bfloat16)
    caches = {f"model.layers.{i}.self_attn.attn": storage[i] for i in range(30)}
    device = DeviceBlocks.from_kv_caches(caches, None)
    assert (len(device.layers), device.num_blocks, device.block_bytes) == (30, 4, 24576)
    assert device.chunk_bytes(8) == 30 * 8 * 24576
    described = device.describe(attention_isa="amx")
    assert json.loads(json.dumps(described)) == described
    assert described["shape"] == [1, 3, 32, 128]
    assert described["stride"] == [4096, 128, 1]
    assert described["dtype"] == "bfloat16"
    assert described["device"] == "cpu"
    assert described["attention_isa"] == "amx"
    assert described["instruction_set"]


@pytest.mark.parametrize(
    ("layout", "order", "stacks"),
    [
        ("layer_major", "layer,block", 1),
        ("reversed", "layer,block", 1),
        ("block_major", "block,layer", 1),
        ("interleaved", "layer,block", 1),
        ("uneven", "layer,block", 3),
        ("separate", "layer,block", 3),
    ],
)
def test_few_large_operations_where_memory_allows(layout: str, order: str, stacks: int) -> None:
    device = DeviceBlocks.from_kv_caches(make_caches(layout, 3, 5, torch.float32, 8), 5)
    assert device.describe()["order"] == order
    assert len(device._geometry.stacks) == stacks


def test_the_description_tells_meanings_apart_and_not_pool_sizes() -> None:
    def described(layout: str, blocks: int, dtype: torch.dtype, words: int) -> dict[str, object]:
        caches = make_caches(layout, 3, blocks, dtype, words)
        return DeviceBlocks.from_kv_caches(caches, blocks).describe()

    base = described("layer_major", 5, torch.float32, 8)
    assert described("layer_major", 9, torch.float32, 8) == base
    assert described("layer_major", 1, torch.float32, 8) == base
    assert described("separate", 5, torch.float32, 8) == base
    assert described("block_major", 5, torch.float32, 8) != base
    assert described("layer_major", 5, torch.int32, 8) != base
    assert described("layer_major", 5, torch.float32, 4) != base
    transposed = {f"layer.{i}": torch.zeros(5, 8, 3).transpose(1, 2) for i in range(3)}
    assert DeviceBlocks.from_kv_caches(transposed, 5).describe() != base


def test_layers_that_share_memory_are_copied_once() -> None:
    caches = make_caches("layer_major", 2, 4, torch.float32, 8)
    shared = {**caches, "layer.again": caches["layer.0"]}
    device = DeviceBlocks.from_kv_caches(shared, 4)
    assert device.layers == ("layer.0", "layer.1")
    assert device.chunk_bytes(1) == 2 * device.block_bytes


def test_kernel_blocks_join_to_the_block_tables_blocks() -> None:
    caches = {"a": torch.arange(48, dtype=torch.int32).view(12, 4)}
    device = DeviceBlocks.from_kv_caches(caches, 4)
    assert (device.num_blocks, device.block_bytes) == (4, 48)
    assert device.describe()["shape"] == [3, 4]
    extents = Extents(1, device.chunk_bytes(1))
    device.gather([(extents.address(0), [2])])
    assert extents.read(0, 48) == bytes(caches["a"][6:9].contiguous().view(torch.uint8).view(-1))


def test_caches_of_an_inference_mode_are_written_outside_of_it() -> None:
    with torch.inference_mode():
        caches = {"a": torch.arange(32, dtype=torch.int32).view(8, 4)}
        device = DeviceBlocks.from_kv_caches(caches, 8)
    extents = Extents(1, device.chunk_bytes(1))
    device.gather([(extents.address(0), [5])])
    device.scatter([(extents.address(0), [0])])
    assert caches["a"][0].tolist() == caches["a"][5].tolist()


@given(st.lists(st.none() | st.integers(0, 6), max_size=12))
def test_runs_are_the_list_again_and_as_few_as_can_be(block_ids: list[int | None]) -> None:
    found = runs(block_ids)
    spelt = [None if r.first is None else r.first + i for r in found for i in range(r.length)]
    assert spelt == block_ids
    breaks = sum(
        after != (None if before is None else before + 1) for before, after in pairwise(block_ids)
    )
    assert len(found) == (breaks + 1 if block_ids else 0)


def test_runs_by_example() -> None:
    assert runs([None, None, 4, 5, 9]) == [Run(None, 2), Run(4, 2), Run(9, 1)]


def test_the_interpreter_is_free_during_a_scatter() -> None:
    caches = {"a": torch.zeros(2, 1 << 24, dtype=torch.int32)}
    device = DeviceBlocks.from_kv_caches(caches, 2)
    extents = Extents(1, device.chunk_bytes(2))
    gaps: list[float] = []
    stop = threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not stop.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        begin = time.perf_counter()
        for _ in range(5):
            device.scatter([(extents.address(0), [1, 0])])
        each_s = (time.perf_counter() - begin) / 5
    finally:
        stop.set()
        watcher.join()
    assert sorted(gaps)[len(gaps) // 2] < each_s / 2


# ---- the CUDA copier's arithmetic, and who is chosen


def test_an_unknown_device_has_no_copier() -> None:
    with pytest.raises(LayoutUnsupported, match="meta"):
        copier_for([torch.empty(1, 1, 1, device="meta")])


@given(st.integers(0, 1 << 44), st.integers(1, 5 * SEGMENT_BYTES))
def test_segments_tile_the_mapping(address: int, length: int) -> None:
    found = segments(address, length)
    assert found[0][0] == address
    assert sum(size for _, size in found) == length
    assert all(0 < size <= SEGMENT_BYTES for _, size in found)
    assert all(start + size == after for (start, size), (after, _) in pairwise(found))


@given(st.integers(0, 3 * SEGMENT_BYTES - 1), st.integers(1, SEGMENT_BYTES))
def test_no_piece_crosses_two_registrations(offset: int, length: int) -> None:
    base = 1 << 40
    length = min(length, 3 * SEGMENT_BYTES - offset)
    registered = segments(base, 3 * SEGMENT_BYTES)
    found = pieces(base + offset, length, registered)
    assert sum(size for _, size in found) == length
    for start, size in found:
        first = (offset + start) // SEGMENT_BYTES
        assert first == (offset + start + size - 1) // SEGMENT_BYTES


def test_an_extent_without_registrations_is_one_piece() -> None:
    assert pieces(4096, 100, []) == [(0, 100)]
