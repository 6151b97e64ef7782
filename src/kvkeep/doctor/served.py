"""Who is behind a control socket, and does it answer: a whole handshake and one Ping.

A stopped server still accepts connections, since the kernel does that for it, so connecting proves
little. We say who we are and say goodbye: a bare connection would be a refusal in the server's log.
"""

import contextlib
import enum
import socket
import struct
import time
from dataclasses import dataclass

from kvkeep import __version__
from kvkeep.errors import KVKeepError, ProtocolError
from kvkeep.types import Role
from kvkeep.wire import messages as m
from kvkeep.wire.framing import FrameReader, encode, server_frames

ANSWER_TIMEOUT_S = 1.0


class Reply(enum.Enum):
    """What came of connecting and asking."""

    ANSWERS = "answers"
    SILENT = "silent"  # accepted, but no answer of a kvkeep server
    FULL = "full"  # nobody accepts, and the queue has no room
    NOBODY = "nobody"  # the file is there, its listener is not
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Served:
    """The answer, and whose it is; pid 0 where nobody was reached."""

    answer: Reply
    pid: int = 0
    uid: int = 0
    why: str = ""


def find_served(path: str) -> Served:
    """Connect, introduce ourselves as an operator, and ask whether the server is there."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(ANSWER_TIMEOUT_S)
        try:
            server.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return Served(Reply.NOBODY)
        except (BlockingIOError, TimeoutError):
            return Served(Reply.FULL)
        except OSError as error:
            return Served(Reply.UNREACHABLE, why=error.strerror or str(error))
        size = struct.calcsize("3i")
        raw = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        pid, uid, _ = struct.unpack("3i", raw)
        try:
            _converse(server, deadline)
        except TimeoutError:
            return Served(Reply.SILENT, pid, uid, f"nothing for {ANSWER_TIMEOUT_S:g} s")
        except (OSError, KVKeepError) as error:
            return Served(Reply.SILENT, pid, uid, str(error))
        return Served(Reply.ANSWERS, pid, uid)


def _converse(server: socket.socket, deadline: float) -> None:
    hello = m.Hello(
        m.VERSIONS,
        session="",
        role=Role.OPERATOR,
        writes=False,
        wants_arena=False,
        client=f"kvkeep {__version__} doctor",
    )
    frames = server_frames()
    server.sendall(encode(hello))
    first, *_ = _next(server, frames, deadline)
    if isinstance(first, m.Refused):
        raise KVKeepError(f"it refuses us: {first.text}")
    if not isinstance(first, m.Welcome):
        raise ProtocolError("its first message is not a welcome")
    server.sendall(encode(m.Ping(1)))
    while not any(isinstance(message, m.Pong) for message in _next(server, frames, deadline)):
        continue  # such as the progress of populating, which all are told
    with contextlib.suppress(OSError):  # it has answered; whether it hears goodbye is no matter
        server.sendall(encode(m.Bye()))


def _next(
    server: socket.socket, frames: FrameReader[m.ServerMessage], deadline: float
) -> list[m.ServerMessage]:
    """The next messages, at least one."""
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        server.settimeout(left_s)
        data = server.recv(1 << 16)
        if not data:
            raise ProtocolError("it closed the connection")
        messages = frames.feed(data)
        if messages:
            return messages
