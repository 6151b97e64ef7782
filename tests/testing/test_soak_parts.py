"""What soak judges by: trends of samples, and books that must balance."""

import random

from kvkeep.testing.chaos_ledger import Count, Ledger, committed, missed, staged
from kvkeep.testing.soak_books import books
from kvkeep.testing.soak_trend import level_growth, trend
from kvkeep.types import CommitOutcome, Reason, StageOutcome

CHUNK_BYTES = 4096
TIMES = [n / 100 for n in range(400)]


def wobble(seed: int, slope: float) -> list[float]:
    """Samples of which each is near the one before, as memory is."""
    rng, level, values = random.Random(seed), 0.0, []
    for time in TIMES:
        level = 0.9 * level + rng.uniform(-1, 1)
        values.append(1000 + level + slope * time)
    return values


def test_a_wobble_is_no_growth() -> None:
    found = [trend(TIMES, wobble(seed, 0.0)) for seed in range(40)]
    assert not any(each.grows(1.0) for each in found)
    assert all(abs(each.mean - 1000) < 3 for each in found)


def test_a_growth_is_found() -> None:
    for seed in range(40):
        found = trend(TIMES, wobble(seed, 10.0))
        assert found.grows(1.0)
        assert abs(found.slope - 10) < 2
        assert not found.grows(20.0)


def test_too_few_samples_say_nothing() -> None:
    assert not trend([0.0, 1.0], [0.0, 1e9]).grows(0.0)
    assert trend([], []).mean == 0.0


def test_the_middle_of_the_last_third_against_the_first() -> None:
    assert level_growth([5, 9, 5, 7, 6, 5, 8, 5, 5]) == 0
    assert level_growth([5, 9, 5, 7, 6, 5, 8, 6, 6]) == 1
    assert level_growth([5, 5, 1, 7, 6, 5, 5, 5, 5]) == 0, "a process reconnected"
    assert level_growth([5, 9]) == 0


def small_day() -> tuple[Ledger, dict[str, float], dict[str, int]]:
    """Two chunks stored, one of them read twice, one lookup that misses a chunk."""
    ledger = Ledger(2)
    first, second = ledger.rows
    first.add(staged(StageOutcome.GRANTED), 3)
    first.add(committed(CommitOutcome.COMMITTED), 2)
    first.add(Count.ABORTED_CHUNKS)
    first.add(Count.COMMITTED_BYTES, 2 * CHUNK_BYTES)
    for row in (first, second):
        row.add(Count.LOOKUPS)
        row.add(Count.ANSWERED)
        row.add(Count.HIT_CHUNKS)
        row.add(Count.RIGHT_CHUNKS)
        row.add(Count.READ_BYTES, CHUNK_BYTES)
        row.add(Count.ENDED)
    second.add(missed(Reason.NEVER_STORED))
    metrics: dict[str, float] = {
        'kvkeep_stage_chunks_total{outcome="granted"}': 3,
        'kvkeep_commit_chunks_total{outcome="committed"}': 2,
        "kvkeep_aborted_total": 1,
        "kvkeep_lookups_total": 2,
        "kvkeep_hit_chunks_total": 2,
        'kvkeep_lookup_missed_chunks_total{reason="never_stored"}': 1,
        'kvkeep_read_parts_total{outcome="used"}': 2,
        "kvkeep_evicted_bytes_total": CHUNK_BYTES,
    }
    return ledger, metrics, {"resident_bytes": CHUNK_BYTES}


def unequal(ledger: Ledger, metrics: dict[str, float], l1: dict[str, int]) -> list[str]:
    return [
        line.what for line in books(metrics, l1, ledger, CHUNK_BYTES) if line.server != line.clients
    ]


def test_books_that_balance() -> None:
    ledger, metrics, l1 = small_day()
    assert unequal(ledger, metrics, l1) == []


def test_every_counter_is_looked_at() -> None:
    for name in small_day()[1]:
        ledger, metrics, l1 = small_day()
        before = unequal(ledger, metrics, l1)
        metrics[name] += 1
        assert unequal(ledger, metrics, l1) != before, name
    ledger, metrics, l1 = small_day()
    assert "bytes of L1" in unequal(ledger, metrics, {"resident_bytes": 0})
    assert "dropped" in unequal(ledger, metrics | {"kvkeep_dropped_total": 1}, l1)
