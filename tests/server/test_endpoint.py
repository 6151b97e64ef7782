"""The control socket: what a refused start leaves behind, and whose file is removed."""

import asyncio
import grp
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.config import Config, HttpConfig
from kvkeep.errors import SocketError
from kvkeep.server import http
from kvkeep.server.endpoint import Endpoint
from kvkeep.server.io import Io
from kvkeep.server.logs import EventLog
from kvkeep.server.run import Server
from kvkeep.shm import GenerationTable, SharedArena

FREE_PORT = 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "k.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    """Composed, not running."""
    endpoint = Endpoint(str(path))
    memory = (SharedArena(4 << 20), GenerationTable(16))
    log = EventLog("info", as_json=False)
    io = Io([], memory[0].view, clock=time.monotonic, log=log)
    yield Server(Config(), log, endpoint, memory, io=io)
    endpoint.close()


def replace_by_another(path: Path) -> socket.socket:
    path.unlink()
    other = socket.socket(socket.AF_UNIX)
    other.bind(str(path))
    return other


def test_a_clean_end_leaves_nothing(path: Path) -> None:
    endpoint = Endpoint(str(path))
    assert endpoint.in_place()
    endpoint.close()
    assert list(path.parent.iterdir()) == []


def test_the_socket_of_another_is_not_removed(path: Path) -> None:
    endpoint = Endpoint(str(path))
    with replace_by_another(path):
        assert not endpoint.in_place()
        endpoint.close()
        assert path.is_socket()


def test_an_unknown_group_is_refused_before_anything_is_made(path: Path) -> None:
    with pytest.raises(SocketError, match="no-such-group"):
        Endpoint(str(path), "no-such-group")
    assert not path.parent.exists()


def test_a_file_at_the_path_is_refused_and_nothing_left(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("mine")
    with pytest.raises(SocketError, match="exists and is not a socket"):
        Endpoint(str(path))
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert path.read_text() == "mine"


def test_a_start_refused_after_its_lock_leaves_no_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "not allowed")

    monkeypatch.setattr("kvkeep.server.endpoint.os.chown", refuse)
    path.parent.mkdir()
    with pytest.raises(SocketError, match="not allowed"):
        Endpoint(str(path), grp.getgrgid(os.getgid()).gr_name)
    assert list(path.parent.iterdir()) == []


def test_a_lock_that_is_held_stays(path: Path) -> None:
    endpoint = Endpoint(str(path))
    with pytest.raises(SocketError, match="already served"):
        Endpoint(str(path))
    assert path.is_socket()
    assert Path(f"{path}.lock").read_text() == f"{os.getpid()}\n"
    endpoint.close()


def test_only_one_server_gets_a_port() -> None:
    with http.bind(HttpConfig(port=FREE_PORT)) as first:
        port = first.getsockname()[1]
        with pytest.raises(SocketError, match=str(port)):
            http.bind(HttpConfig(port=port))


def test_a_socket_file_that_is_gone_is_said_once(
    server: Server, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    EventLog("info", as_json=False)  # the stderr of now, which capsys reads
    server.look_at_socket()
    assert server.service.problems == {}
    path.unlink()
    server.look_at_socket()
    server.look_at_socket()
    assert f"the socket file {path} is gone: restart" in server.service.problems["socket"]
    assert capsys.readouterr().err.count(" socket_gone ") == 1


def test_http_that_ends_early_is_a_problem(server: Server) -> None:
    async def broken() -> None:
        raise RuntimeError("no more")

    async def watch() -> None:
        task = asyncio.get_running_loop().create_task(broken())
        task.add_done_callback(server.http_ended)
        await asyncio.wait([task])
        await asyncio.sleep(0)

    asyncio.run(watch())
    assert "no more" in server.service.problems["http"]
