"""The loading side under the real vLLM: loads beside the engine, wishes, resets, autostart."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.engine.parent import answer, scenario, start
from tests.engine.scenarios_wishes import running, server_pid

from kvkeep.connectors.vllm.autostart import answers

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_long_load_beside_the_engine(socket: str, mode: str) -> None:
    got = scenario("beside", socket, mode=mode)
    for case in ("ends_well", "aborted", "memory_ends"):
        row = got[case]
        assert all(row["same"].values()), row
        assert row["leases"] == row["reserved_bytes"] == row["blocks_lost"] == row["loading"] == 0
    well, aborted, full = got["ends_well"], got["aborted"], got["memory_ends"]
    assert well["decoded_meanwhile"] >= 4
    assert not well["answered_meanwhile"]
    assert well["cached"] == 640
    assert well["chunks"] == 10
    assert not aborted["given_early"]
    assert aborted["chunks"] == 2  # the one that ran and the one in progress
    assert aborted["late"] == 8
    assert full["preempted_meanwhile"]
    assert full["chunks"] == 10
    assert got["errors"] == 0


def test_the_server_dies_while_a_load_runs(tmp_path: Path) -> None:
    got = scenario("killed_while_loading", tmp_path / "k.sock")
    assert all(got["same"].values())
    assert got["cached"] == 640  # the bytes outlive the server that made them
    assert got["still_mapped"] == 1
    assert got["reset"] is False  # nobody confirmed it
    assert got["errors"] == 0


def test_wishes_counts_and_reset(socket: str) -> None:
    got = scenario("wishes", socket)
    rows = got["rows"]
    nothing, all_l1 = {"device": 0, "l1": 0, "l2": {}}, {"device": 0, "l1": 384, "l2": {}}
    assert rows["no_store"]["hits"] == rows["after_no_store"]["hits"] == nothing
    assert rows["no_lookup"]["hits"] == nothing
    assert rows["plain"]["hits"] == all_l1
    assert rows["own_hit"]["hits"] == {"device": 384, "l1": 0, "l2": {}}
    assert rows["bad_key"]["hits"] == rows["after_bad_key"]["hits"] == nothing
    assert rows["short"]["hits"] is None  # nothing to look up, nothing was asked
    assert [rows[name]["cached"] for name in ("after_no_store", "no_lookup", "plain")] == [
        0,
        0,
        384,
    ]
    assert rows["after_bad_key"]["cached"] == 0
    assert rows["plain"]["tokens"] == rows["no_store"]["tokens"]
    assert "no_stroe" in got["note"]
    assert "no_store" in got["note"]  # what was meant
    counted = got["counted"]
    assert counted["lookups"] >= 4
    assert counted["hit_tokens"] == 384 + 384
    assert counted["loaded_tokens"] == 384
    assert counted["loads"] == 1
    assert counted["stored_chunks"] == 6 + 6
    assert counted["server_up"] == 1
    assert "Loads beside=1" in got["log"]
    assert "Loaded tokens=384" in got["log"]
    assert got["reset"] is True
    assert got["after_reset"]["cached"] == 0
    assert got["stored_again"]["cached"] == 384
    assert got["errors"] == 0


def test_a_hit_from_l2_overlaps_other_work(tmp_path: Path) -> None:
    got = scenario("from_l2", tmp_path / "k.sock", folder=str(tmp_path / "l2"))
    assert all(got["same"])
    assert got["same_other"]
    assert got["not_asked"] == {"device": 0, "l1": 0, "l2": {}}
    assert got["pending"]
    assert got["told"] == {"device": 0, "l1": 0, "l2": {"disk": 384}}
    assert got["again"] == {"device": 0, "l1": 384, "l2": {}}
    assert got["errors"] == 0


def test_two_engines_start_one_server_that_outlives_them(tmp_path: Path) -> None:
    path = tmp_path / "k.sock"
    children = [start("autostarted", path) for _ in range(2)]
    try:
        first, second = (answer(child) for child in children)
        assert answers(str(path))  # there, though both engines are gone
        assert server_pid(str(path)) == first["server"] == second["server"]
    finally:
        if answers(str(path)):
            os.kill(server_pid(str(path)), signal.SIGTERM)
        for child in children:
            child.kill()
    assert first["parent"] == second["parent"]
    assert first["parent"] not in [child.pid for child in children]
    assert first["own_session"]
    assert second["own_session"]
    assert first["cached"] == second["cached"] == 256
    assert first["errors"] == second["errors"] == 0
    wait_gone(first["server"])


def wait_gone(pid: int) -> None:
    """A process that is nobody's child here has ended."""
    deadline = time.monotonic() + 20
    while running(pid):
        assert time.monotonic() < deadline, f"process {pid} does not end"
        time.sleep(0.05)
