"""A stand-in for an engine: one session that stores and loads objects whose bytes follow from keys.

Whatever a reader could be handed wrongly (another object, half a copy, reused memory) shows as a
wrong byte. Scheduler and worker are one connection; every answer is waited for.
"""

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvkeep.client import Budget, Client
from kvkeep.core.keys import extend_chain, root_hash
from kvkeep.errors import ServerAway
from kvkeep.types import (
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    GroupKind,
    Role,
    RowSpec,
    StageOutcome,
)
from kvkeep.wire import messages as m

OBJECT_BYTES = 64 << 10
PIECE_BYTES = 16 << 10  # a copy is made of such pieces, with a point to die at between two
CHUNK_TOKENS = 16
CHAIN_CHUNKS = 8
ANSWER_S = 10.0
FINGERPRINT = bytes(range(32))
SPEC = RowSpec(0, GroupKind.FULL_ATTENTION, OBJECT_BYTES)


class WrongBytes(AssertionError):
    """A read passed its generation check and held bytes of something else."""


@dataclass(frozen=True, slots=True)
class Held:
    """Staged or reserved chunks: where each one's only row lies."""

    leases: tuple[int, ...]
    keys: tuple[ChunkHash, ...]
    slots: tuple[int, ...]
    offsets: tuple[int, ...]
    generations: tuple[int, ...]


def content(key: ChunkHash, size_bytes: int = OBJECT_BYTES) -> bytes:
    """The bytes of the object under this key."""
    return blake3(key).digest(length=size_bytes)


def hello(session: str, **changes: object) -> m.Hello:
    """A worker and scheduler in one; `changes` replace fields."""
    fields: dict[str, object] = {
        "versions": m.VERSIONS,
        "session": session,
        "role": Role.BOTH,
        "rows": (SPEC,),
        "fingerprint": FINGERPRINT,
        "client": "test",
    }
    return m.Hello(**{**fields, **changes})  # type: ignore[arg-type]


def chain(root: ChunkHash, request: int, chunks: int = CHAIN_CHUNKS) -> list[ChunkHash]:
    """The keys of one request; equal in every engine of this layout."""
    return extend_chain(root, [request] * (chunks * CHUNK_TOKENS), CHUNK_TOKENS)


def no_point(_: str) -> None:
    """A point that does nothing."""


class Engine:
    """Connects at once. `point(name)` is called at every step of the work, by its name."""

    def __init__(
        self,
        path: str,
        session: str,
        *,
        point: Callable[[str], None] = no_point,
        on_push: Callable[[m.ServerMessage], None] | None = None,
        **changes: object,
    ) -> None:
        self.log: list[str] = []
        self.session = session
        self.client = Client(
            path,
            hello(session, **changes),
            budget=Budget(step_s=ANSWER_S),
            log=self.log.append,
            on_push=on_push,
        )
        self.client.start()
        self._point = point

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def wait_ready(self, timeout_s: float = ANSWER_S) -> "Engine":
        """Until the session is ready and calls may be made."""
        until(lambda: self.client.up and self.client.ready is not None, timeout_s, self.log)
        return self

    def ask(self, make: Callable[[int], m.ClientMessage], then: str) -> m.ServerMessage:
        """Call, pass the point `then`, and wait; again when a busy machine made us impatient."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            self.client.begin_step()
            call = self.client.call(make)
            self._point(then)
            if call is not None and self.client.wait(call) and call.reply is not None:
                return call.reply
            time.sleep(0.002)
        raise ServerAway(f"{self.session}: {self.client.why}: {self.log}")

    def root(self) -> ChunkHash:
        """The parent of every first chunk."""
        ready = self.client.ready
        if ready is None:
            raise ServerAway("the session is not ready")
        return root_hash(Fingerprint(ready.fingerprint))

    def keys(self, request: int, chunks: int = CHAIN_CHUNKS) -> list[ChunkHash]:
        """The chain of one request."""
        return chain(self.root(), request, chunks)

    def stage(self, request: int, chunks: int = CHAIN_CHUNKS) -> Held:
        """Take extents for what is not stored yet."""
        keys = self.keys(request, chunks)
        item = m.StageItem(str(request), self.root(), b"".join(keys))
        answer = self.ask(lambda seq: m.Stage(seq, (item,)), then="stage")
        assert isinstance(answer, m.Granted)
        granted = zip(keys, answer.outcomes, strict=True)
        mine = [key for key, outcome in granted if outcome == StageOutcome.GRANTED]
        return _held(answer.leases, mine, answer.columns)

    def fill(self, held: Held) -> None:
        """Write the bytes of what was staged."""
        mapping = self.client.mapping
        if mapping is None:
            raise ServerAway("nothing is mapped")
        with mapping.use():
            for key, offset in zip(held.keys, held.offsets, strict=True):
                data = content(key)
                for at in range(0, OBJECT_BYTES, PIECE_BYTES):
                    piece = data[at : at + PIECE_BYTES]
                    ctypes.memmove(mapping.address + offset + at, piece, len(piece))
                    self._point("copy")

    def commit(self, held: Held) -> list[CommitOutcome]:
        """Publish what was staged."""
        answer = self.ask(lambda seq: m.Commit(seq, held.leases), then="commit")
        assert isinstance(answer, m.Committed)
        return [CommitOutcome(outcome) for outcome in answer.outcomes]

    def store(self, request: int, chunks: int = CHAIN_CHUNKS) -> int:
        """Stage, copy, commit; how many chunks this published."""
        held = self.stage(request, chunks)
        if not held.leases:
            return 0
        self.fill(held)
        return self.commit(held).count(CommitOutcome.COMMITTED)

    def lookup(self, request: int, chunks: int = CHAIN_CHUNKS) -> Held:
        """Reserve what is resident of a chain."""
        keys = self.keys(request, chunks)
        packed = b"".join(keys)
        answer = self.ask(lambda seq: m.Lookup(seq, str(request), packed), then="lookup")
        assert isinstance(answer, m.Found)
        leases = (answer.lease,) if answer.lease else ()
        return _held(leases, keys[: answer.chunks] if leases else [], answer.columns)

    def read(self, held: Held) -> tuple[int, int]:
        """(right, lost to a newer generation); raises WrongBytes when a checked read is wrong."""
        mapping = self.client.mapping
        if mapping is None:
            raise ServerAway("nothing is mapped")
        right = 0
        with mapping.use():
            for index, key in enumerate(held.keys):
                data = ctypes.string_at(mapping.address + held.offsets[index], OBJECT_BYTES)
                self._point("read")
                if mapping.generation(held.slots[index]) != held.generations[index]:
                    continue
                if data != content(key):
                    raise WrongBytes(f"{self.session}: {key.hex()} at {held.offsets[index]}")
                right += 1
        return right, len(held.keys) - right

    def end(self, held: Held) -> None:
        """Give a reservation back."""
        for lease in held.leases:
            self.client.notify(m.End(lease, (0,), EndOutcome.USED))

    def load(self, request: int, chunks: int = CHAIN_CHUNKS) -> tuple[int, int]:
        """Look up, read and check, release: (right, lost)."""
        held = self.lookup(request, chunks)
        counts = self.read(held)
        self._point("release")
        self.end(held)
        return counts


def _held(
    leases: tuple[int, ...], keys: Sequence[ChunkHash], columns: tuple[m.Columns, ...]
) -> Held:
    if not keys:
        return Held((), (), (), (), ())
    (column,) = columns
    packed = (column.slots, column.offsets, column.generations)
    slots, offsets, generations = (tuple(array("Q", words)) for words in packed)
    return Held(leases, tuple(keys), slots, offsets, generations)


def until(
    holds: Callable[[], bool], timeout_s: float = ANSWER_S, story: object = "it never held"
) -> float:
    """Wait until `holds()`; returns how long it took, fails with the story after the timeout."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < timeout_s, story
        time.sleep(0.005)
    return time.monotonic() - started
