"""What the control socket does with peers that are not ours, say nothing, or say too much."""

import contextlib
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.process.engine import Engine, hello, until
from tests.process.peer import Peer, settle
from tests.servers import Server, kvkeep_env, running_server

from kvkeep.errors import SocketError
from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode

HELLO_S = 0.6
NOBODY = 65534
SILENT = 200
FDS = "/proc/{}/fd"

ANOTHER_USER = """
import os, sys
from kvkeep.connect import open_socket
from kvkeep.errors import SocketError
os.setgroups([])
os.setgid({nobody})
os.setuid({nobody})
try:
    open_socket(sys.argv[1])
except SocketError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"limits.handshake_timeout_s": HELLO_S}
    with running_server(tmp_path_factory.mktemp("strangers"), settings=settings) as running:
        yield running


def assert_serves(server: Server) -> None:
    with Engine(server.socket, "friend").wait_ready() as engine:
        engine.store(1, 2)
        assert engine.load(1, 2) == (2, 0)
    settle(server)


def descriptors(server: Server) -> int:
    return len(os.listdir(FDS.format(server.pid)))


def refusal(server: Server, data: bytes) -> str:
    """The one sentence that answers these bytes; then the connection has ended."""
    with Peer.at(server.socket) as peer:
        peer.send(data)
        text: str = peer.expect(m.Refused).text
        assert peer.read() is None
    return text


BAD_ROLE = encode(hello("s", role=9))
BAD_FIRST = {
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "does not speak the kvkeep protocol"),
    "tls": (bytes.fromhex("16030102000100fc0303"), "does not speak the kvkeep protocol"),
    "garbage in a frame": (b"\x03\0\0\0abc", "a frame does not decode"),
    "an unknown role": (BAD_ROLE, "a frame does not decode: Invalid enum value 9"),
    "no hello": (encode(m.Ping(1)), "the first message must be Hello"),
    "more than hello": (encode(hello("s")) + encode(m.Ping(1)), "nothing may follow it"),
    "hello and a half": (encode(hello("s")) + b"\x01", "nothing may follow it"),
    "a long hello": (encode(hello("s" * 70_000)), "over the limit"),
}


@pytest.mark.parametrize(("data", "why"), BAD_FIRST.values(), ids=BAD_FIRST)
def test_a_first_message_that_is_none(server: Server, data: bytes, why: str) -> None:
    before = descriptors(server)
    assert why in refusal(server, data)
    assert_serves(server)
    until(lambda: descriptors(server) <= before)


def test_a_stranger_that_leaves_at_once_costs_nothing(server: Server) -> None:
    before = descriptors(server)
    for data in (b"", b"\x01", encode(hello("s"))[:10], encode(hello("s"))):
        with Peer.at(server.socket) as peer:
            peer.send(data)
    assert_serves(server)
    until(lambda: descriptors(server) <= before)


def test_a_hello_with_too_many_descriptors(server: Server) -> None:
    before = descriptors(server)
    with Peer.at(server.socket) as peer:
        for byte in encode(hello("s"))[:2]:
            socket.send_fds(peer.sock, [bytes([byte])], [0, 0, 0])
        assert "one descriptor at most" in peer.expect(m.Refused).text
    until(lambda: descriptors(server) <= before)
    assert_serves(server)


def test_a_slow_hello_is_given_up(server: Server) -> None:
    """One byte now and then does not keep a handshake open."""
    frame = encode(hello("slow"))
    with Peer.at(server.socket) as peer:
        started_s = time.monotonic()
        for byte in frame:
            try:
                peer.send(bytes([byte]))
            except OSError:
                break
            time.sleep(HELLO_S / 20)
        took_s = time.monotonic() - started_s
        assert took_s < len(frame) * HELLO_S / 20
        assert peer.expect(m.Refused).text == f"no Hello within {HELLO_S} s"
    assert_serves(server)


def test_many_that_say_nothing_stop_nobody(server: Server) -> None:
    before = descriptors(server)
    silent: list[Peer] = []
    while len(silent) < SILENT:
        with contextlib.suppress(SocketError):  # its backlog is full for a moment
            silent.append(Peer.at(server.socket))
    assert_serves(server)
    for peer in silent:
        assert peer.expect(m.Refused).text.startswith("no Hello within")
        peer.close()
    until(lambda: descriptors(server) <= before)


def whys(server: Server, session: str) -> list[str]:
    """Why connections of a session ended, by the server's log."""
    lines = [line for line in list(server.log) if line.get("session") == session]
    return [line["why"] for line in lines if "why" in line]


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\x01\0\0\0\xc1", b"\xff" * 100],
    ids=["http", "a bad frame", "ff"],
)
def test_nonsense_after_the_handshake_ends_that_connection_only(
    server: Server, data: bytes
) -> None:
    with Engine(server.socket, "bystander").wait_ready() as engine, Peer.at(server.socket) as peer:
        peer.hello(hello("nonsense"))
        peer.send(data)
        while peer.read() is not None:
            pass
        assert engine.ask(m.Ping, then="lookup")
        assert engine.client.up
        until(lambda: any("frame" in why for why in whys(server, "nonsense")))


def test_half_a_frame_is_told_as_such(server: Server) -> None:
    with Peer.at(server.socket) as peer:
        peer.hello(hello("half"))
        peer.expect(m.Ready)
        peer.send(encode(m.Note("r", "event"))[:-1])
    until(lambda: any("middle of a frame" in why for why in whys(server, "half")))


def test_a_second_hello_is_a_problem_not_an_end(server: Server) -> None:
    with Peer.at(server.socket) as peer:
        peer.hello(hello("twice"))
        peer.send(hello("twice"))
        assert peer.expect(m.Problem).text == "a connection says Hello once"
        peer.send(m.Ping(1))
        assert peer.expect(m.Pong).seq == 1


def test_only_an_operator_may_ask_about_others(server: Server) -> None:
    with Peer.at(server.socket) as peer:
        peer.hello(hello("curious"))
        peer.send(m.Query(1, "status"))
        assert "only an operator" in peer.expect(m.Failed).text


def talk(peer: Peer, times: int) -> None:
    for seq in range(times):
        peer.send(m.Query(seq, "x" * 1000))


def test_one_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    """Its answers are bounded; others do not notice."""
    limits = {"limits.max_push_queue_bytes": 65536, "limits.max_frame_bytes": 65536}
    with running_server(tmp_path, settings=limits) as server, Peer.at(server.socket) as peer:
        peer.hello(hello("deaf"))
        peer.sock.settimeout(10)
        with pytest.raises(OSError, match=r"Broken pipe|reset"):
            talk(peer, 10_000_000)
        until(lambda: any("does not read" in why for why in whys(server, "deaf")))
        assert_serves(server)


def test_a_server_without_descriptors_waits_for_some(tmp_path: Path) -> None:
    """It neither spins nor dies, says so once, and accepts again when it can."""
    with running_server(tmp_path) as server:
        idle = descriptors(server)
        assert_serves(server)
        until(lambda: descriptors(server) == idle)
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (idle, hard))
        used_s = cpu_s(server)
        waiting = [Peer.at(server.socket) for _ in range(3)]
        server.wait_for("accept_failed")
        time.sleep(0.6)
        assert cpu_s(server) - used_s < 0.3
        assert [line["event"] for line in server.log].count("accept_failed") == 1
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
        for peer in waiting:
            peer.hello(hello("patient"))
            peer.close()
        server.wait_for("accepting_again")
        assert_serves(server)


def test_the_socket_is_for_its_own_user(server: Server) -> None:
    path = Path(server.socket)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(f"{path}.lock").stat().st_mode) == 0o600
    assert path.stat().st_uid == os.getuid()


def as_another_user(server: Server) -> str:
    """What a client says that runs as another user."""
    said = subprocess.run(
        [sys.executable, "-c", ANOTHER_USER.format(nobody=NOBODY), server.socket],
        capture_output=True,
        text=True,
        env=kvkeep_env(),
        timeout=30,
    )
    assert said.returncode == 0, said.stderr
    return said.stdout


def test_another_user_is_refused(tmp_path: Path) -> None:
    """By the folder's mode, and by the socket's own where the folder lets everybody in."""
    with (
        tempfile.TemporaryDirectory(prefix="kvkeep-") as outer,
        running_server(tmp_path, socket=f"{outer}/run/k.sock") as server,
    ):
        Path(outer).chmod(0o755)
        assert stat.S_IMODE(Path(server.socket).stat().st_mode) & 0o077 == 0
        if os.getuid() != 0:
            return  # nobody here can become another user: the mode has said it
        fix = "it belongs to another user; run as that user, or set [socket] group"
        assert fix in as_another_user(server)
        Path(server.socket).parent.chmod(0o755)
        assert fix in as_another_user(server)
        assert_serves(server)


def cpu_s(server: Server) -> float:
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
