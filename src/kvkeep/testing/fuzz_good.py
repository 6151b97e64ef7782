"""The engine that behaves beside the strangers of the wire fuzzer: what it must never lose.

It stores a few chunks, holds some of them for reading all the time, and asks again and again. Every
answer must come, every byte must be right, and what it holds must stay where it is.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvkeep.core.events import Columns
from kvkeep.core.keys import chunk_hash, root_hash
from kvkeep.testing.layouts import Identity
from kvkeep.testing.model import content
from kvkeep.testing.sim_usable import pack
from kvkeep.types import (
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    GroupKind,
    LeaseId,
    PeerId,
    Role,
    RowSpec,
    StageOutcome,
)
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from kvkeep.testing.fuzz_wire_rig import Rig

_ROW = RowSpec(0, GroupKind.FULL_ATTENTION, 4090)
_ANSWER_S = 1.0  # virtual; a lookup waits for L2 0.3 s at most
_CHUNKS, _HELD = 4, 2


class Good:
    """One engine, one connection."""

    session = "the good one"

    def __init__(self, rig: "Rig") -> None:
        self._rig = rig
        self._engine = Identity(self.session, 1, (_ROW,), True, True, True, False, True)
        self.disturbed = False  # a stranger did what its rights allow
        self._messages: list[m.ServerMessage] = []
        self._seq = 0
        self._peer = PeerId(0)
        self._hashes: list[ChunkHash] = []
        self._lease = 0
        self._holds: list[tuple[int, int, int]] = []  # slot, offset, generation

    def send(self, message: m.ServerMessage) -> None:
        """The server's messages."""
        self._rig.saw(message)
        if isinstance(message, m.Revoked) and message.lease == self._lease:
            self._lease, self._holds = 0, []
        self._messages.append(message)

    async def begin(self) -> None:
        """Say hello, store, and hold the first chunks."""
        print_ = self._engine.fingerprint(0)
        hello = m.Hello(m.VERSIONS, self.session, Role.BOTH, rows=(_ROW,), fingerprint=print_)
        welcome = self._rig.service.hello(hello, self, pid=1)
        assert isinstance(welcome, m.Welcome)
        self._peer = PeerId(welcome.peer)
        parent = root_hash(self._engine.session_fingerprint())
        for number in range(_CHUNKS):
            parent = chunk_hash(parent, bytes([number]))
            self._hashes.append(parent)
        assert await self._store(self._hashes) == _CHUNKS
        found = await self._find(_HELD)
        assert found.chunks == _HELD
        self._lease = found.lease
        slots, offsets, words = _cells(found.columns[0])
        self._holds = list(zip(slots, offsets, words, strict=True))

    async def looks(self) -> None:
        """Ask for everything, read it, give it back."""
        if self._is_replaced():
            return
        found = await self._find(_CHUNKS)
        if not self.disturbed and self._lease:
            assert found.chunks >= _HELD, "what is held is not found"
        if found.lease:
            self._rig.service.receive(self._peer, m.End(found.lease, (0,), EndOutcome.USED))

    def keeps(self) -> None:
        """What it holds is untouched."""
        if not self._lease or self._is_replaced():
            return
        leases = self._rig.directory.sessions[self.session].reads_open
        assert LeaseId(self._lease) in leases, "a stranger ended a read"
        for number, (slot, offset, word) in enumerate(self._holds):
            assert self._rig.words[slot] == word, "held for reading, and given away"
            self._is_right(number, offset)

    async def ends(self) -> None:
        """All strangers are gone: it finds what it held, and can store."""
        if self._is_replaced():
            return
        await self.looks()
        before = len(self._hashes)
        self._hashes.append(chunk_hash(self._hashes[-1], b"new"))
        stored = await self._store(self._hashes[before:], before)
        assert stored == 1 or self.disturbed, "memory is free, and nothing can be stored"

    def knows(self, hashes: bytes) -> bool:
        """Whether one of its chunks is among these."""
        return any(bytes(own) in hashes for own in self._hashes)

    def reserved_bytes(self) -> int:
        """What its session holds for reading."""
        session = self._rig.directory.sessions.get(self.session)
        return session.reserved_bytes if session is not None else 0

    def _is_replaced(self) -> bool:
        """A stranger said hello under its name: that is how an engine comes back."""
        session = self._rig.directory.sessions.get(self.session)
        others = self._rig.directory.sessions.values()
        own = self._engine.session_fingerprint()
        if any(other.fingerprint == own and other is not session for other in others):
            self.disturbed = True  # it may say Forget for the same layout
        if session is None or session.scheduler != self._peer or not session.ready:
            self._lease = 0
            return True
        return False

    # ---- its calls

    async def _ask(self, make: Callable[[int], m.ClientMessage]) -> Any:  # noqa: ANN401 - by call
        self._seq += 1
        seq = self._seq
        self._rig.service.receive(self._peer, make(seq))
        return await self._take(lambda got: getattr(got, "seq", 0) == seq)

    async def _take(self, wanted: Callable[[m.ServerMessage], bool]) -> Any:  # noqa: ANN401
        until_s = self._rig.loop.time() + _ANSWER_S
        while True:
            for message in self._messages:
                if wanted(message):
                    self._messages.remove(message)
                    return message
            assert self._rig.loop.time() < until_s, "the engine that behaves gets no answer"
            await asyncio.sleep(0.005)

    async def _store(self, hashes: list[ChunkHash], first: int = 0) -> int:
        parent = self._hashes[first - 1] if first else root_hash(self._engine.session_fingerprint())
        item = m.StageItem("good", parent, pack(hashes), None, first)
        granted = await self._ask(lambda seq: m.Stage(seq, (item,)))
        outcomes = [StageOutcome(o) for o in granted.outcomes]
        new = [h for h, o in zip(hashes, outcomes, strict=True) if o is StageOutcome.GRANTED]
        _, offsets, _ = _cells(granted.columns[0]) if new else ([], [], [])
        for one, offset in zip(new, offsets, strict=True):
            right = content(one, 0, _ROW.group, _ROW.object_bytes)
            self._rig.arena[offset : offset + len(right)] = right
        if not new:
            return 0
        committed = await self._ask(lambda seq: m.Commit(seq, granted.leases))
        return list(committed.outcomes).count(CommitOutcome.COMMITTED)

    async def _find(self, chunks: int) -> Any:  # noqa: ANN401 - Found or Resolved
        packed = pack(self._hashes[:chunks])
        found = await self._ask(lambda seq: m.Lookup(seq, "good", packed))
        if isinstance(found, m.Pending):
            ticket = found.ticket
            found = await self._take(lambda got: getattr(got, "ticket", 0) == ticket)
        if found.lease:
            _, offsets, _ = _cells(found.columns[0])
            for number, offset in enumerate(offsets):
                self._is_right(number, offset)
        return found

    def _is_right(self, number: int, offset: int) -> None:
        right = content(self._hashes[number], 0, _ROW.group, _ROW.object_bytes)
        assert self._rig.arena[offset : offset + len(right)] == right, "wrong bytes"


def _cells(columns: Columns) -> tuple[list[int], list[int], list[int]]:
    """(slots, offsets, generations)."""
    parts = (columns.slots, columns.offsets, columns.generations)
    return tuple(list(memoryview(part).cast("Q")) for part in parts)  # type: ignore[return-value]
