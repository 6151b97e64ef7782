"""What the connector counts, for vLLM's log line and its /metrics.

Everything is known on the scheduler side: workers report their loads there. vLLM takes the counts
of an interval, sends them as plain data to its front end, and adds them up there
(vllm/distributed/kv_transfer/kv_connector/v1/metrics.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

DEVICE, L1 = "device", "l1"  # tiers that are always there; the others are names of L2 backends
INLINE, BESIDE = "inline", "beside"
LOAD_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_COUNTS = ("lookups", "failed_loads", "stored_chunks")
_COUNTERS = {  # Prometheus counters: what they count, then their own labels
    "lookups": ("Lookups that the kvkeep server answered.",),
    "failed_loads": ("Loads of which some chunk failed.",),
    "stored_chunks": ("Chunks published in L1.",),
    "loaded_tokens": ("Tokens loaded from kvkeep.",),
    "hit_tokens": ("Prompt tokens that were not computed, by where they were.", "tier"),
    "loads": ("Loads, within an engine step (inline) or beside the engine.", "where"),
}


@dataclass
class KVKeepStats(KVConnectorStats):
    """The counts of one interval. `data` is plain, because it crosses processes."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Start an interval."""
        self.data: dict[str, Any] = {
            **dict.fromkeys(_COUNTS, 0),
            "hit_tokens": {},  # tier -> tokens that were not computed
            "loads": {INLINE: 0, BESIDE: 0},
            "load_s": [],
            "server_up": None,  # the last that was seen; None: unchanged
        }

    def count(self, name: str, by: int = 1) -> None:
        """Add to one of the plain counts."""
        self.data[name] += by

    def hit(self, tier: str, tokens: int) -> None:
        """Tokens that came from a tier."""
        if tokens:
            self.data["hit_tokens"][tier] = self.data["hit_tokens"].get(tier, 0) + tokens

    def load(self, seconds: float, *, beside: bool, failed: bool) -> None:
        """One load that ended."""
        self.data["loads"][BESIDE if beside else INLINE] += 1
        self.data["load_s"].append(seconds)
        self.data["failed_loads"] += failed

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add a later interval."""
        mine, theirs = self.data, other.data
        for name in _COUNTS:
            mine[name] += theirs[name]
        for name in ("hit_tokens", "loads"):
            for key, value in theirs[name].items():
                mine[name][key] = mine[name].get(key, 0) + value
        mine["load_s"] = mine["load_s"] + theirs["load_s"]
        if theirs["server_up"] is not None:
            mine["server_up"] = theirs["server_up"]
        return self

    def loaded_tokens(self) -> int:
        """Tokens that kvkeep loaded, from any tier of its own."""
        hits: dict[str, int] = self.data["hit_tokens"]
        return sum(tokens for tier, tokens in hits.items() if tier != DEVICE)

    def reduce(self) -> dict[str, int | float]:
        """What vLLM prints in its log line."""
        data, times = self.data, self.data["load_s"]
        line: dict[str, int | float] = {
            "kvkeep lookups": data["lookups"],
            "Loads inline": data["loads"][INLINE],
            "Loads beside": data["loads"][BESIDE],
            "Failed loads": data["failed_loads"],
            "Loaded tokens": self.loaded_tokens(),
            "Avg load ms": round(1e3 * sum(times) / len(times), 2) if times else 0,
            "Stored chunks": data["stored_chunks"],
        }
        line |= {f"Hit tokens {tier}": n for tier, n in sorted(data["hit_tokens"].items())}
        if data["server_up"] is not None:
            line["Server up"] = data["server_up"]
        return line

    def is_empty(self) -> bool:
        """Nothing happened, and the server is as it was."""
        data = self.data
        return not (
            any(data[name] for name in _COUNTS)
            or data["hit_tokens"]
            or data["load_s"]
            or data["server_up"] is not None
        )


class KVKeepPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus series, per engine: `vllm:kvkeep_...`."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter: Any = metric_types[Counter]
        histogram: Any = metric_types[Histogram]
        gauge: Any = metric_types[Gauge]

        self._counters: dict[str, Any] = {
            name: counter(
                name=f"vllm:kvkeep_{name}", documentation=words, labelnames=[*labelnames, *more]
            )
            for name, (words, *more) in _COUNTERS.items()
        }
        self._load_s = histogram(
            name="vllm:kvkeep_load_seconds",
            documentation="Seconds of one load, until its bytes were compared.",
            buckets=LOAD_BUCKETS_S,
            labelnames=labelnames,
        )
        self._server_up = gauge(
            name="vllm:kvkeep_server_up",
            documentation="1: the kvkeep server answers; 0: this engine serves without it.",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        for values in per_engine_labelvalues.values():  # there from the start, at zero
            for name in (*_COUNTS, "loaded_tokens"):
                self._counters[name].labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval of one engine."""
        stats = KVKeepStats(data=transfer_stats_data)
        data, values = stats.data, self.per_engine_labelvalues[engine_idx]
        counters = self._counters
        for name in _COUNTS:
            counters[name].labels(*values).inc(data[name])
        counters["loaded_tokens"].labels(*values).inc(stats.loaded_tokens())
        for name in ("hit_tokens", "loads"):
            for label, number in data[name].items():
                counters[name].labels(*values, label).inc(number)
        for seconds in data["load_s"]:
            self._load_s.labels(*values).observe(seconds)
        if data["server_up"] is not None:
            self._server_up.labels(*values).set(data["server_up"])
