"""A server is told to end: it persists what L2 lacks, says so, and does not wait for a dead L2."""

import json
import signal
import time
from pathlib import Path

import pytest
from tests.process.engine import CHAIN_CHUNKS, Engine, until
from tests.servers import run_kvkeep, running_server

SETTINGS = {"l1.session_staging_fraction": 1, "l2.policy": "write_back", "l2.breaker_failures": 1}
PLUGIN = Path(__file__).parent / "plugin"


def test_what_is_not_in_l2_yet_is_written_before_the_end(tmp_path: Path) -> None:
    url = f"fs://{tmp_path}/l2"
    with running_server(tmp_path, settings=SETTINGS, l2=url) as server:
        server.wait_for("l2_scanned")
        with Engine(server.socket, "a").wait_ready() as engine:
            assert engine.store(1) == CHAIN_CHUNKS
        assert not list((tmp_path / "l2").glob("*/*/*.kv")), "write_back keeps it in L1"
        assert server.stop() == 0
    assert len(list((tmp_path / "l2").glob("*/*/*.kv"))) == CHAIN_CHUNKS
    with running_server(tmp_path, settings=SETTINGS, l2=url) as server:
        server.wait_for("l2_scanned")
        with Engine(server.socket, "b").wait_ready() as engine:
            assert engine.load(1) == (CHAIN_CHUNKS, 0)


@pytest.mark.slow
def test_while_it_drains_it_answers_operators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    url = f"stalling://{tmp_path}/l2?name=slow"
    settings = {**SETTINGS, "l2.put_timeout_s": 30, "l2.drain_s": 30}
    with running_server(tmp_path, settings=settings, l2=url) as server:
        server.wait_for("l2_scanned")
        with Engine(server.socket, "a").wait_ready() as engine:
            assert engine.store(1) == CHAIN_CHUNKS
            (tmp_path / "stall_puts").touch()
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("draining")
            until(lambda: not engine.client.up)
        status = run_kvkeep("status", "--socket", server.socket, "--json")
        assert status.returncode == 0, status.stderr
        assert any("stopping" in said for said in json.loads(status.stdout)["problems"])
        code, body = server.get("/readyz")
        assert (code, json.loads(body)["ready"]) == (503, False)
        (tmp_path / "stall_puts").unlink()
        assert server.process.wait(20) == 0
    assert len(list((tmp_path / "l2").glob("*/*/*.kv"))) == CHAIN_CHUNKS


@pytest.mark.slow
def test_a_dead_l2_is_not_waited_for(tmp_path: Path) -> None:
    place = tmp_path / "l2"
    with running_server(tmp_path, settings=SETTINGS, l2=f"fs://{place}") as server:
        server.wait_for("l2_scanned")
        with Engine(server.socket, "a").wait_ready() as engine:
            assert engine.store(1) == CHAIN_CHUNKS
        place.rename(tmp_path / "away")
        started = time.monotonic()
        assert server.stop() == 0
        server.wait_for("not_drained")
        assert time.monotonic() - started < 9.0, "l2.drain_s is 10"
