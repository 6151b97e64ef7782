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

MIN_L1_SHARE = 0.95  # of the tokens that whole chunks cover
MIN_SPEEDUP = 10.0  # time to first token: cold over L1
NONE, DEVICE, L1 = "none", "device", "l1"
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
    whole_chunk_tokens: int  # of its prompt, those that can come from L1

    @property
    def device_tokens(self) -> int:
        """From vLLM's own prefix cache."""
        return self.answer.cached_tokens - self.l1_tokens

    @property
    def tier(self) -> str:
        """The tier most cached tokens came from."""
        if not self.answer.cached_tokens:
            return NONE
        return L1 if self.l1_tokens >= self.device_tokens else DEVICE

    def problem(self) -> str | None:
        """What is not as it must be, in one sentence."""
        whole = self.whole_chunk_tokens
        if self.expected == L1 and self.l1_tokens < MIN_L1_SHARE * whole:
            return (
                f'"{self.name}": {self.l1_tokens} of {whole} tokens came from L1, at least '
                f"{MIN_L1_SHARE:.0%} must; if L1 is too small for them, give it more (--l1-size)"
            )
        if self.expected == DEVICE and not self.device_tokens:
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

    @property
    def cold_over_l1(self) -> float | None:
        """Time to first token of question 1: computed, over taken from L1 by a new engine."""
        cold = self.reference(1)
        hit = next((r for r in self.runs if r.question == 1 and r.expected == L1), None)
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
        ratio = self.cold_over_l1
        runs = [
            {
                "name": run.name,
                "question": run.question,
                "prompt_tokens": run.answer.prompt_tokens,
                "whole_chunk_tokens": run.whole_chunk_tokens,
                "cached_tokens": run.answer.cached_tokens,
                "cached_by_tier": {DEVICE: run.device_tokens, L1: run.l1_tokens},
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
            "ttft_cold_over_l1": None if ratio is None else round(ratio, 1),
            "document": self.document,
            "l1_size": self.l1_size,
            "versions": self.versions,
        }
        path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Print the table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("step")
        for header in ("prompt\ntokens", "from\ndevice", "from\nL1", "TTFT"):
            table.add_column(header, justify="right")
        table.add_column("answer", max_width=_ANSWER_CHARACTERS)
        table.add_column("same tokens\nas cold")
        for run in self.runs:
            table.add_row(
                run.name,
                f"{run.answer.prompt_tokens:,}",
                f"{run.device_tokens:,}",
                f"{run.l1_tokens:,}",
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
