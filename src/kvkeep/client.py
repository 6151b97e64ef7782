"""For engines: one connection to the server that never blocks, never raises, and may be lost.

Calls are sent without waiting and answered in order; the caller reads the socket itself while it
waits, bounded by a budget per engine step. When the server is slow for longer than `PATIENCE_S` the
client is `away`: nothing is asked and nothing stored until a background probe succeeds. A watcher
thread connects, reconnects, probes, unmaps the arena of a dead server and gives late grants back.
"""

import contextlib
import enum
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from kvkeep import shm
from kvkeep.connect import CONNECT_TIMEOUT_S, open_socket, say_hello
from kvkeep.errors import KVKeepError, ProtocolError, Refused, ServerAway
from kvkeep.types import EndOutcome, Role
from kvkeep.wire import messages as m
from kvkeep.wire.framing import FrameReader, encode, server_frames

PATIENCE_S = 0.1  # an answer outstanding for longer means `away`
SPIN_S = 0.0001  # looks at the socket for so long before it sleeps: a wake-up costs as much
PROBE_S = 0.05  # how often the watcher looks at the socket while away or while answers are due
IDLE_S = 0.25
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 1.0
MAX_UNSENT_BYTES = 1 << 20
TOUCH_BYTES = 256 << 20  # pages touched between two looks at the socket


class State(enum.Enum):
    """What the connection is good for."""

    CONNECTING = "connecting"
    UP = "up"
    AWAY = "away"
    REFUSED = "refused"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Budget:
    """The most an engine step may wait for the server, all calls together."""

    step_s: float = 0.002


class Call:
    """One call under way. `reply` is set when it is answered; `lost` when it never will be.

    With a `ticket` the server has said that the answer to a lookup comes later.
    """

    __slots__ = ("abandoned", "epoch", "lost", "message", "reply", "sent_s", "ticket")

    def __init__(self, message: m.ClientMessage, sent_s: float, epoch: int) -> None:
        self.message = message
        self.epoch = epoch  # of the server that will answer; its handles are good in no other
        self.sent_s = sent_s
        self.reply: m.ServerMessage | None = None
        self.lost = False
        self.abandoned = False
        self.ticket = 0

    @property
    def done(self) -> bool:
        """Answered or lost."""
        return self.lost or self.reply is not None


class Client:
    """A connection of one role of a session. Thread-safe; built once, `start()`ed, `close()`d.

    `on_push` is called with pushed messages, in the thread that happened to read them.
    """

    def __init__(
        self,
        path: str,
        hello: m.Hello,
        *,
        budget: Budget | None = None,
        on_push: Callable[[m.ServerMessage], None] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self.state = State.CONNECTING
        self.why = "not connected yet"
        self.welcome: m.Welcome | None = None
        self.ready: m.Ready | None = None
        self.mapping: shm.Mapping | None = None
        self.max_step_wait_s = 0.0
        self.waited_s = 0.0  # in the current step
        self._hello, self._budget = hello, budget or Budget()
        self._on_push = on_push or (lambda _: None)
        self._log = log or (lambda _: None)
        self._sock: socket.socket | None = None
        self._reader: FrameReader[m.ServerMessage] = server_frames()
        self._unsent = bytearray()
        self._calls: dict[int, Call] = {}
        self._pending: dict[int, Call] = {}  # by ticket
        self._unhurried: dict[int, Call] = {}  # L2 has a part in the answer: no silence meanwhile
        self._seq = 0
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None
        self._confirms = 0  # the peer id of a lost connection, once nothing of it is mapped
        self._populated_bytes = 0
        self._connected_s = 0.0
        _forget_after_fork(self)

    # ---- life

    def start(self) -> None:
        """Connect in the background and stay connected."""
        self._watcher = threading.Thread(target=self._watch, name="kvkeep-watcher", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Unmap, say Bye and end. Never raises."""
        self._stop.set()
        unmapped = self.mapping is None or self.mapping.close()
        with self._lock:
            if unmapped and self._sock is not None:
                self._send(encode(m.Bye()))
            self._disconnect("closed", State.CLOSED)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2 * CONNECT_TIMEOUT_S)

    @property
    def up(self) -> bool:
        """True when calls may be made."""
        return self.state is State.UP

    @property
    def epoch(self) -> int:
        """The epoch of the server last connected to; 0 before the first."""
        return self.welcome.epoch if self.welcome is not None else 0

    # ---- calls

    def begin_step(self) -> None:
        """A new engine step: the waiting budget is whole again."""
        self.max_step_wait_s = max(self.max_step_wait_s, self.waited_s)
        self.waited_s = 0.0

    def call(
        self, make: Callable[[int], m.ClientMessage], *, even_away: bool = False
    ) -> Call | None:
        """Send `make(seq)` without waiting; None when the server is away.

        `even_away` queues it for a server that is only slow: for what ends a lease.
        """
        with self._lock:
            away = even_away and self.state is State.AWAY
            if self.state is not State.UP and not away:
                return None
            self._seq += 1
            call = Call(make(self._seq), time.monotonic(), self.epoch)
            calls = self._unhurried if isinstance(call.message, m.Forget) else self._calls
            calls[self._seq] = call
            if not self._send(encode(call.message)):
                calls.pop(self._seq, None)
                return None
            return call

    def notify(self, message: m.ClientMessage) -> None:
        """Send a notice; lost when there is no connection (then its lease is gone too)."""
        with self._lock:
            if self._sock is not None:
                self._send(encode(message))

    def wait(self, call: Call, most_s: float | None = None) -> bool:
        """Wait for the answer within the step's budget (and `most_s`); True when it is done.

        Not done in time and older than PATIENCE_S: the client goes `away`.
        """
        started = time.monotonic()
        self.pump()  # counted: another thread may hold the lock
        left = self._budget.step_s - self.waited_s
        deadline = started + max(0.0, left if most_s is None else min(left, most_s))
        while not call.done and (now := time.monotonic()) < deadline:
            if now >= started + SPIN_S:
                self._poll(deadline - now)
            self.pump()
        self.waited_s += time.monotonic() - started
        if not call.done:
            self._check_patience()
        return call.done

    def abandon(self, call: Call) -> None:
        """The caller no longer wants the answer: what it grants is given back on arrival."""
        with self._lock:
            call.abandoned = True
            if call.reply is not None:
                self._give_back(call.reply)
            elif self._pending.pop(call.ticket, None) is not None:
                call.lost = True
                self.notify(m.Cancel(call.ticket))

    def ask(self, make: Callable[[int], m.ClientMessage], timeout_s: float) -> m.ServerMessage:
        """For tools, not engines: send and wait. Raises ServerAway or ProtocolError."""
        call = self.call(make)
        if call is None:
            raise ServerAway(f"no connection to the server at {self.path}: {self.why}")
        deadline = time.monotonic() + timeout_s
        while not call.done and time.monotonic() < deadline:
            self._poll(deadline - time.monotonic())
            self.pump()
        if call.reply is None:
            raise ServerAway(f"the server at {self.path} did not answer within {timeout_s} s")
        return call.reply

    def pump(self) -> None:
        """Read what has arrived, without waiting."""
        with self._lock:
            sock = self._sock
            if sock is None:
                return
            if self._unsent:
                self._send(b"")
            try:
                while self._sock is sock:
                    data = sock.recv(1 << 18)
                    if not data:
                        self._disconnect("the server closed the connection", State.CONNECTING)
                        return
                    for message in self._reader.feed(data):
                        self._receive(message)
            except BlockingIOError:
                return
            except (OSError, ProtocolError) as error:
                self._disconnect(str(error), State.CONNECTING)

    # ---- inside

    def _poll(self, timeout_s: float, events: int = select.POLLIN) -> None:
        sock = self._sock
        if sock is None:
            return
        if events == select.POLLIN:  # another thread may take what we wait for before we wake
            timeout_s = min(timeout_s, PROBE_S)
        poller = select.poll()
        with contextlib.suppress(OSError, ValueError):  # closed under us: pump sees it
            poller.register(sock, events)
            poller.poll(max(0.0, timeout_s) * 1e3)

    def _send(self, frame: bytes) -> bool:
        """Send what fits; keep the rest. False: too much is waiting, or the socket is dead."""
        assert self._sock is not None
        self._unsent += frame
        try:
            while self._unsent:
                sent = self._sock.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                self._disconnect("the server does not read", State.CONNECTING)
                return False
        except OSError as error:
            self._disconnect(str(error), State.CONNECTING)
            return False
        return True

    def _receive(self, message: m.ServerMessage) -> None:
        match message:
            case (
                m.Found() | m.Pending() | m.Granted() | m.Committed() | m.Forgotten() | m.Pong()
                | m.Answer() | m.Failed()
            ):  # fmt: skip
                calls = self._calls if message.seq in self._calls else self._unhurried
                self._answered(message, calls.pop(message.seq, None))
                if self.state is State.AWAY and not self._calls:
                    self.state = State.UP
                    self._log("kvkeep: the server answers again, caching resumes")
                return
            case m.Resolved():
                found = m.Found(0, *msgspec.structs.astuple(message)[1:])
                self._answered(found, self._pending.pop(message.ticket, None))
                return
            case m.Ready():
                self.ready = message
            case m.Unready():
                self.ready = None
            case m.Grown():
                self._populated_bytes = message.populated_bytes
        self._on_push(message)

    def _answered(self, message: m.ServerMessage, call: Call | None) -> None:
        """Hand an answer to its caller, or give back what nobody wants any more."""
        gives = isinstance(message, m.Found | m.Granted | m.Pending)
        if call is None or (call.abandoned and gives):
            self._give_back(message)
            if call is not None:
                call.lost = True  # given back: its handles must not be used by anybody
        elif isinstance(message, m.Pending):
            call.ticket = message.ticket
            self._pending[message.ticket] = call
        else:
            call.reply = message

    def _give_back(self, message: m.ServerMessage) -> None:
        """Release what a late answer grants: nobody has seen its handles."""
        match message:
            case m.Pending(ticket=ticket):
                self.notify(m.Cancel(ticket))
            case m.Found(lease=lease) if lease:
                ranks = tuple(range(self._hello.world))
                self.notify(m.End(lease, ranks, EndOutcome.UNUSED))
            case m.Granted(leases=leases) if leases:
                self.notify(m.Abort(leases))

    def _check_patience(self) -> None:
        with self._lock:
            if self.state is not State.UP or not self._calls:
                return
            oldest = next(iter(self._calls.values()))
            if time.monotonic() - oldest.sent_s > PATIENCE_S:
                self.state = State.AWAY
                self.why = f"no answer for {PATIENCE_S} s"
                self._log("kvkeep: the server does not answer; serving without it")
                for call in self._calls.values():
                    call.abandoned = True

    def _disconnect(self, why: str, state: State) -> None:
        """Drop the connection; running copies end before the watcher unmaps."""
        if self._sock is None:
            self.state = state
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the watcher; close() alone does not
        self._sock.close()
        self._sock = None
        self._unsent.clear()
        self.ready = None
        self.state, self.why = state, why
        for calls in (self._calls, self._pending, self._unhurried):
            for call in calls.values():
                call.lost = True
            calls.clear()
        if state is not State.CLOSED:
            self._log(f"kvkeep: {why}; serving without it")
        self._on_push(m.Unready(why))

    # ---- the watcher thread

    def _watch(self) -> None:
        retry_s = 0.0
        while not self._stop.is_set():
            if self._sock is not None:
                self._look()
                if time.monotonic() - self._connected_s > RETRY_MOST_S:
                    retry_s = 0.0  # only now: a server that ends every connection is not spun on
                continue
            self._unmap()
            if self._stop.wait(retry_s):
                return
            retry_s = min(max(2 * retry_s, RETRY_FIRST_S), RETRY_MOST_S)
            try:
                self.connect()
            except Refused as error:
                self._note_failure(State.REFUSED, str(error))
                retry_s = RETRY_MOST_S
            except (KVKeepError, OSError) as error:  # whatever it was: this thread must live on
                self._note_failure(State.CONNECTING, str(error))

    def _look(self) -> None:
        """One round: read, judge, touch some pages, then wait a little for a hang-up."""
        self.pump()
        self._check_patience()
        schedules = self._hello.role in (Role.SCHEDULER, Role.BOTH)
        busy = self._calls or (schedules and self.ready is None)
        # Data does not wake us: callers read their answers themselves.
        self._poll(0.0 if self._touch_pages() else PROBE_S if busy else IDLE_S, select.POLLRDHUP)

    def _note_failure(self, state: State, why: str) -> None:
        with self._lock:
            if self.state is State.CLOSED or (state, why) == (self.state, self.why):
                return
            self.state, self.why = state, why
            self._log(f"kvkeep: {why}")

    def _touch_pages(self) -> bool:
        """Touch one slice of what the server populated; True: there is more to touch."""
        mapping, populated_bytes = self.mapping, self._populated_bytes
        if mapping is None or mapping.touched_bytes >= populated_bytes:
            return False
        before = mapping.touched_bytes
        with contextlib.suppress(KVKeepError):  # later faults cost time, nothing else
            mapping.populate(min(populated_bytes, before + TOUCH_BYTES))
        return before < mapping.touched_bytes < populated_bytes

    def _unmap(self) -> None:
        """Unmap a dead epoch's arena once its copies have ended."""
        mapping = self.mapping
        if mapping is None or mapping.close():
            with self._lock:
                self.mapping = None
                self._confirms = self.welcome.peer if self.welcome is not None else 0
        else:
            self._log("kvkeep: a copy still runs on the old arena; waiting for it")

    def connect(self) -> None:
        """Connect now, in this thread, once. Raises SocketError, Refused or ProtocolError."""
        if self.mapping is not None:
            return  # a copy still runs: one arena at a time
        sock = open_socket(self.path)
        try:
            hello = msgspec.structs.replace(self._hello, confirms=self._confirms)
            mapping = None
            with contextlib.ExitStack() as guard:
                welcome, fds, reader, more = say_hello(sock, hello, self.path, guard)
                if welcome.has_arena:
                    mapping = shm.Mapping(
                        *fds,
                        arena_bytes=welcome.arena_bytes,
                        slots=welcome.slots,
                        write=welcome.writable,
                        epoch=welcome.epoch,
                    )
        except BaseException:
            sock.close()
            raise
        sock.setblocking(False)
        with self._lock:
            self._sock, self._reader = sock, reader
            self.welcome, self.mapping = welcome, mapping
            self._populated_bytes = welcome.populated_bytes
            self._confirms = 0
            self.state, self.why, self._connected_s = State.UP, "", time.monotonic()
            for message in more:
                self._receive(message)
        self._log(f"kvkeep: connected to {self.path}")
        if self._stop.is_set():  # closed meanwhile: nobody else would end this connection
            self.close()

    def forget_in_child(self) -> None:
        """In a forked child: own nothing of the parent's connection."""
        self._lock, self._watcher = threading.RLock(), None
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        if self.mapping is not None:
            self.mapping.abandon()
        self.mapping = self.ready = None
        self._calls.clear()
        self._pending.clear()
        self._unhurried.clear()
        self.state, self.why = State.CLOSED, "this process is a fork of the one that connected"
        self._stop = threading.Event()  # the old one's lock may have been held across the fork
        self._stop.set()


def _forget_after_fork(client: Client) -> None:
    """A forked child drops the connection; the hook does not keep the client alive."""
    reference = weakref.ref(client)

    def in_child() -> None:
        alive = reference()
        if alive is not None:
            alive.forget_in_child()

    os.register_at_fork(after_in_child=in_child)
