"""`kvkeep chaos` on the code as it is: nothing wrong, nothing left, nothing failed.

A minute in `make test`, five in `make prove`.
"""

import json
from typing import Any

import pytest
from tests.servers import run_kvkeep

REPORTED = {
    "minutes", "kills", "stops", "wrong_bytes", "leaked_bytes", "failed_requests", "max_healthz_s",
}  # fmt: skip
ANSWERS_S = 2.0  # /healthz, without time in which the machine ran others


def chaos(minutes: float, seed: int) -> dict[str, Any]:
    done = run_kvkeep(
        *("chaos", "--minutes", minutes, "--seed", seed, "--json"), timeout_s=60 * minutes + 240
    )
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["what"] == []  # the first thing to read when something is wrong
    bad = ("wrong_bytes", "leaked_bytes", "failed_requests")
    assert [report[name] for name in bad] == [0, 0, 0], report
    assert done.returncode == 0, report
    return report


def assert_loaded(report: dict[str, Any], kills: int) -> None:
    """It was a run that could have found something."""
    assert report.keys() >= REPORTED
    assert report["what"] == []
    assert report["kills"] >= kills, report
    assert report["stops"] > 0
    assert set(report["strikes"]) == {
        *("client_sigkill", "client_sigterm", "client_sigstop"),
        *("server_sigkill", "server_sigterm", "server_sigstop"),
    }, report
    assert report["verified_chunks"] > 10 * kills, report
    assert report["verified_from_l2"] > 0
    assert report["forks"] > 0
    assert report["healthz_answers"] > 0
    assert report["max_healthz_run_s"] < ANSWERS_S


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_minute_of_chaos() -> None:
    assert_loaded(chaos(1, seed=1), kills=60)


@pytest.mark.prove
@pytest.mark.timeout(900)
def test_five_minutes_and_five_hundred_kills() -> None:
    assert_loaded(chaos(5, seed=2), kills=500)
