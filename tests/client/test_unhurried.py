"""Answers that L2 has a part in come late: that is no silence of the server."""

import contextlib
import socket
import threading
import time
from pathlib import Path

from tests.client.fake_server import WELCOME, Answer, fake_server

from kvkeep.client import PATIENCE_S, Budget, Client, State
from kvkeep.types import Role
from kvkeep.wire import messages as m
from kvkeep.wire.framing import client_frames, encode

HELLO = m.Hello(m.VERSIONS, "s", Role.SCHEDULER, wants_arena=False)


def slow_to_forget(answer: threading.Event) -> Answer:
    """A server that answers Ping at once, and Forget and Lookup when told."""

    def serve(sock: socket.socket) -> None:
        def talk() -> None:
            reader = client_frames()
            later: list[m.ServerMessage] = []
            sock.settimeout(0.01)
            while True:
                try:
                    data = sock.recv(1 << 16)
                except TimeoutError:
                    data = None
                if data == b"":
                    return
                for message in reader.feed(data) if data else []:
                    match message:
                        case m.Hello():
                            sock.sendall(encode(WELCOME))
                        case m.Ping():
                            sock.sendall(encode(m.Pong(message.seq)))
                        case m.Forget():
                            later.append(m.Forgotten(message.seq, 3, False))
                        case m.Lookup():
                            sock.sendall(encode(m.Pending(message.seq, 9)))
                            later.append(m.Resolved(9, 0, 0, (), b"\x03"))
                        case _:
                            pass
                if answer.is_set():
                    sock.sendall(b"".join(map(encode, later)))
                    later.clear()

        def talk_until_it_leaves() -> None:
            with contextlib.suppress(OSError):
                talk()

        threading.Thread(target=talk_until_it_leaves, daemon=True).start()

    return serve


def test_a_server_that_still_forgets_or_fetches_is_not_away(tmp_path: Path) -> None:
    answer = threading.Event()
    with fake_server(tmp_path / "s", slow_to_forget(answer)) as fake:
        client = Client(fake.path, HELLO, budget=Budget(step_s=5.0))
        client.connect()
        try:
            forget = client.call(m.Forget)
            lookup = client.call(lambda seq: m.Lookup(seq, "r", bytes(32)))
            assert forget is not None
            assert lookup is not None
            time.sleep(2 * PATIENCE_S)
            ping = client.call(m.Ping)
            assert ping is not None
            assert client.wait(ping)
            assert client.state is State.UP
            assert not forget.done
            assert not lookup.done
            answer.set()
            assert client.wait(forget)
            assert client.wait(lookup)
            assert forget.reply == m.Forgotten(1, 3, False)
            assert isinstance(lookup.reply, m.Found)
            assert client.state is State.UP
        finally:
            client.close()


def test_what_is_unhurried_is_lost_with_its_connection(tmp_path: Path) -> None:
    with fake_server(tmp_path / "s", slow_to_forget(threading.Event())) as fake:
        client = Client(fake.path, HELLO)
        client.connect()
        forget = client.call(m.Forget)
        lookup = client.call(lambda seq: m.Lookup(seq, "r", bytes(32)))
        assert forget is not None
        assert lookup is not None
        client.close()
        assert forget.lost
        assert lookup.lost
