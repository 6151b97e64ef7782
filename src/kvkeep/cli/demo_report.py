"""What the demo saw: one row per answer, what must hold for it, the table and demo.json."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvkeep.bench.engine_messages import Answer

MIN_SHARE = 0.95  # of the tokens that whole chunks cover
MIN_SPEEDUP = 10.0  # time to first token: cold over L1
MIN_SPEEDUP_L2 = 5.0  # and over L2
NONE, DEVICE, L1, L2 = "none", "device", "l1", "l2"
_ANSWER_CHARACTERS = 60
PIPE_COLUMNS = 150


@dataclass(frozen=True, slots=True)
class Run:
    """One answer, where its tokens came from, and where they should have come from."""

    name: str
    question: int  # from 1
    expected: str  # tier
    answer: Answer
    l1_tokens: int
    l2_tokens: int
    whole_chunk_tokens: int  # of its prompt, those that can come from kvkeep
    partial: bool = False  # more than those would be wrong

    @property
    def by_tier(self) -> dict[str, int]:
        """Cached tokens; what is not kvkeep's is vLLM's own prefix cache's."""
        own = self.answer.cached_tokens - self.l1_tokens - self.l2_tokens
        return {L2: self.l2_tokens, L1: self.l1_tokens, DEVICE: own}

    @property
    def tier(self) -> str:
        """The tier most cached tokens came from."""
        if not self.answer.cached_tokens:
            return NONE
        tokens = self.by_tier
        return max(tokens, key=lambda tier: tokens[tier])

    def problem(self) -> str | None:
        """What is not as it must be, in one sentence."""
        whole = self.whole_chunk_tokens
        if self.expected in (L1, L2) and self.by_tier[self.expected] < MIN_SHARE * whole:
            more = "; if L1 is too small for them, give it more (--l1-size)"
            return (
                f'"{self.name}": {self.by_tier[self.expected]} of {whole} tokens came from '
                f"{self.expected.upper()}, at least {MIN_SHARE:.0%} must"
                f"{more if self.expected == L1 else ''}"
            )
        if self.partial and self.answer.cached_tokens > whole:
            return (
                f'"{self.name}": {self.answer.cached_tokens} tokens were cached, {whole} can be '
                "right at most"
            )
        if self.expected == DEVICE and not self.by_tier[DEVICE]:
            return f'"{self.name}": vLLM found nothing in its own prefix cache'
        if self.expected == NONE and self.answer.cached_tokens:
            return f'"{self.name}": {self.answer.cached_tokens} tokens were cached, none should be'
        return None


@dataclass(slots=True)
class Report:
    """All runs in order. The reference of a question is its first run that computed everything."""

    versions: dict[str, str] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)
    l1_size: str = ""
    runs: list[Run] = field(default_factory=list)

    def reference(self, question: int) -> Run | None:
        """The run to compare a question's answers with."""
        return next(
            (r for r in self.runs if r.question == question and r.expected == NONE),
            None,
        )

    def is_same(self, run: Run) -> bool:
        """Whether a run gave the tokens of its question's reference."""
        reference = self.reference(run.question)
        return reference is not None and run.answer.token_ids == reference.answer.token_ids

    @property
    def same_tokens(self) -> bool:
        """Whether every run did."""
        return bool(self.runs) and all(self.is_same(run) for run in self.runs)

    def cold_over(self, tier: str) -> float | None:
        """Time to first token of question 1: computed, over taken from a tier by a new engine."""
        cold = self.reference(1)
        hit = next((r for r in self.runs if r.question == 1 and r.expected == tier), None)
        if cold is None or hit is None or not hit.answer.ttft_s:
            return None
        return cold.answer.ttft_s / hit.answer.ttft_s

    def problems(self) -> list[str]:
        """Everything that is not as it must be."""
        found = [problem for run in self.runs if (problem := run.problem())]
        found += [
            f'"{run.name}": the answer differs from the one computed without any cache'
            for run in self.runs
            if not self.is_same(run)
        ]
        return found

    def write(self, path: Path) -> None:
        """Write demo.json."""
        ratios = {tier: self.cold_over(tier) for tier in (L1, L2)}
        runs = [
            {
                "name": run.name,
                "question": run.question,
                "prompt_tokens": run.answer.prompt_tokens,
                "whole_chunk_tokens": run.whole_chunk_tokens,
                "cached_tokens": run.answer.cached_tokens,
                "cached_by_tier": run.by_tier,
                "tier": run.tier,
                "ttft_s": round(run.answer.ttft_s, 4),
                "same_tokens": self.is_same(run),
                "token_ids": run.answer.token_ids,
                "text": run.answer.text,
            }
            for run in self.runs
        ]
        body = {
            "runs": runs,
            "same_tokens": self.same_tokens,
            **{
                f"ttft_cold_over_{tier}": None if ratio is None else round(ratio, 1)
                for tier, ratio in ratios.items()
            },
            "document": self.document,
            "l1_size": self.l1_size,
            "versions": self.versions,
        }
        path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Print the table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("step")
        for header in ("prompt\ntokens", "from\ndevice", "from\nL1", "from\nL2", "TTFT"):
            table.add_column(header, justify="right")
        table.add_column("answer", max_width=_ANSWER_CHARACTERS)
        table.add_column("same tokens\nas cold")
        for run in self.runs:
            table.add_row(
                run.name,
                f"{run.answer.prompt_tokens:,}",
                *(f"{run.by_tier[tier]:,}" for tier in (DEVICE, L1, L2)),
                f"{run.answer.ttft_s:.2f} s",
                _short(run.answer.text),
                self._verdict(run),
            )
        width = None if sys.stdout.isatty() else PIPE_COLUMNS
        Console(width=width).print(table)

    def _verdict(self, run: Run) -> str:
        if run is self.reference(run.question):
            return "(is cold)"
        return "[green]yes[/]" if self.is_same(run) else "[red]NO[/]"


def _short(text: str) -> Text:
    flat = " ".join(text.split())
    if len(flat) > _ANSWER_CHARACTERS:
        flat = flat[: _ANSWER_CHARACTERS - 1] + "…"
    return Text(flat)  # a model's words are no markup
