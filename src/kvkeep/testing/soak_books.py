"""Compares a server's counters with what its clients counted themselves: every byte exactly once.

Three kinds of rows: a counter and the clients' own sum; counters that must add up among themselves
(what came into L1 is there or was evicted); and what must be zero because nobody did it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvkeep.testing.chaos_ledger import Count, Ledger

BACKEND = 'backend="fs"'
_LABELS = {
    "stage": ("kvkeep_stage_chunks_total", "outcome"),
    "commit": ("kvkeep_commit_chunks_total", "outcome"),
    "miss": ("kvkeep_lookup_missed_chunks_total", "reason"),
}
_PLAIN = {
    "kvkeep_lookups_total": Count.LOOKUPS,
    "kvkeep_hit_chunks_total": Count.HIT_CHUNKS,
    f"kvkeep_l2_hit_chunks_total{{{BACKEND}}}": Count.L2_CHUNKS,
    "kvkeep_loaded_tokens_total": Count.LOADED_TOKENS,
    'kvkeep_read_parts_total{outcome="used"}': Count.ENDED,
    "kvkeep_aborted_total": Count.ABORTED_CHUNKS,
}
_NEVER = ("end_again", "abort_again", "cancel_again", "cancelled", "dropped", "revoked", "cleared",
          "forgotten", "persist_failed", "persist_overflow")  # fmt: skip


class Line(NamedTuple):
    """One row of the books."""

    what: str
    server: float
    clients: float


def books(
    metrics: Mapping[str, float], l1: Mapping[str, Any], ledger: Ledger, chunk_bytes: int
) -> list[Line]:
    """Every row, equal or not. All zero counters that the server does not show are zero."""
    return [
        *_counted_twice(metrics, ledger),
        *_adding_up(metrics, l1, ledger, chunk_bytes),
        *(Line(name, metrics.get(f"kvkeep_{name}_total", 0), 0) for name in _NEVER),
    ]


def _counted_twice(metrics: Mapping[str, float], ledger: Ledger) -> Iterator[Line]:
    for name, word in _PLAIN.items():
        yield Line(name, metrics.get(name, 0), ledger.total(word))
    for name, count in ledger.outcomes().items():
        kind, _, outcome = name.partition("_")
        family, label = _LABELS[kind]
        sample = f'{family}{{{label}="{outcome}"}}'
        yield Line(sample, metrics.get(sample, 0), count)


def _adding_up(
    metrics: Mapping[str, float], l1: Mapping[str, Any], ledger: Ledger, chunk_bytes: int
) -> Iterator[Line]:
    def counter(name: str) -> float:
        return metrics.get(f"kvkeep_{name}_total", 0)

    def outcomes(family: str, only: str = "") -> float:
        start = f"kvkeep_{family}_chunks_total{{"
        found = {name: value for name, value in metrics.items() if name.startswith(start)}
        return sum(value for name, value in found.items() if only in name)

    def moved(operation: str) -> float:
        return metrics.get(f'kvkeep_l2_bytes_total{{{BACKEND},operation="{operation}"}}', 0)

    ok = 'outcome="ok"'
    stored, evicted = ledger.total(Count.COMMITTED_BYTES), counter("evicted_bytes")
    yield Line("bytes of L1", l1["resident_bytes"] + evicted, stored + counter("fetched_bytes"))
    yield Line("fetches that returned", outcomes("fetched"), counter("fetches"))
    yield Line("bytes got from L2", moved("get"), outcomes("fetched", ok) * chunk_bytes)
    yield Line("persists that returned", outcomes("persisted"), counter("persists"))
    persisted = outcomes("persisted", ok) * chunk_bytes
    yield Line("bytes persisted", counter("persisted_bytes"), persisted)
    ended = outcomes("commit") + counter("aborted")
    yield Line("staged chunks that ended", ended, outcomes("stage", 'outcome="granted"'))
    right_bytes = ledger.total(Count.RIGHT_CHUNKS) * chunk_bytes
    yield Line("bytes read and verified", ledger.total(Count.READ_BYTES), right_bytes)
    loaded = ledger.total(Count.HIT_CHUNKS)
    yield Line("chunks read of those hit", ledger.total(Count.RIGHT_CHUNKS), loaded)
    yield Line("lookups answered", ledger.total(Count.ANSWERED), ledger.total(Count.LOOKUPS))
