"""A server that does what it is told at each handshake: for answers a real one never gives."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode

WELCOME = m.Welcome(1, 5, 6, 0, 0, 0, False, False, "fake")
Answer = Callable[[socket.socket], None]  # runs once per connection; keeps or closes the socket


@dataclass(slots=True)
class FakeServer:
    """`connected_s` grows by the time of each connection."""

    path: str
    connected_s: list[float] = field(default_factory=list)
    kept: list[socket.socket] = field(default_factory=list)


@contextlib.contextmanager
def fake_server(path: Path, answer: Answer) -> Iterator[FakeServer]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    server = FakeServer(str(path))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            server.connected_s.append(time.monotonic())
            server.kept.append(sock)
            answer(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for sock in server.kept:
            sock.close()


def silent(_: socket.socket) -> None:
    """Accept, and never say a word."""


def refusing(text: str) -> Answer:
    """Read Hello, refuse it with this text."""
    return answering(encode(m.Refused(text)))


def answering(data: bytes, fds: tuple[int, ...] = ()) -> Answer:
    """Read Hello, send these bytes and descriptors, close."""

    def answer(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        socket.send_fds(sock, [data], list(fds))
        sock.close()

    return answer
