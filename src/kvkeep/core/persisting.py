"""Decides persists: which resident chunks go to L2, when, and what happens when that fails.

A queue per backend, bounded in bytes over all; overflow drops the oldest and counts it. A queued
chunk may still be evicted (engines come first): that is counted as lost. While its bytes are being
read for L2 a chunk is held like any other reader's.
"""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.core import events as ev
from kvkeep.core.eviction import Chunk
from kvkeep.types import ChunkHash, IoOutcome, Namespace, StorePolicy, TransferId, worst_of

if TYPE_CHECKING:
    from kvkeep.core.directory import Directory

_COLDEST = 32  # chunks looked at per pass of write_back
_PAUSE_S, _PAUSE_MOST_S = 0.5, 5.0  # after a failed try, doubling


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
        self.queues: list[deque[Job]] = [deque() for _ in range(limits.backends)]
        self.running: dict[TransferId, Job] = {}
        self.queued_bytes = 0
        self._waiting: set[tuple[ChunkHash, int]] = set()  # queued or running
        self._pauses = [0] * limits.backends  # failures in a row
        self._paused_until_s = [0.0] * limits.backends
        self._running_to = [0] * limits.backends
        self._last_id = 0
        self._again: list[ChunkHash] = []  # stored again while an older writing had to be undone

    # ---- what becomes a job

    def committed(self, chunk: Chunk, session: str, request: str) -> None:
        """An engine published this chunk."""
        if self._d.limits.store_policy in (StorePolicy.WRITE_THROUGH, StorePolicy.SKIP_L1):
            self._enqueue(chunk, session, request)

    def stored_again(self, chunk: Chunk, session: str) -> None:
        """An engine had it once more: an earlier failure is made good."""
        if self._d.limits.store_policy is not StorePolicy.WRITE_BACK:
            self._enqueue(chunk, session, "")

    def drain(self) -> None:
        """Everything L2 lacks is wanted there, whatever the policy: now, and without a bound."""
        for chunk in self._d.residents.index.values():
            self._enqueue(chunk, "", "", bounded=False)
        self._paused_until_s = [0.0] * len(self.queues)

    def missing(self) -> int:
        """Resident chunks that no backend has and nothing will bring there. O(chunks)."""
        index = self._d.residents.index
        return sum(not c.stored and not self._awaited(c.hash) for c in index.values())

    def _enqueue(self, chunk: Chunk, session: str, request: str, *, bounded: bool = True) -> None:
        for backend, queue in enumerate(self.queues):
            key = chunk.hash, backend
            if chunk.stored >> backend & 1 or key in self._waiting:
                continue
            self._waiting.add(key)
            queue.append(Job(chunk, backend, session, request))
            self.queued_bytes += chunk.size_bytes
        while bounded and self.queued_bytes > self._d.limits.persist_queue_bytes:
            longest = max(self.queues, key=len)
            if len(longest) <= 1:
                break
            self._drop(longest.popleft(), "persist_overflow")

    def _drop(self, job: Job, counter: str) -> None:
        """A job that has left its queue ends without I/O."""
        self.queued_bytes -= job.chunk.size_bytes
        self._waiting.discard((job.chunk.hash, job.backend))
        self._d.counters[counter] += 1
        if job.chunk.linked and self._d.residents.idle(job.chunk):
            self.settle(job.chunk)

    def _awaited(self, chunk_hash: ChunkHash) -> bool:
        """Whether it is queued, or being written, for some backend."""
        return any((chunk_hash, backend) in self._waiting for backend in range(len(self.queues)))

    # ---- running them

    @property
    def idle(self) -> bool:
        """Nothing is queued and no I/O runs."""
        return not self._waiting

    def pump(self, now_s: float) -> None:
        """Begin what may begin."""
        for backend, queue in enumerate(self.queues):
            most = self._d.limits.persists_per_backend
            while queue and self._running_to[backend] < most:
                if now_s < self._paused_until_s[backend]:
                    break
                job = queue.popleft()
                chunk = job.chunk
                if not chunk.linked:
                    self._drop(job, "persist_lost")
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
        worst = worst_of(event.outcomes)
        d.counters[f"persisted_{worst.name.lower()}"] += 1
        if job.doomed:
            worst = IoOutcome.CANCELLED
            d.effects.append(ev.Discard(chunk.space, d.objects[chunk.specs], chunk.hash))
            self._again.append(chunk.hash)
        elif worst is IoOutcome.OK:
            chunk.stored |= 1 << job.backend
            self._pauses[job.backend] = 0
            d.counters["persisted_bytes"] += chunk.size_bytes
        if worst is IoOutcome.REFUSED:  # not even tried: a scan, or an open breaker
            self._paused_until_s[job.backend] = now_s + _PAUSE_S
        elif worst not in (IoOutcome.OK, IoOutcome.CANCELLED, IoOutcome.FULL):
            self._pause(job.backend, now_s)
        again = worst is not IoOutcome.OK and not job.doomed and chunk.linked
        if again and self._try_again(job, worst):
            self.queues[job.backend].appendleft(job)
            self.queued_bytes += chunk.size_bytes
        else:
            self._waiting.discard((chunk.hash, job.backend))
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
        """Nothing of this fingerprint is to be found in L2."""
        for queue in self.queues:
            for job in [j for j in queue if j.chunk.space.fingerprint == space.fingerprint]:
                queue.remove(job)
                self._drop(job, "persist_forgotten")
        for job in self.running.values():
            job.doomed |= job.chunk.space.fingerprint == space.fingerprint

    def lost(self, chunk: Chunk) -> None:
        """A chunk is evicted: counted when no backend has it although it should."""
        writes_back = self._d.limits.store_policy is StorePolicy.WRITE_BACK
        if writes_back and not chunk.stored and not self._awaited(chunk.hash):
            self._d.counters["persist_lost"] += 1
