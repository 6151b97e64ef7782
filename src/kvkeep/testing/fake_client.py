"""What kvkeep.client does, in virtual time: calls, late grants, reconnecting, one arena at a time.

A lost connection's arena is given up only when its copies have ended; the next Hello then confirms
that. A call that waits too long is abandoned, and what its late answer grants is given back.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvkeep.testing.model import Memory
from kvkeep.testing.network import End
from kvkeep.testing.process import Process
from kvkeep.types import EndOutcome, Epoch
from kvkeep.wire import messages as m
from kvkeep.wire.framing import encode, server_frames

if TYPE_CHECKING:
    from kvkeep.testing.world import World

_HANDSHAKE_S = 2.0
_RETRY_S = 0.1
_LOOK_S = 0.005


@dataclass(slots=True)
class Mapping:
    """The arena of one connection; `users` are copies that run on it."""

    memory: Memory
    epoch: Epoch
    users: int = 0


class Call:
    """One call under way; `reply` stays None when it is lost or abandoned."""

    __slots__ = ("abandoned", "epoch", "reply", "ticket", "waiter")

    def __init__(self, epoch: int, waiter: asyncio.Future[None]) -> None:
        self.epoch = epoch
        self.ticket = 0  # once the server has said that the answer comes later
        self.waiter = waiter
        self.reply: m.ServerMessage | None = None
        self.abandoned = False

    def give_up(self) -> None:
        """Nobody waits any more."""
        self.abandoned = True
        self.wake()

    def wake(self) -> None:
        """Let the caller go on."""
        if not self.waiter.done():
            self.waiter.set_result(None)


class FakeClient:
    """One connection of one role, kept up until its process ends or it is closed."""

    def __init__(self, world: "World", process: Process, hello: m.Hello) -> None:
        self.world = world
        self.process = process
        self.hello = hello
        self.end: End | None = None
        self.ready: m.Ready | None = None
        self.mapping: Mapping | None = None
        self.calls: dict[int, Call] = {}
        self.pending: dict[int, Call] = {}  # by ticket
        self.closing = False
        self._seq = 0
        self._peer = 0
        self._confirms = 0
        self._epoch = 0
        self._reader = server_frames()
        self._welcomed: asyncio.Future[bool] | None = None
        process.on_death.append(self._died)

    def start(self) -> None:
        """Connect in the background and stay connected."""
        self.world.spawn(self._connect(0.0))

    @property
    def up(self) -> bool:
        """Whether calls can be made."""
        return self.end is not None and self._peer != 0

    async def call(self, make: Callable[[int], m.ClientMessage]) -> Call | None:
        """The answered call, or None: not connected, lost, or too slow."""
        self.process.check()
        call = self.begin(make)
        return await self.answered(call) if call is not None else None

    def begin(self, make: Callable[[int], m.ClientMessage]) -> Call | None:
        """Send a call; None: not connected."""
        if not self.up:
            return None
        self._seq += 1
        call = self.calls[self._seq] = Call(self._epoch, self.world.loop.create_future())
        self._send(make(self._seq))
        return call

    async def answered(self, call: Call) -> Call | None:
        """Wait for it; None when it is lost, abandoned, or too slow without being pending."""
        timer = self.world.loop.call_later(self.world.knobs.patience_s, self._too_slow, call)
        await call.waiter
        timer.cancel()
        self.process.check()
        return call if call.reply is not None and not call.abandoned else None

    def _too_slow(self, call: Call) -> None:
        if not call.ticket:
            self.abandon(call)

    def abandon(self, call: Call) -> None:
        """Nobody wants the answer any more: what it grants is given back."""
        if call.waiter.done():
            return
        if self.pending.pop(call.ticket, None) is not None:
            self.notify(m.Cancel(call.ticket))
        call.give_up()

    def notify(self, message: m.ClientMessage) -> None:
        """Send a notice; lost when there is no connection."""
        if self.up and self.process.alive:
            self._send(message)

    async def close(self) -> None:
        """Every call answered, copies ended, unmapped, Bye."""
        self.closing = True
        while self.up and (self.calls or self.pending):
            await self.process.sleep(_LOOK_S)
        while self.mapping is not None and self.mapping.users:
            await self.process.sleep(_LOOK_S)
        self.mapping = None
        self.notify(m.Bye())
        if self.end is not None:
            self.end.close()
        self.end = None

    def lose(self, *, cut: bool) -> None:
        """The connection breaks at our side."""
        if self.end is not None:
            self.end.close(cut=cut)
            self._lost()

    # ---- inside

    def _send(self, message: m.ClientMessage) -> None:
        assert self.end is not None
        self.end.send(encode(message))

    async def _connect(self, wait_s: float) -> None:
        await self.process.sleep(wait_s)
        while not self.closing:
            mapping = self.mapping
            if mapping is not None:
                while mapping.users:
                    await self.process.sleep(_LOOK_S)
                self.mapping = None
            if await self._handshake():
                return
            await self.process.sleep(_RETRY_S)

    async def _handshake(self) -> bool:
        """True when the server said welcome."""
        end = self.world.host.connect(self.process)
        if end is None:
            return False
        welcomed = self._welcomed = self.world.loop.create_future()
        self.end, self._reader, self._peer = end, server_frames(), 0
        end.on_data, end.on_end = self._received, self._lost
        self._send(msgspec.structs.replace(self.hello, confirms=self._confirms))
        timer = self.world.loop.call_later(_HANDSHAKE_S, self._too_late, end)
        answer: bool = await welcomed
        timer.cancel()
        self.process.check()
        return answer

    def _too_late(self, end: End) -> None:
        if self.end is end and not self._peer:
            end.close()
            self._lost()

    def _received(self, data: bytes) -> None:
        for message in self._reader.feed(data):
            if self.end is None:
                return
            self._take(message)

    def _take(self, message: m.ServerMessage) -> None:
        match message:
            case m.Welcome():
                assert self.end is not None
                assert self._welcomed is not None
                memory = self.end.descriptors
                assert isinstance(memory, Memory)
                self._peer, self._epoch, self._confirms = message.peer, message.epoch, 0
                if message.has_arena:
                    self.mapping = Mapping(memory, Epoch(message.epoch))
                self._welcomed.set_result(True)
            case m.Refused():
                raise AssertionError(f"an honest client was refused: {message.text}")
            case m.Ready():
                self.ready = message
            case m.Unready():
                self.ready = None
            case m.Grown() | m.Revoked():
                pass
            case m.Resolved():
                self._resolved(message)
            case m.Problem():
                raise AssertionError(f"an honest client was blamed: {message.text}")
            case _:
                self._answer(message.seq, message)

    def _answer(self, seq: int, message: m.ServerMessage) -> None:
        call = self.calls.pop(seq)  # KeyError: answered twice
        if isinstance(message, m.Pending) and not call.abandoned:
            assert message.ticket not in self.pending
            call.ticket = message.ticket
            self.pending[message.ticket] = call
            return
        call.reply = message
        if call.abandoned:
            self._give_back(message)
        call.wake()

    def _resolved(self, message: m.Resolved) -> None:
        """The answer of a pending lookup; nobody's when it crossed our Cancel."""
        found = m.Found(0, *msgspec.structs.astuple(message)[1:])
        call = self.pending.pop(message.ticket, None)
        if call is None:
            self._give_back(found)
            return
        call.reply = found
        call.wake()

    def _give_back(self, message: m.ServerMessage) -> None:
        """Release what a late answer grants: nobody has seen its handles."""
        match message:
            case m.Found(lease=lease) if lease:
                ranks = tuple(range(self.hello.world))
                self.notify(m.End(lease, ranks, EndOutcome.UNUSED))
            case m.Granted(leases=leases) if leases:
                self.notify(m.Abort(leases))
            case m.Pending(ticket=ticket):
                self.notify(m.Cancel(ticket))
            case _:
                pass

    def _lost(self) -> None:
        handshaking = self._forget()
        if not handshaking and not self.closing and self.process.alive:
            self.world.spawn(
                self._connect(self.world.rng.random() * self.world.knobs.keeps_mapping_s)
            )

    def _forget(self) -> bool:
        """Drop all that the connection knew; True when it was still being made."""
        handshaking = self._welcomed is not None and not self._welcomed.done()
        if self._peer and not self._confirms:
            self._confirms = self._peer
        self.end, self.ready, self._peer = None, None, 0
        for call in (*self.calls.values(), *self.pending.values()):
            call.give_up()
        self.calls, self.pending = {}, {}
        if handshaking:
            assert self._welcomed is not None
            self._welcomed.set_result(False)
        return handshaking

    def _died(self) -> None:
        if self.end is not None:
            self.end.close(cut=True)
        self._forget()
