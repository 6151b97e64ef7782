"""`bench engine`: small settings on the real engine, and its arithmetic without one."""

import json
import random
from pathlib import Path

import pytest

from kvkeep.bench.engine import Hit, Pair, bootstrap_ci95, run_engine_bench, summary
from kvkeep.bench.engine_messages import Answer


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_small_settings_on_the_real_engine(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "engine.json"
    report = run_engine_bench(
        prompt_tokens=700, pairs=2, repeats=2, json_path=path, progress=said.append
    )
    assert json.loads(path.read_text()) == report
    assert report["prompt_tokens"] == 776
    assert report["same_tokens"] is True
    ttft_s = report["ttft_s"]
    assert set(ttft_s) == {"cold", "native_hit", "l1_hit", "l2_hit"}
    assert ttft_s["cold"] > ttft_s["l1_hit"] > 0
    assert ttft_s["native_hit"] > 0
    assert ttft_s["l2_hit"] == {}
    assert report["cached_tokens"] == {"native_hit": 768, "l1_hit": 768}
    miss = report["all_miss"]
    assert miss["pairs"] == 2
    assert 0.5 < miss["cpu_ratio"] < 2
    low, high = miss["ttft_ratio_ci95"]
    assert low <= miss["ttft_ratio"] <= high
    assert any("pair 2 of 2" in text for text in said)


def answer(
    *, ttft_s: float = 1.0, cpu_s: float = 1.0, cached: int = 0, tokens: tuple[int, ...] = (1, 2)
) -> Answer:
    return Answer(
        request="r",
        prompt_tokens=776,
        cached_tokens=cached,
        ttft_s=ttft_s,
        total_s=ttft_s,
        cpu_s=cpu_s,
        token_ids=list(tokens),
        text="",
    )


def hit(l1_s: float, tokens: tuple[int, ...] = (1, 2)) -> Hit:
    return Hit(
        answer(ttft_s=10.0),
        answer(ttft_s=0.1, cached=768),
        answer(ttft_s=l1_s, cached=768, tokens=tokens),
    )


def test_summary() -> None:
    misses = [
        Pair(answer(cpu_s=1.02, ttft_s=1.1), answer()),
        Pair(answer(cpu_s=2.02, ttft_s=2.0), answer(cpu_s=2.0, ttft_s=2.0)),
        Pair(answer(cpu_s=9.0, ttft_s=9.0), answer()),  # one bad pair moves no median
    ]
    report = summary([hit(0.12), hit(0.11), hit(0.9)], misses)
    assert report["ttft_s"] == {"cold": 10.0, "native_hit": 0.1, "l1_hit": 0.12, "l2_hit": {}}
    assert report["l1_over_native"] == 1.2
    assert report["all_miss"]["cpu_ratio"] == 1.02
    assert report["all_miss"]["ttft_ratio"] == 1.1
    assert report["all_miss"]["ttft_ratio_ci95"] == [1.0, 9.0]
    assert report["all_miss"]["pairs"] == 3
    assert report["same_tokens"] is True


def test_one_other_token_anywhere_is_reported() -> None:
    same = Pair(answer(), answer())
    assert summary([hit(0.1)], [same])["same_tokens"] is True
    assert summary([hit(0.1, tokens=(1, 3))], [same])["same_tokens"] is False
    assert summary([hit(0.1)], [Pair(answer(tokens=(1, 3)), answer())])["same_tokens"] is False


def test_the_interval_is_repeatable_and_narrows_with_more_pairs() -> None:
    chance = random.Random(3)
    few = [chance.gauss(1.0, 0.1) for _ in range(20)]
    many = few * 10
    low, high = bootstrap_ci95(few)
    assert (low, high) == bootstrap_ci95(few)
    assert 0.9 < low < high < 1.1
    narrow_low, narrow_high = bootstrap_ci95(many)
    assert narrow_high - narrow_low < high - low
