"""Prometheus metrics of the server, read from the service when scraped; counts nothing itself."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvkeep.types import Reason


class Source(Protocol):
    """What the metrics read: the server's status and counters."""

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
        for name, text in _PLAIN.items():
            yield CounterMetricFamily(f"kvkeep_{name}", text, value=counts.get(name, 0))


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
    "cleared": "Chunks cleared by an operator",
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
    yield GaugeMetricFamily("kvkeep_sessions", "Sessions", value=len(status["sessions"]))
    waits = GaugeMetricFamily(
        "kvkeep_client_max_wait_seconds", "Longest wait of an engine step", labels=["session"]
    )
    for session in status["sessions"]:
        waits.add_metric([session["session"]], session["max_wait_ms"] / 1e3)
    yield waits


def _labelled(counts: Mapping[str, int], prefix: str, name: str, text: str, label: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key in sorted(counts):
        if key.startswith(prefix):
            family.add_metric([key.removeprefix(prefix)], counts[key])
    return family


def exposition(source: Source) -> bytes:
    """The text that `/metrics` answers."""
    registry = CollectorRegistry()
    registry.register(_ServerCollector(source))
    return generate_latest(registry)
