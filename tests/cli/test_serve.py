"""`kvkeep serve` as a process: it answers, stops cleanly, and takes over from a killed one."""

import stat
from pathlib import Path

import msgspec
import pytest
from tests.servers import run_kvkeep, running_server


def test_it_answers_and_stops(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        socket = Path(server.socket)
        assert stat.S_IMODE(socket.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert server.get("/healthz") == (200, '{"status":"ok"}')
        code, body = server.get("/readyz")
        ready = msgspec.json.decode(body)
        assert code == 200
        assert ready["ready"]
        assert ready["populated_bytes"] == ready["capacity_bytes"] == 16 << 20
        code, body = server.get("/metrics")
        assert code == 200
        assert "kvkeep_l1_populated_bytes 1.6777216e+07" in body
        assert server.status()["l1"]["free_bytes"] == 16 << 20
        assert server.get("/nothing")[0] == 404
        assert server.stop() == 0
        assert not socket.exists()
    assert [line["event"] for line in server.log][-2:] == ["stopping", "stopped"]


def test_without_http(tmp_path: Path) -> None:
    with running_server(tmp_path, no_http=True) as server:
        assert server.url == "off"
        assert run_kvkeep("status", "--socket", server.socket).returncode == 0


def test_settings_reach_the_server(tmp_path: Path) -> None:
    settings = {"l1.size": "24MiB"}
    with running_server(tmp_path, settings=settings, l1_size=None) as server:
        assert server.status()["l1"]["capacity_bytes"] == 24 << 20


@pytest.mark.slow
def test_the_socket_of_a_killed_server_is_replaced(tmp_path: Path) -> None:
    with running_server(tmp_path, populated=False) as first:
        first.kill()
        assert Path(first.socket).is_socket()  # left over
        with running_server(tmp_path, populated=False) as second:
            assert second.socket == first.socket
            done = run_kvkeep("status", "--socket", first.socket, "--json")
            assert done.returncode == 0
            assert msgspec.json.decode(done.stdout)["epoch"] == second.status()["epoch"]


@pytest.mark.slow
def test_a_socket_already_served(tmp_path: Path) -> None:
    with running_server(tmp_path, populated=False) as server:
        second = run_kvkeep("serve", "--socket", server.socket, "--l1-size", "8MiB", "--no-http")
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert f"already served by process {server.pid}" in second.stderr
        assert server.get("/healthz")[0] == 200  # the first one did not notice


@pytest.mark.slow
def test_a_port_already_taken(tmp_path: Path) -> None:
    with running_server(tmp_path, populated=False) as server:
        port = server.url.rpartition(":")[2]
        other = tmp_path / "other" / "kvkeep.sock"
        second = run_kvkeep("serve", "--socket", other, "--l1-size", "8MiB", "--http-port", port)
        assert second.returncode == 1
        assert second.stderr.count("\n") == 1
        assert "[http] port" in second.stderr
        assert not other.exists()
