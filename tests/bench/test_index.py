"""bench index with few chunks: the report's shape, and that it notices what went wrong."""

import gc

import pytest

from kvkeep.bench import index
from kvkeep.bench.session import BenchFailed
from kvkeep.core.eviction import PrefixLRU


def test_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "FEW", 300)
    monkeypatch.setattr(index, "LOOKUPS", 5)
    said: list[str] = []
    report = index.run(600, said.append)
    assert report["chunks"] == 600
    assert set(report["lookup_128_us"]) == {"300", "600"}
    assert set(report["longest_call_ms"]) == {"stage", "commit", "lookup", "evict", "end"}
    assert all(longest > 0 for longest in report["longest_call_ms"].values())
    assert "0 of 600 chunks stored" in said
    assert gc.isenabled()


def test_a_store_that_finds_no_room_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixLRU, "evict", lambda *_: [])
    monkeypatch.setattr("kvkeep.core.arena.Arena.search", lambda *_, **__: ([], 0))
    filled = index._Filled(300)
    filled.fill(lambda _: None)
    with pytest.raises(BenchFailed, match="prompt 3"):
        filled.evict(1)
    assert not filled.calls["end"].seconds
