"""Doctor: is the socket's server there, does it answer, and does it still have its file."""

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.servers import running_server

from kvkeep.config import SocketConfig
from kvkeep.doctor import Status
from kvkeep.doctor.sockets import check_socket, is_somebody_serving
from kvkeep.server.endpoint import Endpoint
from kvkeep.wire import messages as m
from kvkeep.wire.framing import client_frames, encode

WELCOME = m.Welcome(
    version=m.VERSIONS[0],
    epoch=1,
    peer=1,
    arena_bytes=0,
    populated_bytes=0,
    slots=0,
    has_arena=False,
    writable=False,
)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as name:
        yield Path(name)


def at(path: Path | str) -> SocketConfig:
    return SocketConfig(path=str(path))


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(8)
        yield server


@contextmanager
def answering(path: Path) -> Iterator[list[m.ClientMessage]]:
    """A listener of this process that welcomes one client and answers its ping."""
    heard: list[m.ClientMessage] = []

    def talk() -> None:
        connection, _ = server.accept()
        with connection:
            frames = client_frames()
            while data := connection.recv(1 << 16):
                for message in frames.feed(data):
                    heard.append(message)
                    if isinstance(message, m.Hello):
                        connection.sendall(encode(WELCOME))
                    elif isinstance(message, m.Ping):
                        connection.sendall(encode(m.Grown(1)) + encode(m.Pong(message.seq)))

    with listening(path) as server:
        thread = threading.Thread(target=talk)
        thread.start()
        yield heard
        thread.join(5)
        assert not thread.is_alive()


def test_a_socket_that_is_served(place: Path) -> None:
    with answering(place / "k.sock") as heard:
        check = check_socket(at(place / "k.sock"))
    assert check.status is Status.OK
    assert f"served by process {os.getpid()}" in check.detail
    assert [type(message) for message in heard] == [m.Hello, m.Ping, m.Bye]
    with answering(place / "other.sock"):
        assert is_somebody_serving(str(place / "other.sock"))


def test_a_server_that_accepts_and_does_not_answer(place: Path) -> None:
    with listening(place / "k.sock"):
        check = check_socket(at(place / "k.sock"))
    assert check.status is Status.WARN
    assert f"is served by process {os.getpid()} but does not answer: nothing for" in check.detail


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "kvkeep protocol"),
        (b"", "it closed the connection"),
        (encode(m.Refused("no room")), "it refuses us: no room"),
        (encode(m.Pong(1)), "its first message is not a welcome"),
    ],
)
def test_something_that_answers_otherwise(place: Path, answer: bytes, why: str) -> None:
    def talk() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    with listening(place / "k.sock") as server:
        thread = threading.Thread(target=talk)
        thread.start()
        check = check_socket(at(place / "k.sock"))
        thread.join(5)
    assert check.status is Status.WARN
    assert why in check.detail


@pytest.mark.slow
def test_a_stopped_server_is_found_and_a_running_one_refuses_nobody(place: Path) -> None:
    with running_server(place) as server:
        config = at(server.socket)
        assert check_socket(config).status is Status.OK
        server.process.send_signal(signal.SIGSTOP)
        check = check_socket(config)
        server.process.send_signal(signal.SIGCONT)
        assert check_socket(config).status is Status.OK
        assert server.stop() == 0
        server.wait_for("stopped")
        refused = [line for line in server.log if line.get("event") == "connection_refused"]
        assert len(refused) == 1, "only the one that gave up while the server was stopped"
    assert check.status is Status.WARN
    assert f"is served by process {server.pid} but does not answer" in check.detail


def test_a_server_whose_socket_file_is_gone(place: Path) -> None:
    path = place / "k.sock"
    endpoint = Endpoint(str(path))
    path.unlink()
    check = check_socket(at(place / "k.sock"))
    assert check.status is Status.FAIL
    assert check.detail == (
        f"process {os.getpid()} holds {path} but its socket file is gone: restart it"
    )
    endpoint.close()
    (place / "k.sock.lock").write_text("1\n")  # left by one that was killed: nobody holds it
    assert "is free" in check_socket(at(place / "k.sock")).detail
