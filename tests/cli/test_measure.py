"""bench engine, simulate and demo pass their options on, and their result becomes the exit."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.cli.conftest import Command

ENGINE = {
    "prompt_tokens": 600,
    "ttft_s": {"cold": 2.0, "native_hit": 0.1, "l1_hit": 0.125, "l2_hit": {}},
    "all_miss": {"cpu_ratio": 1.01, "ttft_ratio": 1.0, "ttft_ratio_ci95": [0.98, 1.02], "pairs": 3},
    "same_tokens": True,
}
INDEX = {
    "chunks": 5_000,
    "bytes_per_entry": 432.6,
    "lookup_128_us": {"1000": 120.0, "5000": 150.2},
    "lookup_ratio": 1.25,
    "longest_call_ms": {"stage": 1.25, "commit": 1.0, "lookup": 0.5, "evict": 3.5, "end": 0.1},
}
SIMULATION: dict[str, Any] = {
    "seeds": 3,
    "failures": [],
    "events": 100,
    "coverage": {"READY/lookup": 4, "GONE/lookup": 0},
    "faults": {"l2 get short": 2, "l2 get long": 0},
    "impossible": {"GONE/lookup": "nobody is there"},
    "never": ["l2 get long"],
    "digest": "abc",
}


class Fake:
    """Stands for a function that another room has; remembers how it was called."""

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.given: dict[str, Any] = {}
        self.positional: tuple[Any, ...] = ()

    def __call__(self, *positional: object, **given: object) -> object:
        self.positional, self.given = positional, given
        return self.answer


def install(monkeypatch: pytest.MonkeyPatch, module: str, name: str, answer: object) -> Fake:
    fake, room = Fake(answer), ModuleType(module)
    setattr(room, name, fake)
    monkeypatch.setitem(sys.modules, module, room)
    return fake


def test_simulate(kvkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "kvkeep.testing.simulate", "run", SIMULATION)
    done = kvkeep("simulate", "--seeds", 3, "--first-seed", 7, "--steps", 50, "--json")
    assert (done.code, done.json) == (0, SIMULATION)
    assert fake.positional == (3, 7, 50)
    shown = kvkeep("simulate").out
    assert "3 seeds, 100 events" in shown
    assert "2 of 3 pairs of state and event and kinds of fault were met; not l2 get long" in shown


def test_simulate_with_a_failure(kvkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SIMULATION | {"failures": [{"seed": 9, "step": 12, "what": "bytes differ"}]}
    install(monkeypatch, "kvkeep.testing.simulate", "run", failed)
    done = kvkeep("simulate", "--json")
    assert (done.code, done.json) == (1, failed)
    shown = kvkeep("simulate")
    assert shown.code == 1
    assert ["9", "12", "bytes", "differ"] in [line.split() for line in shown.out.splitlines()]


@pytest.mark.parametrize("same", [True, False])
def test_bench_engine(kvkeep: Command, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    report = ENGINE | {"same_tokens": same}
    fake = install(monkeypatch, "kvkeep.bench.engine", "run_engine_bench", report)
    done = kvkeep("bench", "engine", "--prompt-tokens", 600, "--pairs", 3, "--json")
    assert (done.code, done.json) == (0 if same else 1, report)
    assert (fake.given["prompt_tokens"], fake.given["pairs"]) == (600, 3)
    shown = kvkeep("bench", "engine").out
    assert ["L1", "hit", "125.0", "16.0"] in [line.split() for line in shown.splitlines()]
    assert ("same tokens: yes" if same else "same tokens: NO") in shown


def test_bench_index(kvkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "kvkeep.bench.index", "run", INDEX)
    done = kvkeep("bench", "index", "--chunks", 5_000, "--json")
    assert (done.code, done.json) == (0, INDEX)
    assert fake.positional[0] == 5_000
    lines = [line.split() for line in kvkeep("bench", "index").out.splitlines()]
    assert ["5000", "chunks,", "433", "bytes", "each"] in lines
    assert ["5000", "150"] in lines
    assert ["evict", "3.50"] in lines


@pytest.mark.parametrize("code", [0, 1])
def test_demo(kvkeep: Command, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    fake = install(monkeypatch, "kvkeep.cli.demo", "run_demo", code)
    done = kvkeep("demo", "--json", "out.json", "--l1-size", "1GiB", "--document", "text.md")
    assert done.code == code
    assert fake.positional == (Path("out.json"),)
    assert fake.given == {"l1_size": "1GiB", "document": Path("text.md"), "model": None}


def test_a_real_simulation(kvkeep: Command) -> None:
    done = kvkeep("simulate", "--seeds", 1, "--steps", 5, "--json")
    assert done.code == 0
    assert set(done.json) >= {"seeds", "failures", "events", "coverage", "digest"}
    assert done.json["events"] > 0
    assert "1 of 1 seeds" in done.err
