"""Prometheus metrics of the server, read from the service when scraped; counts nothing itself."""

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvkeep.types import Reason


class Entries(Protocol):
    """How long callbacks of one kind took."""

    buckets: list[int]  # one more than there are bounds
    sum_s: float


class Watched(Protocol):
    """What the loop's watchdog has seen."""

    longest_lag_s: float

    @property
    def bounds_s(self) -> Sequence[float]:
        """Of the buckets."""

    @property
    def seen(self) -> Mapping[str, Entries]:
        """By kind of entry."""

    def entry(self, what: str) -> AbstractContextManager[None]:
        """A scrape is an entry, too."""


class Source(Protocol):
    """What the metrics read: the server's status, counters and watchdog."""

    @property
    def watchdog(self) -> Watched:
        """Of its event loop."""

    def status(self) -> dict[str, Any]:
        """The answer of `kvkeep status --json`."""

    def counts(self) -> Mapping[str, int]:
        """Every counter by name."""


class _ServerCollector(Collector):
    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        status, counts = self._source.status(), self._source.counts()
        yield from _gauges(status)
        yield from _loop(self._source.watchdog)
        yield _labelled(
            counts, "stage_", "kvkeep_stage_chunks", "Chunks asked to be staged", "outcome"
        )
        yield _labelled(counts, "commit_", "kvkeep_commit_chunks", "Chunks committed", "outcome")
        yield _labelled(counts, "ended_", "kvkeep_read_parts", "Read lease parts ended", "outcome")
        misses = CounterMetricFamily(
            "kvkeep_lookup_missed_chunks", "Looked-up chunks beyond the hit", labels=["reason"]
        )
        for reason in Reason:
            misses.add_metric([reason.name.lower()], counts.get(f"miss_{int(reason)}", 0))
        yield misses
        yield _labelled(
            counts, "fetched_", "kvkeep_fetched_chunks", "Fetches that returned", "outcome", _BYTES
        )
        yield _labelled(
            counts,
            "persisted_",
            "kvkeep_persisted_chunks",
            "Persists that returned",
            "outcome",
            _BYTES,
        )
        yield _labelled(
            counts, "hit_from_", "kvkeep_l2_hit_chunks", "Hit chunks that L2 brought", "backend"
        )
        refused = CounterMetricFamily(
            "kvkeep_quota_refused",
            "Chunks (L1) and objects (L2) that a tenant's limit left no room for, by salt digest",
            labels=["tier", "backend", "tenant"],
        )
        for row in status["quota_refused"]:
            refused.add_metric([row["tier"], row["backend"], row["tenant"]], row["refused"])
        yield refused
        yield from _stores(status["l2"])
        for name, text in _PLAIN.items():
            yield CounterMetricFamily(f"kvkeep_{name}", text, value=counts.get(name, 0))


_BYTES = ("fetched_bytes", "persisted_bytes")  # counters of their own
_PLAIN = {
    "lookups": "Lookups answered",
    "hit_chunks": "Looked-up chunks that were reserved",
    "loaded_tokens": "Tokens that engines loaded from kvkeep",
    "device_tokens": "Tokens that engines took from their own prefix cache in looked-up requests",
    "evicted_chunks": "Chunks evicted from L1",
    "evicted_bytes": "Bytes evicted from L1",
    "dropped": "Chunks dropped because they failed to load",
    "aborted": "Staged chunks given back",
    "revoked": "Read leases revoked",
    "revoked_for_room": "Of these, for an older lookup, or of a stopped engine",
    "cleared": "Chunks cleared by an operator",
    "fetches": "Fetches begun",
    "fetched_bytes": "Bytes fetched from L2 and published",
    "fetch_late": "Fetches past their deadline",
    "lookups_expired": "Lookups answered at their deadline for L2",
    "lookups_over_bound": "Lookups answered from L1 alone: too many of the session wait for L2",
    "connections_paused": "Times a connection that sent much at once had to wait for its turn",
    "waits_refused": "Operators' waits refused: too many wait already",
    "forget_refused": "Forgets refused: too many of the layout wait already",
    "discards_lost": "Deletions in L2 that were not done: too many waited",
    "timeline_forgotten": "Requests forgotten for newer ones in the timeline",
    "cancelled": "Pending lookups cancelled",
    "persists": "Persists begun",
    "persisted_bytes": "Bytes persisted to L2",
    "persist_overflow": "Chunks that the full persist queue dropped",
    "persist_lost": "Chunks that left L1 before L2 had them",
    "persist_failed": "Chunks given up after too many tries",
    "persist_forgotten": "Queued persists of forgotten layouts",
    "cancel_again": "Pending lookups cancelled twice (no-ops)",
    "forgotten": "Chunks of forgotten layouts",
    "end_again": "Read parts ended twice (no-ops)",
    "abort_again": "Staged chunks given back twice (no-ops)",
}


def _gauges(status: dict[str, Any]) -> Iterator[Metric]:
    l1 = status["l1"]
    by_state = GaugeMetricFamily("kvkeep_l1_bytes", "Bytes of the arena by state", labels=["state"])
    for key in ("free", "staging", "resident", "orphaned", "quarantined"):
        by_state.add_metric([key], l1[f"{key}_bytes"])
    yield by_state
    for key in ("capacity", "populated", "reserved"):
        yield GaugeMetricFamily(
            f"kvkeep_l1_{key}_bytes", f"Bytes of the arena: {key}", value=l1[f"{key}_bytes"]
        )
    yield GaugeMetricFamily("kvkeep_l1_objects", "Resident objects", value=l1["objects"])
    yield GaugeMetricFamily("kvkeep_leases", "Open leases", value=status["leases"])
    yield GaugeMetricFamily("kvkeep_sessions", "Sessions", value=status["session_count"])
    waits = GaugeMetricFamily(
        "kvkeep_client_max_wait_seconds", "Longest wait of an engine step", labels=["session"]
    )
    for session in status["sessions"]:
        waits.add_metric([session["session"]], session["max_wait_ms"] / 1e3)
    yield waits


def _loop(watchdog: Watched) -> Iterator[Metric]:
    """How long the event loop was held."""
    busy = HistogramMetricFamily(
        "kvkeep_loop_busy_seconds", "Time of one callback of the event loop", labels=["what"]
    )
    bounds = [str(bound) for bound in watchdog.bounds_s] + ["+Inf"]
    for what, seen in sorted(watchdog.seen.items()):
        sums = accumulate(seen.buckets)
        busy.add_metric([what], list(zip(bounds, sums, strict=True)), seen.sum_s)
    yield busy
    yield GaugeMetricFamily(
        "kvkeep_loop_longest_lag_seconds",
        "Longest delay of a timer of the event loop",
        value=watchdog.longest_lag_s,
    )


def _stores(stores: Sequence[dict[str, Any]]) -> Iterator[Metric]:
    """One sample per L2 backend and operation."""
    label = ["backend"]
    gauges = {
        "objects": GaugeMetricFamily("kvkeep_l2_objects", "Objects in L2", labels=label),
        "used_bytes": GaugeMetricFamily("kvkeep_l2_used_bytes", "Bytes in L2", labels=label),
        "capacity_bytes": GaugeMetricFamily(
            "kvkeep_l2_capacity_bytes", "Bytes L2 may take", labels=label
        ),
        "stuck": GaugeMetricFamily(
            "kvkeep_l2_stuck_calls",
            "Calls past their deadline that have not returned",
            labels=label,
        ),
        "scanned": GaugeMetricFamily(
            "kvkeep_l2_scanned_ratio", "Share of the index that is rebuilt", labels=label
        ),
    }
    read_only = GaugeMetricFamily("kvkeep_l2_read_only", "1 while it refuses puts", labels=label)
    up = GaugeMetricFamily("kvkeep_l2_up", "1 while the breaker is closed", labels=label)
    unreadable = CounterMetricFamily(
        "kvkeep_l2_unreadable_objects",
        "Sound objects that keys or their lack make unreadable",
        labels=["backend", "why"],
    )
    corrupt = CounterMetricFamily(
        "kvkeep_l2_corrupt_objects", "Objects that did not verify", labels=["backend", "why"]
    )
    moved = CounterMetricFamily("kvkeep_l2_bytes", "Bytes moved", labels=["backend", "operation"])
    operations = CounterMetricFamily(
        "kvkeep_l2_operations", "Objects by outcome", labels=["backend", "operation", "outcome"]
    )
    seconds = HistogramMetricFamily(
        "kvkeep_l2_seconds", "Time of a call", labels=["backend", "operation"]
    )
    for store in stores:
        name = store["name"]
        up.add_metric([name], float(store["state"] == "closed"))
        read_only.add_metric([name], float(store["read_only"]))
        for key, gauge in gauges.items():
            if store[key] is not None:
                gauge.add_metric([name], store[key])
        for why, count in store["corrupt"].items():
            corrupt.add_metric([name, why], count)
        for why, count in store["unreadable"].items():
            unreadable.add_metric([name, why], count)
        for operation, seen in store["operations"].items():
            moved.add_metric([name, operation], seen["bytes"])
            for outcome, count in seen["outcomes"].items():
                operations.add_metric([name, operation, outcome], count)
            buckets = list(seen["seconds"]["buckets"].items())
            seconds.add_metric([name, operation], buckets, seen["seconds"]["sum_s"])
    yield from (*gauges.values(), up, read_only, corrupt, unreadable, moved, operations, seconds)


def _labelled(
    counts: Mapping[str, int],
    prefix: str,
    name: str,
    text: str,
    label: str,
    leave_out: Container[str] = (),
) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key in sorted(counts):
        if key.startswith(prefix) and key not in leave_out:
            family.add_metric([key.removeprefix(prefix)], counts[key])
    return family


def exposition(source: Source) -> bytes:
    """The text that `/metrics` answers."""
    with source.watchdog.entry("metrics"):
        registry = CollectorRegistry()
        registry.register(_ServerCollector(source))
        return generate_latest(registry)
