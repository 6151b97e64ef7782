"""What one chunk costs at a million of them, everything included. Time is left to the bench."""

import json
import subprocess
import sys
from typing import Any

import pytest

MOST_BYTES = 600  # per chunk, DESIGN's bound


def measured(chunks: int) -> dict[str, Any]:
    """In a process of its own, whose memory is not from earlier tests."""
    command = [sys.executable, "-m", "kvkeep", "bench", "index", "--chunks", str(chunks), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["chunks"] == chunks
    return report


@pytest.mark.slow
def test_a_chunk_costs_little_memory() -> None:
    report = measured(100_000)
    assert 100 < report["bytes_per_entry"] <= MOST_BYTES
    assert set(report["lookup_128_us"]) == {"1000", "100000"}
    assert report["lookup_ratio"] > 0
    assert set(report["longest_call_ms"]) >= {"stage", "commit", "lookup", "evict"}


@pytest.mark.prove
@pytest.mark.timeout(600)
def test_a_chunk_costs_little_memory_among_a_million() -> None:
    assert 100 < measured(1_000_000)["bytes_per_entry"] <= MOST_BYTES
