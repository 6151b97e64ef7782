"""Decides persists: which resident chunks go to L2, when, and what happens when that fails.

A queue per backend, bounded in bytes over all; overflow drops the oldest and counts it. A queued
chunk may still be evicted (engines come first): that is counted as lost. While its bytes are being
read for L2 a chunk is held like any other reader's.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.core.sweeping import Walk
from kvkeep.types import ChunkHash, IoOutcome, Namespace, StorePolicy, TransferId, worst_of

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

_COLDEST = 32  # chunks looked at per pass of write_back
_PAUSE_S, _PAUSE_MOST_S = 0.5, 5.0  # after a failed try, doubling
_DROPPED_AT_ONCE = 64  # condemned jobs that one pass over a queue drops
_WALK_AT_ONCE = 64  # chunks that a drain takes from the index in one go


@dataclass(eq=False, slots=True)
class Job:
    """One chunk for one backend."""

    chunk: Chunk
    backend: int
    session: str
    request: str
    tries: int = 0
    doomed: bool = False  # forgotten meanwhile: what was written is to be deleted


class Persister:
    """Queues of jobs, and those whose I/O runs."""

    def __init__(self, directory: "Directory") -> None:
        self._d = directory
        limits = directory.limits
        self.queues: list[OrderedDict[ChunkHash, Job]] = [
            OrderedDict() for _ in range(limits.backends)
        ]
        self.running: dict[TransferId, Job] = {}
        self.queued_bytes = 0
        self._nowhere = 0  # resident chunks that no backend has
        self._walk = Walk(directory.residents.index)  # of a drain
        self._drained_at = 0  # where the drain's walk has seen everything
        self._written: set[tuple[ChunkHash, int]] = set()  # what `running` is about
        self._pauses = [0] * limits.backends  # failures in a row
        self._paused_until_s = [0.0] * limits.backends
        self._running_to = [0] * limits.backends
        self._last_id = 0
        self._again: list[ChunkHash] = []  # stored again while an older writing had to be undone

    # ---- what becomes a job

    def committed(self, chunk: Chunk, session: str, request: str) -> None:
        """An engine published this chunk."""
        self._nowhere += 1
        if self._d.limits.store_policy in (StorePolicy.WRITE_THROUGH, StorePolicy.SKIP_L1):
            self._enqueue(chunk, session, request)

    def stored_again(self, chunk: Chunk, session: str) -> None:
        """An engine had it once more: an earlier failure is made good."""
        if self._d.limits.store_policy is not StorePolicy.WRITE_BACK:
            self._enqueue(chunk, session, "")

    def drain(self, *, sliced: bool) -> None:
        """Everything L2 lacks is wanted there, whatever the policy: now, and without a bound.

        Sliced, `walk` queues it as there is room.
        """
        self._paused_until_s = [0.0] * len(self.queues)
        if not self.queues:
            return
        self._drained_at = self._walk.whole_round()
        while not sliced and self._draining:
            self._walk_on()

    def walk(self, budget: int) -> None:
        """Carry on with a sliced drain for about as long as `budget` looks at chunks take."""
        while budget > 0 and self.walks:
            budget -= self._walk_on()

    @property
    def walks(self) -> bool:
        """A drain has chunks to look at, and the queue is half empty."""
        return self._draining and not self._over(2)

    @property
    def _draining(self) -> bool:
        return self._walk.finished < self._drained_at

    def _walk_on(self) -> int:
        """Queue what L2 lacks of the next chunks; what that cost."""
        chunks = self._walk.take(_WALK_AT_ONCE)
        cost = 1 + len(chunks)
        for chunk in chunks:
            if chunk.linked and chunk.stored + 1 != 1 << len(self.queues):
                self._enqueue(chunk, "", "", bounded=False)
                cost += 5 * len(self.queues)
        return cost

    def missing(self) -> int:
        """Resident chunks that no backend has, whether or not something will bring them there."""
        return self._nowhere

    def _enqueue(self, chunk: Chunk, session: str, request: str, *, bounded: bool = True) -> None:
        if self._d.sweeper.condemned(chunk):
            return
        for backend, queue in enumerate(self.queues):
            if chunk.stored >> backend & 1 or self._waits(chunk.hash, backend):
                continue
            queue[chunk.hash] = Job(chunk, backend, session, request)
            self.queued_bytes += chunk.size_bytes
        while bounded and self._over():
            longest = max(self.queues, key=len)
            if len(longest) <= 1:
                break
            self._drop(longest.popitem(last=False)[1], "persist_overflow")

    def _over(self, part: int = 1) -> bool:
        """Whether more is queued than may be, or than the `part`-th part of it."""
        limits, chunks = self._d.limits, sum(map(len, self.queues))
        return (
            part * self.queued_bytes > limits.persist_queue_bytes
            or part * chunks > limits.persist_queue_chunks
        )

    def _drop(self, job: Job, counter: str) -> None:
        """A job that has left its queue ends without I/O."""
        self.queued_bytes -= job.chunk.size_bytes
        self._d.counters[counter] += 1
        if job.chunk.linked and self._d.residents.idle(job.chunk):
            self.settle(job.chunk)

    def _awaited(self, chunk_hash: ChunkHash) -> bool:
        """Whether it is queued, or being written, for some backend."""
        return any(self._waits(chunk_hash, backend) for backend in range(len(self.queues)))

    def _waits(self, chunk_hash: ChunkHash, backend: int) -> bool:
        return chunk_hash in self.queues[backend] or (chunk_hash, backend) in self._written

    # ---- running them

    @property
    def idle(self) -> bool:
        """Nothing is queued or to be queued, and no I/O runs."""
        return not (self.running or self._draining or any(self.queues))

    def pump(self, now_s: float) -> None:
        """Begin what may begin."""
        sweeper = self._d.sweeper
        for backend, queue in enumerate(self.queues):
            most = self._d.limits.persists_per_backend
            dropped = 0  # the rest of the condemned go in the next pass: one follows soon
            while queue and self._running_to[backend] < most and dropped < _DROPPED_AT_ONCE:
                if now_s < self._paused_until_s[backend]:
                    break
                _, job = queue.popitem(last=False)
                chunk = job.chunk
                if sweeper.condemned(chunk):
                    dropped += 1
                    forgotten = sweeper.forgotten(chunk)
                    self._drop(job, "persist_forgotten" if forgotten else "persist_lost")
                elif chunk.stored >> backend & 1:
                    self._drop(job, "persist_known")
                else:
                    self._begin(job)

    def _begin(self, job: Job) -> None:
        d, chunk = self._d, job.chunk
        self.queued_bytes -= chunk.size_bytes
        self._running_to[job.backend] += 1
        self._last_id += 1
        transfer = TransferId(self._last_id)
        self.running[transfer] = job
        self._written.add((chunk.hash, job.backend))
        d.slots.hold(chunk.rows)
        d.counters["persists"] += 1
        offsets = tuple([d.slots.offset[slot] for slot in chunk.rows])
        objects = d.objects[chunk.specs]
        d.effects.append(
            ev.Persist(
                transfer, job.backend, chunk.space, objects, chunk.hash, chunk.depth, offsets
            )
        )

    def persisted(self, event: ev.Persisted, now_s: float) -> ev.Done:
        """The I/O has returned: the chunk's bytes are nobody's business any more."""
        job = self.running.pop(event.transfer, None)
        if job is None:
            return ev.Done(0)
        d, chunk = self._d, job.chunk
        self._running_to[job.backend] -= 1
        self._written.discard((chunk.hash, job.backend))
        worst = worst_of(event.outcomes)
        d.counters[f"persisted_{worst.name.lower()}"] += 1
        if job.doomed:
            worst = IoOutcome.CANCELLED
            d.effects.append(ev.Discard(chunk.space, d.objects[chunk.specs], chunk.hash))
            self._again.append(chunk.hash)
        elif worst is IoOutcome.OK:
            self._nowhere -= chunk.linked and not chunk.stored
            chunk.stored |= 1 << job.backend
            self._pauses[job.backend] = 0
            d.counters["persisted_bytes"] += chunk.size_bytes
        if worst is IoOutcome.REFUSED:  # not even tried: a scan, or an open breaker
            self._paused_until_s[job.backend] = now_s + _PAUSE_S
        elif worst not in (IoOutcome.OK, IoOutcome.CANCELLED, IoOutcome.FULL):
            self._pause(job.backend, now_s)
        again = worst is not IoOutcome.OK and not job.doomed and chunk.linked
        if again and self._try_again(job, worst):
            queue = self.queues[job.backend]
            queue[chunk.hash] = job
            queue.move_to_end(chunk.hash, last=False)
            self.queued_bytes += chunk.size_bytes
        else:
            d.effects.append(ev.ChunkPersisted(job.session, job.request, job.backend, worst))
        self.release(chunk)
        return ev.Done(1)

    def _pause(self, backend: int, now_s: float) -> None:
        """A failing backend is given time; its breaker decides about the rest."""
        if now_s < self._paused_until_s[backend]:
            return  # of the same burst
        pause_s = min(_PAUSE_S * 2 ** self._pauses[backend], _PAUSE_MOST_S)
        self._paused_until_s[backend] = now_s + pause_s
        self._pauses[backend] = min(self._pauses[backend] + 1, 16)

    def _try_again(self, job: Job, outcome: IoOutcome) -> bool:
        """A backend that was not asked costs no try; one that is full is not asked again."""
        job.tries += outcome is not IoOutcome.REFUSED
        if job.tries < self._d.limits.persist_tries and outcome is not IoOutcome.FULL:
            return True
        self._d.counters["persist_failed"] += 1
        return False

    def release(self, chunk: Chunk) -> None:
        """One reader of all its rows less."""
        idle = False
        for slot in chunk.rows:
            idle |= self._d.slots.unhold(slot)
        if idle:
            self.settle(chunk)

    def settle(self, chunk: Chunk) -> None:
        """A reader left. Under skip_l1 a chunk that L2 has leaves L1 with its last reader."""
        residents = self._d.residents
        skips = self._d.limits.store_policy is StorePolicy.SKIP_L1 and chunk.linked and chunk.stored
        if skips and not self._awaited(chunk.hash) and residents.idle(chunk):
            residents.evict(chunk)
        elif chunk.children == 0 or not chunk.linked:
            residents.settle(chunk)

    # ---- other occasions

    def tick(self, now_s: float) -> None:
        """Under write_back: what would be evicted next is written before room is needed."""
        limits, arena = self._d.limits, self._d.arena
        if limits.store_policy is StorePolicy.WRITE_BACK and limits.backends:
            low = arena.free_bytes < limits.low_water_fraction * arena.populated_bytes
            residents = self._d.residents
            looked_at: set[Chunk] = set()
            for leaf in residents.policy.coldest(_COLDEST, residents) if low else ():
                chunk: Chunk | None = leaf
                while chunk is not None and chunk not in looked_at:  # its ancestors are next
                    looked_at.add(chunk)
                    self._enqueue(chunk, "", "")
                    chunk = residents.index.get(chunk.parent)
        again, self._again = self._again, []  # what had to be undone is gone by now
        for chunk_hash in again:
            resident = self._d.residents.index.get(chunk_hash)
            if resident is not None:
                self.stored_again(resident, "")
        self.pump(now_s)

    def doom(self, chunk_hash: ChunkHash) -> None:
        """What is being written of this chunk is not to stay in L2."""
        for job in self.running.values():
            job.doomed |= job.chunk.hash == chunk_hash

    def forget(self, space: Namespace) -> None:
        """What is being written of this layout is not to stay in L2; the queued is condemned."""
        for job in self.running.values():
            job.doomed |= job.chunk.space.fingerprint == space.fingerprint

    def lost(self, chunk: Chunk) -> None:
        """A chunk is being evicted: counted when no backend has it although it should."""
        writes_back = self._d.limits.store_policy is StorePolicy.WRITE_BACK
        if writes_back and not chunk.stored and not self._awaited(chunk.hash):
            self._d.counters["persist_lost"] += 1
        self.left(chunk)

    def left(self, chunk: Chunk, *, forgotten: bool = False) -> None:
        """A chunk is not in L1 any more: nothing of it can be written that has not begun."""
        self._nowhere -= not chunk.stored
        for queue in self.queues:
            job = queue.pop(chunk.hash, None)
            if job is not None:
                self.queued_bytes -= chunk.size_bytes
                self._d.counters["persist_forgotten" if forgotten else "persist_lost"] += 1
