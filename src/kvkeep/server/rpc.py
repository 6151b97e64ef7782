"""Connections: handshake with descriptors on the raw socket, then frames on the event loop.

The handshake runs on the raw socket because loop transports cannot pass descriptors. Every peer's
process is watched through a pidfd; its end, not the socket's, frees what it may still write.

A connection that sends much at once is served in slices, in turn with the others, and is not read
from meanwhile: what waits of it is one read of the socket and one frame.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from kvkeep import shm
from kvkeep.config import LimitsConfig
from kvkeep.errors import ProtocolError
from kvkeep.server.overview import Log
from kvkeep.server.service import Service
from kvkeep.types import PeerId, Role
from kvkeep.wire import messages as m
from kvkeep.wire.framing import client_frames, encode

_HELLO_BYTES = 64 << 10
_HELLO_DESCRIPTORS = 4  # a client sends one
SLICE_FRAMES = 32  # of one connection before the others have their turn
SLICE_S = 0.001  # or this long
_PIECE_BYTES = 4096  # decoded at once: few enough frames
_STARVED_S = 0.25  # pause of accepting when the kernel has no descriptor for us


class Connection(asyncio.Protocol):
    """One admitted connection; also its `Link`. Queues pushes until the transport is there."""

    def __init__(self, server: "ControlServer") -> None:
        self._server = server
        self._reader = client_frames(server.limits.max_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._queued: list[bytes] = []
        self._data = b""  # received, not decoded yet
        self._decoded = 0  # bytes of it that are
        self._messages: deque[m.ClientMessage] = deque()  # decoded, not served yet
        self._paused = False  # it has to wait for its next turn
        self.peer = PeerId(0)
        self.why = ""  # it ended; empty: the client closed it

    def send(self, message: m.ServerMessage) -> None:
        """Queue one message; a client that does not read is dropped at the bound."""
        transport = self._transport
        if transport is None:
            self._queued.append(encode(message))
            return
        transport.write(encode(message))
        if transport.get_write_buffer_size() > self._server.limits.max_push_queue_bytes:
            self.why = "it does not read its answers"
            transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop transports are asyncio.Transport in behaviour only, not by class.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=self._server.limits.max_push_queue_bytes)
        for frame in self._queued:
            transport.write(frame)
        self._queued.clear()

    def data_received(self, data: bytes) -> None:
        self._data = self._data[self._decoded :] + data if self._paused else data
        self._decoded = 0
        if not self._paused:
            self._serve()

    def _serve(self) -> None:
        """What has come, as far as it goes in one turn."""
        transport, watchdog = self._transport, self._server.service.watchdog
        assert transport is not None
        began_s = watchdog.begin()
        try:
            done = self._serve_slice()
        except ProtocolError as error:
            self.why, done = str(error), True
            transport.abort()
        finally:
            watchdog.end("frames", began_s)
        if transport.is_closing():  # `connection_lost` follows
            self._paused = False
        elif done and self._paused:
            self._paused = False
            transport.resume_reading()
        elif not done:
            if not self._paused:
                self._paused = True
                transport.pause_reading()
                self._server.service.counters["connections_paused"] += 1
            self._server.later(self._next_turn)

    def _serve_slice(self) -> bool:
        """Whether everything that has come is served."""
        receive, messages = self._server.service.receive, self._messages
        until_s = time.perf_counter() + SLICE_S
        frames = 0
        while messages or self._decoded < len(self._data):
            if not messages:
                piece = self._data[self._decoded : self._decoded + _PIECE_BYTES]
                self._decoded += len(piece)
                messages.extend(self._reader.feed(piece))
                continue
            if frames >= SLICE_FRAMES or (frames and time.perf_counter() >= until_s):
                return False
            frames += 1
            receive(self.peer, messages.popleft())
        self._data, self._decoded = b"", 0
        return True

    def _next_turn(self) -> None:
        if self._paused:
            self._serve()

    def connection_lost(self, exc: Exception | None) -> None:
        self._paused = False
        self._messages.clear()
        if not self.why:
            cut = self._reader.pending_bytes
            self.why = "it ended in the middle of a frame" if cut else "closed by the client"
        with self._server.service.watchdog.entry("left"):
            self._server.lost(self)

    def close(self) -> None:
        """End the connection from our side."""
        self.why = "the server stops"
        if self._transport is not None:
            self._transport.abort()


class ControlServer:
    """Accepts connections on a listening socket and watches the processes behind them."""

    def __init__(
        self,
        service: Service,
        listener: socket.socket,
        memory: tuple[shm.SharedArena, shm.GenerationTable],
        *,
        limits: LimitsConfig,
        log: Log,
    ) -> None:
        self.service = service
        self.limits = limits
        self._listener = listener
        self._arena, self._table = memory
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._connections: set[Connection] = set()
        self._watched: dict[PeerId, int] = {}  # peer -> pidfd
        self._tasks: set[asyncio.Task[object]] = set()
        self._handshakes: dict[int, Callable[[str], None]] = {}
        self._starved: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to accept."""
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def later(self, action: Callable[[], None]) -> None:
        """Run it after whatever is ready now."""
        self._loop.call_soon(action)

    def end_engines(self) -> None:
        """End every engine's connection; operators stay, and may still come."""
        clients = self.service.clients
        for connection in list(self._connections):
            client = clients.get(connection.peer)
            if client is None or Role(client.hello.role) is not Role.OPERATOR:
                connection.close()

    def stop(self) -> None:
        """Stop accepting and end every connection."""
        self._loop.remove_reader(self._listener.fileno())
        if self._starved is not None:
            self._starved.cancel()
        for refuse in list(self._handshakes.values()):
            refuse("the server stops")
        for connection in list(self._connections):
            connection.close()
        for peer in list(self._watched):
            self._unwatch(peer)

    def lost(self, connection: Connection) -> None:
        """A connection ended."""
        self._connections.discard(connection)
        self.service.closed(connection.peer, connection.why)
        if connection.peer not in self.service.directory.peers:
            self._unwatch(connection.peer)  # it had confirmed before it left

    # ---- handshake

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._pause_accepting(str(error))
            return
        if self._starved is not None:
            self._starved = None
            self._log("accepting_again")
        sock.setblocking(False)
        if len(self._connections) + len(self._handshakes) >= self.limits.max_connections:
            limit = self.limits.max_connections
            self._refuse(sock, f"[limits] max_connections = {limit} is reached: raise it")
            return
        self._expect_hello(sock)

    def _pause_accepting(self, why: str) -> None:
        """Out of descriptors: the waiting connection stays readable, so look away for a while."""
        if self._starved is None:
            self._log("accept_failed", why=why)
        self._loop.remove_reader(self._listener.fileno())
        self._starved = self._loop.call_later(_STARVED_S, self.start)

    def _expect_hello(self, sock: socket.socket) -> None:
        fd = sock.fileno()
        reader = client_frames(_HELLO_BYTES)
        fds: list[int] = []

        def end() -> None:
            timer.cancel()
            self._loop.remove_reader(fd)
            del self._handshakes[fd]

        def refuse(why: str) -> None:
            end()
            for extra in fds:
                os.close(extra)
            self._refuse(sock, why)

        def readable() -> None:
            try:
                data, got = shm.receive_with_fds(sock, _HELLO_BYTES)
                fds.extend(got)
                if len(fds) > _HELLO_DESCRIPTORS:
                    raise ProtocolError("Hello brings one descriptor at most")
                messages = reader.feed(data) if data else []
            except BlockingIOError:
                return
            except (ProtocolError, OSError) as error:
                refuse(f"this is the kvkeep control socket: {error}")
                return
            if not data or (messages and _has_left(sock)):
                # A client that gave up on us while we were stopped must not replace its successor.
                refuse("it left before the handshake was over")
            elif messages:
                if (
                    len(messages) > 1
                    or reader.pending_bytes
                    or not isinstance(messages[0], m.Hello)
                ):
                    refuse("the first message must be Hello, and nothing may follow it unanswered")
                    return
                end()
                with self.service.watchdog.entry("hello"):
                    self._admit(sock, messages[0], fds)

        limit_s = self.limits.handshake_timeout_s
        timer = self._loop.call_later(limit_s, lambda: refuse(f"no Hello within {limit_s} s"))
        self._handshakes[fd] = refuse
        self._loop.add_reader(fd, readable)

    def _admit(self, sock: socket.socket, hello: m.Hello, fds: list[int]) -> None:
        pidfd = shm.peer_pidfd(sock)
        if pidfd is None and fds and shm.pid_of(fds[0]) is not None:
            pidfd = fds.pop(0)
        for extra in fds:
            os.close(extra)
        pid = shm.pid_of(pidfd) if pidfd is not None else None
        connection = Connection(self)
        answer = self.service.hello(hello, connection, pid=pid, provable=pidfd is not None)
        if isinstance(answer, m.Refused):
            if pidfd is not None:
                os.close(pidfd)
            self._refuse(sock, answer.text)
            return
        connection.peer = PeerId(answer.peer)
        if pidfd is not None:
            self._watch(connection.peer, pidfd)
        self._unwatch(PeerId(hello.confirms))
        try:
            self._send_welcome(sock, answer)
        except OSError as error:
            connection.why = f"welcome failed: {error.strerror}"
            sock.close()
            self.lost(connection)
            return
        self._connections.add(connection)
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _send_welcome(self, sock: socket.socket, welcome: m.Welcome) -> None:
        fds: list[int] = []
        if welcome.has_arena:
            arena = os.dup(self._arena.fd) if welcome.writable else self._arena.read_only_fd()
            fds = [arena, os.dup(self._table.fd)]
        try:
            frame = encode(welcome)
            if socket.send_fds(sock, [frame], fds) != len(frame):
                raise OSError(0, "the client's receive buffer is full")
        finally:
            for fd in fds:
                os.close(fd)

    def _refuse(self, sock: socket.socket, why: str) -> None:
        self._log("connection_refused", why=why)
        with contextlib.suppress(OSError):
            sock.send(encode(m.Refused(why)))
        sock.close()

    # ---- processes

    def _watch(self, peer: PeerId, pidfd: int) -> None:
        self._watched[peer] = pidfd
        self._loop.add_reader(pidfd, self._process_ended, peer)

    def _process_ended(self, peer: PeerId) -> None:
        self._unwatch(peer)
        with self.service.watchdog.entry("process_ended"):
            self.service.gone(peer)

    def _unwatch(self, peer: PeerId) -> None:
        pidfd = self._watched.pop(peer, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)


def _has_left(sock: socket.socket) -> bool:
    """True when the other end closed the connection and nothing is left to read."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
