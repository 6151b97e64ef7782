"""The object bench: its report, that it verifies every byte, and what it refuses."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from tests.servers import running_server

from kvkeep.bench import object as bench
from kvkeep.bench.pool import Pool
from kvkeep.bench.session import BenchFailed
from kvkeep.bench.shapes import SHAPES, Shape
from kvkeep.cli import main
from kvkeep.connectors.blocks import DeviceBlocks
from kvkeep.errors import KVKeepError

TINY = Shape("tiny", layers=3, block_bytes=4096, block_tokens=64)
PLAN = bench.Plan(tokens=512, rounds=2, shapes=("tiny",), lookup_samples=20)
SHAPE_KEYS = {
    "name",
    "bytes",
    "memcpy_gbps",
    "store_gbps",
    "retrieve_gbps",
    "store_over_memcpy",
    "retrieve_over_memcpy",
    "verified",
}
LOOKUP_KEYS = {"chunks", "p50_us", "p99_us", "socket_rtt_us", "hash_us"}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)


def flat(chunks: list[list[int]]) -> list[int]:
    return [block for chunk in chunks for block in chunk]


def quiet(_: str) -> None:
    pass


@pytest.mark.slow
def test_the_report() -> None:
    report = bench.run_object_bench(PLAN, quiet)
    assert [row["name"] for row in report["shapes"]] == ["tiny", "tiny contiguous"]
    for row in report["shapes"]:
        assert set(row) >= SHAPE_KEYS
        assert row["bytes"] == 2 * TINY.chunk_bytes == 2 * 3 * 4 * 4096
        assert row["verified"]
        assert row["store_over_memcpy"] == pytest.approx(
            row["store_gbps"] / row["memcpy_gbps"], rel=0.1, abs=0.01
        )
    assert [row["chunks"] for row in report["lookup"]] == [1, 16, 128]
    for row in report["lookup"]:
        assert set(row) == LOOKUP_KEYS
        assert 0 < row["p50_us"] <= row["p99_us"]


@pytest.mark.slow
def test_a_copy_that_loses_a_block_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter = DeviceBlocks.scatter

    def forgetful(self: DeviceBlocks, jobs: list[tuple[int, list[int | None]]]) -> int:
        (address, blocks), *rest = jobs
        return scatter(self, [(address, [*blocks[:-1], None]), *rest])

    monkeypatch.setattr(DeviceBlocks, "scatter", forgetful)
    with running_server(tmp_path, settings={"l1.session_staging_fraction": 1}) as server:
        report = bench.run_object_bench(replace(PLAN, socket=server.socket), quiet)
    assert [row["verified"] for row in report["shapes"]] == [False, False]


@pytest.mark.slow
def test_a_running_server_is_left_as_it_was(tmp_path: Path) -> None:
    with running_server(tmp_path, settings={"l1.session_staging_fraction": 1}) as server:
        bench.run_object_bench(replace(PLAN, socket=server.socket), quiet)
        l1 = server.status()["l1"]
        assert l1["objects"] == l1["staging_bytes"] == l1["reserved_bytes"] == 0


def test_a_server_with_too_little_room(tmp_path: Path) -> None:
    settings = {"l1.session_staging_fraction": 0.01}
    with (
        running_server(tmp_path, settings=settings) as server,
        pytest.raises(BenchFailed, match=r"over_cap.*l1\.session_staging_fraction"),
    ):
        bench.run_object_bench(replace(PLAN, socket=server.socket), quiet)


@pytest.mark.slow
def test_an_l2_is_left_as_it_was(tmp_path: Path) -> None:
    """Nothing of a bench is taken for broken, and nothing of it stays."""
    settings = {"l1.session_staging_fraction": 1}
    l2 = f"fs://{tmp_path}/l2?capacity=64MiB"
    with running_server(tmp_path, settings=settings, l2=l2) as server:
        bench.run_object_bench(replace(PLAN, socket=server.socket), quiet)
        (disk,) = server.status()["l2"]
        assert disk["operations"]["put"]["outcomes"]["ok"] > 0
        assert (disk["objects"], disk["quarantined"]) == (0, 0)
        assert server.status()["l1"]["objects"] == 0
    assert not list(tmp_path.glob("l2/quarantine/*"))


@pytest.mark.slow
def test_a_server_whose_quota_is_in_the_way(tmp_path: Path) -> None:
    settings = {"l1.session_staging_fraction": 1, "quota.default_l1": "8KiB"}
    with (
        running_server(tmp_path, settings=settings) as server,
        pytest.raises(BenchFailed, match=r"over_quota.*kvkeep quota set \"\" --l1 100%"),
    ):
        bench.run_object_bench(replace(PLAN, socket=server.socket), quiet)


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["bench", "object"]) == 1
    assert capsys.readouterr().err.rstrip().endswith("python -m pip install torch")


def test_a_server_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", replace(TINY, layers=1 << 40))
    with pytest.raises(KVKeepError, match=r"^l1\.size = .* is more than"):
        bench.run_object_bench(PLAN, quiet)


@pytest.mark.parametrize("scattered", [True, False])
def test_the_pool(scattered: bool) -> None:
    pool = Pool(TINY, 2, scattered=scattered, seed=1)
    pool.shuffle()
    source, target = flat(pool.source), flat(pool.target)
    assert len(set(source) | set(target)) == 2 * len(source) == 2 * len(target) == 16
    in_a_row = all(ids == list(range(ids[0], ids[0] + 4)) for ids in pool.source)
    assert in_a_row is not scattered
    assert not pool.equal()
    pool.memory[:, target] = pool.memory[:, source]
    assert pool.equal()
    pool.memory[2, target[-1], -1] += 1
    assert not pool.equal()


def test_shuffling_gives_chunks_other_blocks() -> None:
    pool = Pool(TINY, 4, scattered=True, seed=1)
    before = pool.source
    pool.shuffle()
    assert before != pool.source
    assert sorted(flat(before)) == sorted(flat(pool.source))


def test_the_8b_shape_is_256_mib_for_4096_tokens() -> None:
    assert SHAPES["8B"].chunk_bytes * 16 == 256 << 20
    assert SHAPES["SmolLM2-135M"].chunk_bytes * 16 == 90 << 20


def test_percentiles() -> None:
    seconds = [n * 1e-6 for n in range(1, 101)]
    assert bench._percentile_us(seconds, 50) == 50.0
    assert bench._percentile_us(seconds, 99) == 99.0
    assert bench._percentile_us([5e-6], 99) == 5.0
    assert bench._percentile_us(seconds, 50) == pytest.approx(1e6 * statistics.median(seconds), 0.5)
