"""Opens the control socket and says Hello: the blocking first second of every connection."""

import contextlib
import os
import select
import socket

from kvkeep import shm
from kvkeep.errors import KVKeepError, ProtocolError, Refused, SocketError
from kvkeep.wire import messages as m
from kvkeep.wire.framing import FrameReader, encode, server_frames

CONNECT_TIMEOUT_S = 2.0
_SLOW = f"did not answer within {CONNECT_TIMEOUT_S} s: it is stopped or overloaded; see its process"
_SEND_BUFFER_BYTES = 1 << 20


def open_socket(path: str, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket:
    """A blocking connection to the control socket; raises SocketError with the fix."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        sock.connect(path)
    except PermissionError as error:
        sock.close()
        raise SocketError(
            f"no permission for {path}: it belongs to another user; run as that user, or set "
            "[socket] group on the server"
        ) from error
    except (FileNotFoundError, ConnectionRefusedError) as error:
        sock.close()
        raise SocketError(f"no server at {path}: start one with kvkeep serve") from error
    except OSError as error:
        sock.close()
        raise SocketError(f"cannot connect to {path}: {error}") from error
    return sock


def say_hello(
    sock: socket.socket, hello: m.Hello, path: str, guard: contextlib.ExitStack
) -> tuple[m.Welcome, list[int], FrameReader[m.ServerMessage], list[m.ServerMessage]]:
    """Say Hello; returns the welcome, its descriptors, and what was read after it.

    `guard` keeps other threads from forking from the moment in which descriptors may be here.
    """
    own: list[int] = []
    with contextlib.suppress(OSError):  # before Linux 5.3
        own.append(os.pidfd_open(os.getpid()))
    reader = server_frames()
    messages: list[m.ServerMessage] = []
    fds: list[int] = []
    try:
        socket.send_fds(sock, [encode(hello)], own)
        answered = select.poll()
        answered.register(sock, select.POLLIN)
        if not answered.poll(CONNECT_TIMEOUT_S * 1e3):
            raise TimeoutError
        guard.enter_context(shm.no_fork())
        while not messages:  # the descriptors come with the first bytes
            data, got = shm.receive_with_fds(sock, 1 << 16)
            fds += got
            if not data:
                raise ConnectionResetError
            messages = reader.feed(data)
        first = messages.pop(0)
        if isinstance(first, m.Welcome) and len(fds) == 2 * first.has_arena:
            return first, fds, reader, messages
        if isinstance(first, m.Refused):
            raise Refused(first.text)
        raise ProtocolError("the server's first message is not a welcome")
    except (OSError, KVKeepError) as error:
        own += fds
        if isinstance(error, KVKeepError):
            raise
        why = _SLOW if isinstance(error, TimeoutError) else f"failed: {error}"
        why = (
            "ended the connection: it is stopping, or has died"
            if isinstance(error, ConnectionError)
            else why
        )
        raise SocketError(f"the server at {path} {why}") from error
    finally:
        for fd in own:
            os.close(fd)
