"""`kvkeep bench engine`: what kvkeep gives a real vLLM when it hits, and costs when it misses.

Hits: every round computes a prompt never seen before (cold), then asks again twice, once with
vLLM's own prefix cache (native) and once with that cache emptied (L1), in turns. The prompt ends a
few tokens after a chunk, so that both hits leave the same tokens to compute.

Misses: two engines, with kvkeep and without, get the same new prompts, in turns. Their prompts are
shorter than the hits': computing costs more per token the longer a prompt is and storing does not,
so this is the harder case. Everything is fp32, so that every answer must equal the cold one.
"""

import json
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.bench.engine_messages import Answer, Start, Started
from kvkeep.bench.engine_process import EngineProcess, ServerProcess, require_engine
from kvkeep.bench.engine_scratch import ended_by_signals, scratch
from kvkeep.bench.session import BenchFailed
from kvkeep.bench.shapes import CHUNK_TOKENS

ANSWER_TOKENS = 4
REST_TOKENS = 8  # of a prompt after its last whole chunk
MISS_TOKENS = 1_024
RESAMPLES = 2_000
_FIRST_TOKEN_ID = 100  # below are special ones
# A whole prompt is staged in one step, and nothing here is about how L1 is shared.
_SETTINGS = {
    "l1.size": "2GiB",
    "l1.session_staging_fraction": 1,
    "l1.session_reserve_fraction": 1,
    "log.level": "warning",
}
_DTYPE = "float32"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Engines:
    """Two engines that differ in kvkeep only, and random prompts for them."""

    kept: EngineProcess
    plain: EngineProcess
    started: Started
    seed: int

    def prompt(self, name: str, tokens: int) -> list[int]:
        """Random token ids that no other name gives."""
        ids = range(_FIRST_TOKEN_ID, self.started.vocabulary)
        return random.Random(f"{self.seed} {name}").choices(ids, k=tokens)


@dataclass(frozen=True, slots=True)
class Hit:
    """One prompt, three ways."""

    cold: Answer
    native: Answer
    l1: Answer

    @property
    def same_tokens(self) -> bool:
        """Whether all three gave the same answer."""
        return self.cold.token_ids == self.native.token_ids == self.l1.token_ids


@dataclass(frozen=True, slots=True)
class Pair:
    """One new prompt in both engines."""

    kept: Answer
    plain: Answer

    @property
    def same_tokens(self) -> bool:
        """Whether both gave the same answer."""
        return self.kept.token_ids == self.plain.token_ids


def run_engine_bench(
    *,
    prompt_tokens: int = 3_000,
    pairs: int = 20,
    repeats: int = 5,
    json_path: Path | None = None,
    progress: Say = lambda _: None,
) -> dict[str, Any]:
    """Measure and return the report of `bench engine --json`. Raises KVKeepError.

    `prompt_tokens` is rounded up to whole chunks and a few tokens; the report has the real number.
    """
    model = require_engine()
    with ended_by_signals(), _engines(model, progress) as engines:
        tokens = -(-prompt_tokens // CHUNK_TOKENS) * CHUNK_TOKENS + REST_TOKENS
        # Misses first: both engines have then done the same work.
        misses = list(_misses(engines, min(tokens, MISS_TOKENS + REST_TOKENS), pairs, progress))
        hits = list(_hits(engines, tokens, repeats, progress))
        report = summary(hits, misses) | {"dtype": _DTYPE, "versions": engines.started.versions}
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def summary(hits: Sequence[Hit], misses: Sequence[Pair]) -> dict[str, Any]:
    """The report, from what was measured."""
    ttft_s = {
        name: round(statistics.median([getattr(hit, of).ttft_s for hit in hits]), 4)
        for name, of in (("cold", "cold"), ("native_hit", "native"), ("l1_hit", "l1"))
    }
    return {
        "prompt_tokens": hits[0].cold.prompt_tokens,
        "ttft_s": {**ttft_s, "l2_hit": {}},
        "l1_over_native": round(ttft_s["l1_hit"] / ttft_s["native_hit"], 3),
        "cold_over_l1": round(ttft_s["cold"] / ttft_s["l1_hit"], 1),
        "cached_tokens": {
            "native_hit": min(hit.native.cached_tokens for hit in hits),
            "l1_hit": min(hit.l1.cached_tokens for hit in hits),
        },
        "all_miss": _miss_summary(misses),
        "same_tokens": all(h.same_tokens for h in hits) and all(p.same_tokens for p in misses),
    }


def _miss_summary(misses: Sequence[Pair]) -> dict[str, Any]:
    ttft = [pair.kept.ttft_s / pair.plain.ttft_s for pair in misses]
    low, high = bootstrap_ci95(ttft)
    return {
        # Medians of ratios within a pair: a pair shares the machine's mood, and one bad pair
        # moves nothing.
        "cpu_ratio": round(statistics.median([p.kept.cpu_s / p.plain.cpu_s for p in misses]), 4),
        "ttft_ratio": round(statistics.median(ttft), 4),
        "ttft_ratio_ci95": [round(low, 4), round(high, 4)],
        "pairs": len(misses),
        "prompt_tokens": misses[0].kept.prompt_tokens,
        "cpu_s": {
            "with": round(statistics.median([p.kept.cpu_s for p in misses]), 4),
            "without": round(statistics.median([p.plain.cpu_s for p in misses]), 4),
        },
    }


def bootstrap_ci95(ratios: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """A 95 % interval of the median, by resampling; the same numbers give the same interval."""
    chance = random.Random(seed)
    medians = sorted(
        statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)
    )
    edge = RESAMPLES * 25 // 1_000
    return medians[edge], medians[-edge - 1]


@contextmanager
def _engines(model: Path, say: Say) -> Iterator[Engines]:
    with scratch("kvkeep-bench-") as folder:
        path = folder / "kvkeep.sock"
        say("starting a server and two engines (20 to 60 s)")
        kept, plain = Start(model=str(model), socket=str(path)), Start(model=str(model))
        with (
            ServerProcess(path, folder / "server.log", _SETTINGS),
            EngineProcess("kept", kept, folder / "kept.log") as with_kvkeep,
            EngineProcess("plain", plain, folder / "plain.log") as without,
        ):
            started = with_kvkeep.started()
            without.started()
            with_kvkeep.settle()
            yield Engines(with_kvkeep, without, started, seed=1)


# ---- hits


def _hits(engines: Engines, tokens: int, repeats: int, say: Say) -> Iterator[Hit]:
    engine = engines.kept
    _hit(
        engines, engines.prompt("warm", CHUNK_TOKENS + REST_TOKENS), native_first=True
    )  # uncounted
    for number in range(repeats):
        say(f"hits: round {number + 1} of {repeats}, {tokens} tokens")
        hit = _hit(engines, engines.prompt(f"hit {number}", tokens), native_first=number % 2 == 0)
        whole = (tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        if hit.l1.cached_tokens < whole or hit.cold.cached_tokens:
            raise BenchFailed(
                f"{engine.name} took {hit.l1.cached_tokens} of {whole} tokens from L1, and "
                f"{hit.cold.cached_tokens} of a new prompt"
            )
        yield hit


def _hit(engines: Engines, prompt: list[int], *, native_first: bool) -> Hit:
    cold = _ask(engines.kept, prompt)
    if native_first:
        native = _ask(engines.kept, prompt)
        engines.kept.reset()
        return Hit(cold, native, _ask(engines.kept, prompt))
    engines.kept.reset()
    l1 = _ask(engines.kept, prompt)
    return Hit(cold, _ask(engines.kept, prompt), l1)


# ---- misses


def _misses(engines: Engines, tokens: int, pairs: int, say: Say) -> Iterator[Pair]:
    for number in range(-1, pairs):
        say(f"misses: pair {number + 1} of {pairs}, {tokens} tokens")
        prompt = engines.prompt(f"miss {number}", tokens)
        if number % 2:
            plain = _ask(engines.plain, prompt)
            pair = Pair(_ask(engines.kept, prompt), plain)
        else:
            pair = Pair(_ask(engines.kept, prompt), _ask(engines.plain, prompt))
        if pair.kept.cached_tokens or pair.plain.cached_tokens:
            raise BenchFailed("a prompt that was never seen before was found in a cache")
        if number >= 0:  # the one before warms both engines up
            yield pair


def _ask(engine: EngineProcess, prompt: list[int]) -> Answer:
    return engine.ask(prompt, ANSWER_TOKENS, ignore_eos=True)
