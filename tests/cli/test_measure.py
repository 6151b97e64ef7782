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
SIMULATION: dict[str, Any] = {
    "seeds": 3,
    "failures": [],
    "events": 100,
    "coverage": {"READY/lookup": 4},
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
    assert "3 seeds, 100 events" in kvkeep("simulate").out


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
