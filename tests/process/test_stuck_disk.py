"""A disk that hangs, in a real server: others go on, readiness shows it, it is used again later.

The disk is a plug-in of its own (tests/process/plugin), found by its entry point.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.process.engine import CHAIN_CHUNKS, Engine, until
from tests.servers import Server, run_kvkeep, running_server

from kvkeep.wire import messages as m

PLUGIN = Path(__file__).parent / "plugin"
SETTINGS = {
    "l1.session_staging_fraction": 1,
    "l2.get_timeout_s": 5,
    "l2.lookup_wait_s": 20,
    "l2.breaker_open_s": 0.2,
}
BAD, GOOD, RESIDENT = 1, 2, 3  # chains: in the bad disk, in the good one, in L1


def readiness(server: Server) -> dict[str, Any]:
    code, body = server.get("/readyz")
    assert code == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


def stored_in(folder: Path, url: str, chain: int) -> None:
    """A chain that one backend has, and nobody else."""
    with running_server(folder, settings=SETTINGS, l2=url) as server:
        with Engine(server.socket, "writer").wait_ready() as engine:
            assert engine.store(chain) == CHAIN_CHUNKS
        done = run_kvkeep("wait-persisted", "--socket", server.socket)
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    bad, good = f"stalling://{tmp_path}/bad?name=bad", f"fs://{tmp_path}/good?name=good"
    stall = tmp_path / "stall"
    stored_in(tmp_path, bad, BAD)
    stored_in(tmp_path, good, GOOD)
    with running_server(tmp_path, settings=SETTINGS, l2=f"{bad} {good}") as server:
        server.wait_for("l2_scanned")
        with Engine(server.socket, "reader").wait_ready() as engine:
            assert engine.store(RESIDENT) == CHAIN_CHUNKS
            stall.touch()
            packed = b"".join(engine.keys(BAD))
            hung = engine.client.call(lambda seq: m.Lookup(seq, "hung", packed))
            assert hung is not None
            # Eight loads hang: the other backend and L1 answer as if nothing were.
            until(lambda: server.status()["transfers"]["fetches"] == CHAIN_CHUNKS)
            assert engine.load(GOOD) == (CHAIN_CHUNKS, 0)
            assert engine.load(RESIDENT) == (CHAIN_CHUNKS, 0)
            assert not hung.done, (
                "the others were held up until the deadline of the disk that hangs"
            )
            until(lambda: readiness(server)["l2"][0]["stuck"] == CHAIN_CHUNKS)
            shown = readiness(server)
            assert shown["ready"]
            assert shown["l2"][0]["state"] != "closed"
            assert any("bad" in problem for problem in shown["problems"]), shown
            until(lambda: hung.done)  # answered all the same
            assert isinstance(hung.reply, m.Found)
            assert hung.reply.chunks == 0
            assert engine.load(GOOD) == (CHAIN_CHUNKS, 0)

            stall.unlink()  # the disk is back, and nobody asks it anything
            until(lambda: readiness(server)["problems"] == [])
            assert [store["state"] for store in readiness(server)["l2"]] == ["closed", "closed"]
            assert engine.load(BAD) == (CHAIN_CHUNKS, 0)
            assert server.status()["l1"]["staging_bytes"] == 0
