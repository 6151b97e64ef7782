"""chaos and soak pass their options on, and what they found becomes the exit."""

from types import ModuleType
from typing import Any

import pytest
from tests.cli.conftest import Command
from tests.cli.test_measure import Fake

from kvkeep.testing import chaos, soak

CHAOS: dict[str, Any] = {
    "minutes": 2.0, "kills": 200, "stops": 20, "wrong_bytes": 0, "leaked_bytes": 0,
    "failed_requests": 0, "max_healthz_s": 0.25, "server_lives": 9, "operations": 1000,
    "verified_chunks": 900, "verified_from_l2": 90, "what": [],
}  # fmt: skip
SOAK: dict[str, Any] = {
    "minutes": 20.0, "rss_slope_bytes_per_hour": -1_500_000, "rss_bytes": 50_000_000,
    "fd_growth": 0, "ledger_mismatches": 0, "rss_slope_error": 250_000, "rss_judged": True,
    "ledger_lines": 52, "operations": 1000, "stored_bytes": 1 << 30, "verified_bytes": 1 << 31,
    "clean": True, "what": [],
}  # fmt: skip


def stand_in(monkeypatch: pytest.MonkeyPatch, room: ModuleType, answer: object) -> Fake:
    fake = Fake(answer)
    monkeypatch.setattr(room, "run", fake)
    return fake


def test_chaos(kvkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = stand_in(monkeypatch, chaos, CHAOS)
    done = kvkeep("chaos", "--minutes", 2, "--seed", 7, "--json")
    assert (done.code, done.json) == (0, CHAOS)
    assert fake.positional[0] == chaos.Plan(2.0, 7)
    shown = kvkeep("chaos")
    assert shown.code == 0
    assert "200 kills and 20 stops" in shown.out
    assert "slowest /healthz 0.250 s" in shown.out


@pytest.mark.parametrize("bad", ["wrong_bytes", "leaked_bytes", "failed_requests"])
def test_chaos_that_found_something(
    kvkeep: Command, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    stand_in(monkeypatch, chaos, CHAOS | {bad: 3, "what": ["it is so"]})
    shown = kvkeep("chaos")
    assert shown.code == 1
    assert f"{bad.replace('_', ' ')} 3" in shown.out
    assert "it is so" in shown.out


def test_soak(kvkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = stand_in(monkeypatch, soak, SOAK)
    done = kvkeep("soak", "--seed", 3, "--json")
    assert (done.code, done.json) == (0, SOAK)
    assert fake.positional[:2] == (20.0, 3)
    shown = kvkeep("soak")
    assert shown.code == 0
    assert "memory 50.0 MB, -1.50 MB per hour, error 0.25 MB" in shown.out


def test_soak_that_found_something(kvkeep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"clean": False, "ledger_mismatches": 1, "rss_slope_error": None, "rss_judged": False}
    stand_in(monkeypatch, soak, SOAK | found | {"what": ["lookups: 3, 4"]})
    shown = kvkeep("soak")
    assert shown.code == 1
    assert "1 of 52 lines" in shown.out
    assert "lookups: 3, 4" in shown.out
