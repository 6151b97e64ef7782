"""A bare connection without watcher or reconnect, and a look at what a server holds.

For what a well-behaved client never does: bytes of another protocol, a socket closed while its
process lives on.
"""

import os
import socket
from dataclasses import dataclass, field
from typing import Any

from tests.process.engine import ANSWER_S, until
from tests.servers import Server

from kvkeep import shm
from kvkeep.connect import open_socket
from kvkeep.wire import messages as m
from kvkeep.wire.framing import FrameReader, encode, server_frames

NOT_PUBLISHED = ("staging_bytes", "orphaned_bytes", "quarantined_bytes")


@dataclass(slots=True)
class Peer:
    """One socket; what arrives is read when asked for."""

    sock: socket.socket
    reader: FrameReader[m.ServerMessage] = field(default_factory=server_frames)
    fds: list[int] = field(default_factory=list)
    queue: list[m.ServerMessage] = field(default_factory=list)

    @classmethod
    def at(cls, path: str) -> "Peer":
        """Connected, nothing said yet."""
        return cls(open_socket(path, ANSWER_S))

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, data: bytes | m.ClientMessage) -> None:
        """Send bytes as they are, or a message as a frame."""
        self.sock.sendall(data if isinstance(data, bytes) else encode(data))

    def read(self) -> m.ServerMessage | None:
        """The next message; None when the server ended the connection."""
        while not self.queue:
            try:
                data, fds = shm.receive_with_fds(self.sock, 1 << 16)
            except ConnectionResetError:
                return None
            self.fds += fds
            if not data:
                return None
            self.queue += self.reader.feed(data)
        return self.queue.pop(0)

    def expect(self, kind: type[m.ServerMessage]) -> Any:
        """The next message of this kind; others before it are dropped."""
        while (message := self.read()) is not None:
            if isinstance(message, kind):
                return message
        raise AssertionError(f"the server ended the connection before {kind}")

    def hello(self, hello: m.Hello) -> m.Welcome:
        """Say Hello and be welcomed."""
        self.send(hello)
        welcome: m.Welcome = self.expect(m.Welcome)
        return welcome

    def close(self) -> None:
        """Close the socket and the descriptors, without a word."""
        self.sock.close()
        while self.fds:
            os.close(self.fds.pop())


def l1(server: Server) -> dict[str, int]:
    """The server's L1, checked: every populated byte is somewhere."""
    body: dict[str, int] = server.status()["l1"]
    parts = ("free_bytes", "resident_bytes", *NOT_PUBLISHED)
    assert sum(body[part] for part in parts) == body["populated_bytes"], body
    return body


def held_bytes(server: Server) -> int:
    """Bytes that are staged, orphaned, quarantined or reserved."""
    body = l1(server)
    return sum(body[part] for part in (*NOT_PUBLISHED, "reserved_bytes"))


def settle(server: Server, timeout_s: float = ANSWER_S) -> float:
    """Wait until nobody holds anything; how long it took."""
    return until(lambda: held_bytes(server) == 0, timeout_s, server.log)
