"""One client process: stores, looks up, reads and verifies as an engine does, by kvkeep.client.

What an object holds follows from its key, so whatever a reader is handed wrongly (another object,
half a copy, reused memory) shows as a wrong byte. A missing, slow or dying server makes operations
miss; anything else that goes wrong is a failure. Everything is counted in a row of the ledger.
"""

import ctypes
import os
import random
import signal
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvkeep.client import Budget, Client
from kvkeep.core.keys import extend_chain, root_hash
from kvkeep.errors import KVKeepError, MemoryRefused, Refused, ServerAway, SocketError
from kvkeep.shm import Mapping
from kvkeep.testing.chaos_fork import fork_and_look
from kvkeep.testing.chaos_ledger import Count, Row, Story, committed, missed, staged
from kvkeep.types import (
    ChunkHash,
    CommitOutcome,
    EndOutcome,
    Fingerprint,
    GroupKind,
    Role,
    RowSpec,
)
from kvkeep.wire import messages as m

CHUNK_TOKENS = 16
CHAIN_CHUNKS = 8
SHARED_CHUNKS = 4  # of a chain: requests of one family begin alike
FAMILY = 8  # requests
PIECE_BYTES = 16 << 10  # a copy is made of such pieces, with a point to die at between two
POINTS = ("stage", "copy", "commit", "lookup", "read", "release")
_LOOK_S = 0.02
_OPERATOR_S = 2.0


class OperationFailed(KVKeepError):
    """The server answered what it never should."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Whose objects: a name, and the bytes of each row of a chunk."""

    name: str
    sizes: tuple[int, ...]

    @property
    def chunk_bytes(self) -> int:
        """All rows of one chunk."""
        return sum(self.sizes)

    def hello(self, session: str, *, dma: bool, recompute: bool) -> m.Hello:
        """Scheduler and worker in one connection."""
        rows = tuple(RowSpec(n, GroupKind.FULL_ATTENTION, s) for n, s in enumerate(self.sizes))
        return m.Hello(
            m.VERSIONS,
            session=session,
            role=Role.BOTH,
            rows=rows,
            fingerprint=blake3(self.name.encode()).digest(),
            dma=dma,
            recompute=recompute,
            client="kvkeep chaos",
        )


@dataclass(frozen=True, slots=True)
class Habits:
    """What a client does, and how often (relative weights)."""

    store: float = 40
    load: float = 50
    reread: float = 10  # what was given back long ago: its generation must protect us
    cancel: float = 4
    fork: float = 2
    reconnect: float = 2
    forget: float = 0
    drop: float = 0
    clear: float = 0  # as an operator who does not wait for readers
    abort_share: float = 0.1  # of stores
    slow_share: float = 0.03  # of reads: a pause in the middle of a copy
    odd: bool = True  # what only a careless or unlucky client does: commit after abort, two ends
    pause_s: float = 0.004  # the most between two operations
    patience_s: float = 2.0  # for one answer; then the operation misses
    requests: int = 480


@dataclass(frozen=True, slots=True)
class Orders:
    """Who a client process is. `doom`: the point at which it kills itself, after `passes`."""

    socket: str
    session: str
    layout: Layout
    habits: Habits
    seed: int
    doom: str = ""
    passes: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """Staged or reserved chunks: for each row, where each chunk of it lies."""

    leases: tuple[int, ...]
    keys: tuple[ChunkHash, ...]
    rows: tuple[
        tuple[Sequence[int], Sequence[int], Sequence[int]], ...
    ]  # slots, offsets, generations


def content(key: ChunkHash, row: int, size_bytes: int) -> bytes:
    """The bytes of the object of this row under this key."""
    return blake3(key + bytes((row,))).digest(length=size_bytes)


def salt_of(request: int) -> str | None:
    """Some requests belong to a tenant."""
    return "tenant" if request // FAMILY % 4 == 3 else None


class ChaosClient:
    """Connects at once; `work` until told to stop, then `close`."""

    def __init__(self, orders: Orders, row: Row, story: Story) -> None:
        self._orders, self._row, self._story = orders, row, story
        self._habits, self._layout = orders.habits, orders.layout
        self._rng = random.Random(orders.seed)
        self._passes = orders.passes
        self._named = 0
        self._old: tuple[Mapping, Held] | None = None  # read and given back
        self._client = self._connected()

    def work(self, stop: Callable[[], bool]) -> None:
        """One operation after another."""
        habits, row = self._habits, self._row
        choices = {
            self._store: habits.store,
            self._load: habits.load,
            self._reread: habits.reread,
            self._cancel: habits.cancel,
            self._fork: habits.fork,
            self._reconnect: habits.reconnect,
            self._forget: habits.forget,
            self._drop: habits.drop,
            self._clear: habits.clear,
        }
        operations, weights = list(choices), list(choices.values())
        while not stop():
            row.begin()
            try:
                done = self._rng.choices(operations, weights)[0]()
            except MemoryRefused:  # the server left in the middle
                done = False
            except (KVKeepError, AssertionError) as error:
                row.add(Count.FAILED)
                self._story.tell(f"{self._orders.session}: {type(error).__name__}: {error}")
                done = True
            row.end()
            row[Count.DESCRIPTORS] = len(os.listdir("/proc/self/fd"))
            row.add(Count.AWAY, not done)
            time.sleep(self._rng.random() * (habits.pause_s if done else 0.02))

    def sweep(self) -> None:
        """Look up and verify every request once."""
        self._until_ready()
        for request in range(self._habits.requests):
            self._row.begin()
            self._load(request)
            self._row.end()

    def close(self) -> None:
        """A clean end."""
        self._client.close()

    # ---- operations: False when there was no server

    def _store(self) -> bool:
        request = self._rng.randrange(self._habits.requests)
        mapping, chain = self._client.mapping, self._chain(request)
        if mapping is None or chain is None:
            return False
        self._row.add(Count.STORES)
        root, keys = chain
        keys = keys[: self._rng.randint(1, CHAIN_CHUNKS)]
        item = m.StageItem(self._name(), root, b"".join(keys), salt_of(request))
        answer = self._ask(lambda seq: m.Stage(seq, (item,)), "stage")
        if answer is None:
            return False
        _expect(answer, m.Granted)
        assert isinstance(answer, m.Granted)
        for outcome in answer.outcomes:
            self._row.add(staged(outcome))
        mine = [key for key, outcome in zip(keys, answer.outcomes, strict=True) if not outcome]
        held = _held(answer.leases, mine, answer.columns)
        if not held.leases:
            return True
        whole = False
        try:
            whole = self._fill(mapping, held)
        finally:
            if not whole:
                self._abort(held)
        return self._commit(mapping, held) if whole else True

    def _fill(self, mapping: Mapping, held: Held) -> bool:
        """Write what was staged; False: it was decided to give it back half-written."""
        stops_at = -1
        if self._rng.random() < self._habits.abort_share:
            stops_at = self._rng.randrange(len(held.keys))
        with mapping.use():
            for index, key in enumerate(held.keys):
                if index == stops_at:
                    return False
                for number, (_, offsets, _) in enumerate(held.rows):
                    data = content(key, number, self._layout.sizes[number])
                    for at in range(0, len(data), PIECE_BYTES):
                        piece = data[at : at + PIECE_BYTES]
                        ctypes.memmove(mapping.address + offsets[index] + at, piece, len(piece))
                        self._point("copy")
                    self._row.add(Count.WRITTEN_BYTES, len(data))
        return True

    def _abort(self, held: Held) -> None:
        self._client.notify(m.Abort(held.leases))
        self._row.add(Count.ABORTED_CHUNKS, len(held.leases))
        if self._habits.odd and self._rng.random() < 0.3:
            mapping = self._client.mapping
            answer = self._ask(lambda seq: m.Commit(seq, held.leases), "commit")
            if isinstance(answer, m.Committed) and mapping is self._client.mapping:
                assert set(answer.outcomes) == {CommitOutcome.UNKNOWN_LEASE}, (
                    f"a commit after an abort was answered {bytes(answer.outcomes)!r}"
                )

    def _commit(self, mapping: Mapping, held: Held) -> bool:
        answer = self._ask(lambda seq: m.Commit(seq, held.leases), "commit", even_away=True)
        if answer is None:
            return False
        _expect(answer, m.Committed)
        assert isinstance(answer, m.Committed)
        for outcome in answer.outcomes:
            self._row.add(committed(outcome))
        stored = answer.outcomes.count(CommitOutcome.COMMITTED)
        self._row.add(Count.COMMITTED_BYTES, stored * self._layout.chunk_bytes)
        # A write is never taken from a live owner that stayed connected.
        lost = CommitOutcome.UNKNOWN_LEASE in answer.outcomes and mapping is self._client.mapping
        assert not lost, f"a staged chunk was gone: {bytes(answer.outcomes)!r}"
        return True

    def _load(self, request: int | None = None) -> bool:
        if request is None:
            request = self._rng.randrange(self._habits.requests)
        mapping, chain = self._client.mapping, self._chain(request)
        if mapping is None or chain is None:
            return False
        keys = chain[1]
        packed, salt, name = b"".join(keys), salt_of(request), self._name()
        wait_ms = self._rng.choice((-1.0, -1.0, 0.0, 50.0))
        self._row.add(Count.LOOKUPS)
        answer = self._ask(lambda seq: m.Lookup(seq, name, packed, salt, wait_ms=wait_ms), "lookup")
        if answer is None:
            return False
        _expect(answer, m.Found)
        assert isinstance(answer, m.Found)
        self._count_found(answer)
        if answer.lease:
            self._read_and_end(mapping, name, _held((answer.lease,), keys, answer.columns))
        return True

    def _count_found(self, found: m.Found) -> None:
        self._row.add(Count.ANSWERED)
        if found.chunks and not found.lease:
            return  # no hit yet: nothing is reserved
        self._row.add(Count.HIT_CHUNKS, found.chunks)
        self._row.add(Count.L2_CHUNKS, sum(tier != 0 for tier in found.tiers))
        for reason in found.reasons:
            self._row.add(missed(reason))

    def _read_and_end(self, mapping: Mapping, name: str, held: Held) -> None:
        right = 0
        try:
            right = self._read(mapping, held)
        finally:
            self._point("release")
            tokens = right * CHUNK_TOKENS
            end = m.End(held.leases[0], (0,), EndOutcome.USED, name, loaded_tokens=tokens)
            self._client.notify(end)
            self._row.add(Count.ENDED)
            self._row.add(Count.LOADED_TOKENS, tokens)
            self._old = self._old or (mapping, held)
            if self._habits.odd and self._rng.random() < 0.02:
                self._client.notify(m.End(held.leases[0], (0,), EndOutcome.USED))

    def _reread(self) -> bool:
        """By now its memory may hold anything else."""
        old, self._old = self._old, None
        if old is not None:
            self._read(*old)
        return True

    def _read(self, mapping: Mapping, held: Held) -> int:
        """Chunks that were right; wrong bytes are counted and told."""
        right = 0
        with mapping.use():
            for index, key in enumerate(held.keys):
                rows = range(len(held.rows))
                found = [self._read_object(mapping, held, index, row) for row in rows]
                if None in found:
                    self._row.add(Count.LOST_CHUNKS)
                    continue
                wrong = [row for row in rows if found[row] != self._wanted(key, row)]
                for row in wrong:
                    self._row.add(Count.WRONG_BYTES, self._layout.sizes[row])
                    where = f"{key.hex()} row {row} at {held.rows[row][1][index]}"
                    self._story.tell(f"{self._orders.session}: wrong bytes: {where}")
                self._row.add(Count.RIGHT_CHUNKS, not wrong)
                right += not wrong
        return right

    def _wanted(self, key: ChunkHash, row: int) -> bytes:
        return content(key, row, self._layout.sizes[row])

    def _read_object(self, mapping: Mapping, held: Held, index: int, row: int) -> bytes | None:
        """A copy whose generation is the same before and after it; else None."""
        slots, offsets, generations = held.rows[row]
        if mapping.generation(slots[index]) != generations[index]:
            return None
        size_bytes = self._layout.sizes[row]
        data = ctypes.string_at(mapping.address + offsets[index], size_bytes)
        self._point("read")
        if self._rng.random() < self._habits.slow_share:
            time.sleep(self._rng.random() * 0.02)
        if mapping.generation(slots[index]) != generations[index]:
            return None
        self._row.add(Count.READ_BYTES, size_bytes)
        return data

    def _cancel(self) -> bool:
        """Ask and go away: what the answer grants must come back to the server."""
        request = self._rng.randrange(self._habits.requests)
        chain = self._chain(request)
        if chain is None:
            return False
        packed, salt, name = b"".join(chain[1]), salt_of(request), self._name()
        self._row.add(Count.LOOKUPS)
        call = self._client.call(lambda seq: m.Lookup(seq, name, packed, salt))
        if call is None:
            return False
        time.sleep(self._rng.random() * 0.005)
        self._client.pump()
        self._client.abandon(call)
        self._row.add(Count.CANCELS)
        return True

    def _fork(self) -> bool:
        self._row.add(Count.FORKS)
        fork_and_look(self._client, self._rng.random() * 0.2, self._story)
        return True

    def _reconnect(self) -> bool:
        self._client.close()
        self._client = self._connected()
        return self._until_ready()

    def _forget(self) -> bool:
        answer = self._ask(m.Forget, "")
        if answer is None:
            return False
        _expect(answer, m.Forgotten)
        self._row.add(Count.FORGETS)
        return True

    def _drop(self) -> bool:
        chain = self._chain(self._rng.randrange(self._habits.requests))
        if chain is None:
            return False
        self._client.notify(m.Drop(self._rng.choice(chain[1])))
        return True

    def _clear(self) -> bool:
        """Every chunk leaves L1, those that are being read too."""
        hello = m.Hello(m.VERSIONS, "", Role.OPERATOR, writes=False, wants_arena=False)
        operator = Client(self._orders.socket, hello)
        try:
            operator.connect()
            answer = operator.ask(lambda seq: m.Query(seq, "clear", "force"), _OPERATOR_S)
        except (SocketError, Refused, ServerAway):
            return False
        finally:
            operator.close()
        _expect(answer, m.Answer)
        return True

    # ---- what they share

    def _connected(self) -> Client:
        dma, recompute = self._rng.random() < 0.2, self._rng.random() < 0.8
        hello = self._layout.hello(self._orders.session, dma=dma, recompute=recompute)
        budget = Budget(step_s=self._habits.patience_s)
        client = Client(self._orders.socket, hello, budget=budget)
        client.start()
        self._row.add(Count.CONNECTS)
        return client

    def _until_ready(self) -> bool:
        """Wait until calls may be made, no longer than for an answer."""
        until_s = time.monotonic() + self._habits.patience_s
        while not (self._client.up and self._client.ready):
            if time.monotonic() > until_s:
                return False
            time.sleep(_LOOK_S / 4)
            self._client.pump()
        return True

    def _name(self) -> str:
        """The id of a new request: what it asks for may have been asked before, it has not."""
        self._named += 1
        return f"r{self._named}"

    def _chain(self, request: int) -> tuple[ChunkHash, list[ChunkHash]] | None:
        """(the root, the keys of a request); equal in every client of this layout."""
        self._client.pump()
        ready = self._client.ready
        if ready is None:
            return None
        family, shared = request // FAMILY, SHARED_CHUNKS * CHUNK_TOKENS
        own = CHAIN_CHUNKS * CHUNK_TOKENS - shared
        root = root_hash(Fingerprint(ready.fingerprint), salt_of(request))
        return root, extend_chain(root, [family] * shared + [request] * own, CHUNK_TOKENS)

    def _ask(
        self, make: Callable[[int], m.ClientMessage], then: str, *, even_away: bool = False
    ) -> m.ServerMessage | None:
        """Call, pass the point `then`, and wait; None: no answer, and what it grants goes back."""
        client = self._client
        client.begin_step()
        call = client.call(make, even_away=even_away)
        if call is None:
            return None
        self._point(then)
        until_s = time.monotonic() + self._habits.patience_s
        while not call.done and time.monotonic() < until_s:
            client.wait(call, _LOOK_S)
        self._row.add(Count.PENDING, bool(call.ticket))
        if not call.done:
            client.abandon(call)
            return None
        return call.reply

    def _point(self, name: str) -> None:
        """A step of the work; perhaps the last."""
        if name and name == self._orders.doom:
            self._passes -= 1
            if self._passes <= 0:
                os.kill(os.getpid(), signal.SIGKILL)


def _expect(answer: m.ServerMessage, kind: type[m.ServerMessage]) -> None:
    if not isinstance(answer, kind):
        raise OperationFailed(f"the answer is no {kind.__name__}: {answer}")


def _held(
    leases: tuple[int, ...], keys: Sequence[ChunkHash], columns: tuple[m.Columns, ...]
) -> Held:
    if not leases:
        return Held((), (), ())
    rows = tuple(
        (array("Q", c.slots), array("Q", c.offsets), array("Q", c.generations)) for c in columns
    )
    return Held(leases, tuple(keys[: len(rows[0][0])]), rows)
