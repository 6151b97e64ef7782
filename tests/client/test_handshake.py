"""A handshake that fails is told in `why`, tried again without spinning, and leaks nothing."""

import os
from pathlib import Path

import pytest
from tests.client.fake_server import WELCOME, answering, fake_server, refusing, silent
from tests.process.engine import Engine, hello, until
from tests.process.peer import Peer
from tests.servers import Server

from kvkeep.client import Client, State
from kvkeep.errors import KVKeepError, ProtocolError, Refused, SocketError
from kvkeep.types import Role
from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode

VERSIONS = "this server speaks protocol 9, the client speaks 1: install the same kvkeep version"


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def connect_once(path: str) -> None:
    Client(path, hello("s")).connect()


def test_a_refusal_is_the_reason_and_is_tried_again(tmp_path: Path) -> None:
    log: list[str] = []
    with fake_server(tmp_path / "s", refusing(VERSIONS)) as fake:
        client = Client(fake.path, hello("s"), log=log.append)
        client.start()
        until(lambda: len(fake.connected_s) >= 2)
        assert (client.state, client.why) == (State.REFUSED, VERSIONS)
        assert client.call(m.Ping) is None
        client.close()
    between_s = [b - a for a, b in zip(fake.connected_s, fake.connected_s[1:], strict=False)]
    assert min(between_s) > 0.9  # refused: once a second is enough
    assert log == [f"kvkeep: {VERSIONS}"]  # said once, not per retry
    assert client.state is State.CLOSED


def test_a_real_server_names_the_version(server: Server) -> None:
    client = Client(server.socket, hello("old", versions=(77, 76)))
    with pytest.raises(
        Refused, match=r"speaks protocol 2, 1, the client speaks 77, 76: install the"
    ):
        client.connect()


def test_a_real_server_names_the_world_size(server: Server) -> None:
    with (
        Engine(server.socket, "world").wait_ready(),
        Engine(server.socket, "world", world=2) as two,
    ):
        until(lambda: two.client.state is State.REFUSED)
        assert "has world size 1, this rank says 2: start all ranks with the same" in two.client.why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rank": 1}, "rank 1 is outside world size 1"),
        ({"rows": ()}, "a worker must say its layout"),
        ({"fingerprint": b""}, "a worker must say its layout"),
        ({"role": 77}, "a frame does not decode"),
    ],
)
def test_a_hello_that_makes_no_sense(server: Server, changes: dict[str, object], why: str) -> None:
    with pytest.raises(Refused, match=why):
        Client(server.socket, hello("nonsense", **changes)).connect()
    with Engine(server.socket, "fine") as engine:
        engine.wait_ready()


@pytest.mark.slow
def test_a_server_that_never_answers(tmp_path: Path) -> None:
    with fake_server(tmp_path / "s", silent) as fake:
        client = Client(fake.path, hello("s"))
        client.start()
        until(lambda: "did not answer within" in client.why)
        assert client.state is State.CONNECTING
        assert client.call(m.Ping) is None
        client.close()


def test_no_server_at_all(tmp_path: Path) -> None:
    with pytest.raises(SocketError, match=r"no server at .*: start one with kvkeep serve"):
        connect_once(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("data", "fds", "error"),
    [
        (b"", 0, SocketError),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 0, ProtocolError),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 2, ProtocolError),
        (encode(m.Pong(1)), 0, ProtocolError),
        (encode(m.Pong(1)), 2, ProtocolError),
        (encode(WELCOME), 2, ProtocolError),
        (encode(WELCOME)[:-1], 2, SocketError),
        (encode(m.Welcome(1, 5, 6, 1 << 21, 0, 8, True, True)), 0, ProtocolError),
        (encode(m.Welcome(1, 5, 6, 1 << 21, 0, 8, True, True)), 2, KVKeepError),
    ],
)
def test_an_answer_that_is_no_welcome(
    tmp_path: Path, data: bytes, fds: int, error: type[KVKeepError]
) -> None:
    """Every such answer has its own error, and no descriptor stays open."""
    null = os.open(os.devnull, os.O_RDONLY)
    before = descriptors()
    answer = answering(data, (null,) * fds)
    with fake_server(tmp_path / "s", answer) as fake, pytest.raises(error):
        connect_once(fake.path)
    assert descriptors() <= before  # fewer when another test's end only now
    os.close(null)


def test_a_server_that_ends_every_connection_is_not_spun_on(tmp_path: Path) -> None:
    with fake_server(tmp_path / "s", answering(encode(WELCOME))) as fake:
        client = Client(fake.path, hello("s", role=Role.SCHEDULER, wants_arena=False))
        client.start()
        until(lambda: len(fake.connected_s) >= 4)
        client.close()
    first_s, last_s = fake.connected_s[0], fake.connected_s[3]
    assert last_s - first_s > 0.05 + 0.1 + 0.2 - 0.02


def test_closing_while_the_watcher_connects_ends_that_connection_too(server: Server) -> None:
    """Whoever loses the race: after close() the server has no connection of ours."""
    for _ in range(8):
        engine = Engine(server.socket, "short")
        engine.client.close()
        assert engine.client.state is State.CLOSED
    until(lambda: all(s["session"] != "short" for s in server.status()["sessions"]))
    with Peer.at(server.socket) as peer:
        assert peer.hello(hello("after")).writable
