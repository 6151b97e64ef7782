"""The backend bench: its report, that it verifies what it moved, and what it refuses."""

from pathlib import Path

import pytest

from kvkeep.bench import backend as bench
from kvkeep.bench.session import BenchFailed
from kvkeep.errors import ConfigError

KEYS = {
    "backend",
    "objects",
    "object_bytes",
    "put_gbps",
    "get_gbps",
    "reference_put_gbps",
    "reference_get_gbps",
    "put_ratio",
    "get_ratio",
    "verified",
}


def small(where: str | Path, **more: int) -> dict[str, object]:
    amounts = bench.Amounts(**{"objects": 12, "object_bytes": 70_001, "rounds": 2} | more)
    return bench.run(str(where), amounts, progress=lambda text: None)


def test_the_report(tmp_path: Path) -> None:
    report = small(tmp_path)
    assert set(report) == KEYS
    assert (report["backend"], report["objects"], report["object_bytes"]) == ("fs", 12, 70_001)
    assert report["verified"] is True
    numbers = [report[name] for name in KEYS if name.endswith(("gbps", "ratio"))]
    assert all(isinstance(number, float) and number > 0 for number in numbers)
    assert not list(tmp_path.iterdir())  # it leaves nothing behind


def test_a_url_with_options(tmp_path: Path) -> None:
    url = f"fs://{tmp_path}?capacity=64MiB&direct=off&readers=2&writers=1"
    assert small(url)["verified"] is True


def test_encrypted(tmp_path: Path) -> None:
    amounts = bench.Amounts(12, 70_001, 1)
    report = bench.run(str(tmp_path), amounts, encrypted=True, progress=lambda text: None)
    assert set(report) == {*KEYS, "encrypted"}
    assert report["verified"] is True


def test_wrong_bytes_are_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench._Kept.get

    async def spoiled(kept: bench._Kept) -> float:
        seconds = await real(kept)
        kept._target[3][70_000] ^= 1
        return seconds

    monkeypatch.setattr(bench._Kept, "get", spoiled)
    assert small(tmp_path)["verified"] is False


def test_bytes_left_from_the_round_before_are_not_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def idle(kept: bench._Kept) -> float:
        return 1.0

    monkeypatch.setattr(bench._Kept, "get", idle)
    assert small(tmp_path)["verified"] is False


@pytest.mark.parametrize("more", [{"objects": 0}, {"object_bytes": 0}, {"rounds": 0}])
def test_nothing_to_measure(tmp_path: Path, more: dict[str, int]) -> None:
    with pytest.raises(BenchFailed, match="at least 1"):
        small(tmp_path, **more)


def test_too_much_for_the_disk(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="free"):
        small(tmp_path, objects=1 << 20, object_bytes=1 << 30)


def test_too_little_capacity_ends_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="FULL"):
        small(f"fs://{tmp_path}?capacity=1MiB", object_bytes=2 << 20)
    assert not list(tmp_path.iterdir())


def test_other_backends_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="not redis"):
        small("redis://host/1")
    with pytest.raises(ConfigError, match="typo"):
        small(f"fs://{tmp_path}?typo=1")
    with pytest.raises(BenchFailed, match="cannot be used"):
        small(tmp_path / "missing")
