"""The real vLLM with an L2 on a real disk."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.parent import scenario

NOTHING_LEFT = {
    "pending_lookups": 0, "fetches": 0, "fetching_bytes": 0, "persists": 0,
    "persist_queue_bytes": 0,
}  # fmt: skip


def check_stampede(answer: dict[str, Any], requests: int, chunks: int) -> None:
    assert answer["same"] == [True] * requests
    # One fetch per object, whoever waits for it.
    assert answer["fetched_objects"] == {"ok": chunks}
    assert min(answer["cached"]) >= chunks * 256
    assert answer["left"] == NOTHING_LEFT
    assert answer["problems"] == []
    assert answer["errors"] == 0


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_many_requests_for_one_prefix_that_is_in_l2_only(tmp_path: Path, short_path: str) -> None:
    answer = scenario(
        "stampede", short_path, place=str(tmp_path / "l2"), requests=12, prefix_tokens=800
    )
    check_stampede(answer, 12, 3)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_fifty_requests_for_a_long_prefix(tmp_path: Path, short_path: str) -> None:
    answer = scenario(
        "stampede", short_path, place=str(tmp_path / "l2"), requests=50, prefix_tokens=3_000
    )
    print(answer["without_s"], answer["with_s"])
    check_stampede(answer, 50, 11)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_l1_smaller_than_a_prompt(tmp_path: Path, short_path: str) -> None:
    answer = scenario("small_l1", short_path, place=str(tmp_path / "l2"))
    assert all(answer["same"])
    assert answer["same_burst"]
    most = answer["l1"]["capacity_bytes"] // 2 // answer["chunk_bytes"] * 64
    assert all(64 <= cached <= most for cached in answer["cached"]), answer["cached"]
    assert sum(answer["cached_burst"]) > 0
    assert answer["l1"]["reserved_bytes"] == answer["l1"]["staging_bytes"] == 0
    assert answer["left"] == NOTHING_LEFT
    assert answer["problems"] == []
    assert answer["errors"] == 0
