"""`kvkeep serve` as a process: it answers, stops cleanly, and takes over from a killed one."""

import socket
import stat
from pathlib import Path

import msgspec
import pytest
from tests.servers import run_kvkeep, running_server


def test_it_answers_and_stops(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        path = Path(server.socket)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
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
        assert not path.exists()
    assert [line["event"] for line in server.log][-2:] == ["stopping", "stopped"]


def test_what_is_not_http_is_a_log_line_like_the_others(tmp_path: Path) -> None:
    with running_server(tmp_path, populated=False) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
            stranger.recv(100)
        line = server.wait_for("http")
        assert (line["level"], line["what"]) == ("warning", "Invalid HTTP request received.")
    assert not [line for line in server.log if "text" in line]


@pytest.mark.slow
def test_a_socket_file_that_is_taken_away(tmp_path: Path) -> None:
    with running_server(tmp_path, populated=False) as server:
        path = Path(server.socket)
        path.unlink()
        path.write_text("of somebody else")
        server.wait_for("socket_gone")
        (problem,) = server.status()["problems"]
        assert problem.startswith(f"the socket file {path} is gone: restart the server")
        assert server.stop() == 0
        assert path.read_text() == "of somebody else"


def test_a_refused_start_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kvkeep.sock"
    done = run_kvkeep("serve", "--socket", path, "--group", "no-such-group", "--l1-size", "8MiB")
    assert done.returncode == 1
    assert "no-such-group" in done.stderr
    assert not path.parent.exists()


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
