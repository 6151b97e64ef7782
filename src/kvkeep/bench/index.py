"""`kvkeep bench index`: what a resident chunk costs the core, and whether calls stay short.

The real `Directory` in this process, without sockets or bytes: one session with one row, objects of
a page. Prompts of 128 chunks are staged, committed and looked up until every page is taken, then
more are stored, so that each evicts. Memory is the growth of the resident set, everything included:
index, slots, generation words, arena, queue of candidates, hashes. Calls are timed on the CPU clock
of their thread, since others may take the machine away from a call. The garbage collector is off,
as in the server, which collects between calls.
"""

import gc
import mmap
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvkeep.bench.session import BenchFailed
from kvkeep.core import events as ev
from kvkeep.core.directory import Directory, Limits
from kvkeep.types import (
    HASH_BYTES,
    ChunkHash,
    EndOutcome,
    Fingerprint,
    GroupKind,
    LeaseId,
    PeerId,
    Role,
    RowSpec,
)

CHUNKS = 1_000_000
FEW = 1_000  # what a lookup among many is compared with
CHAIN = 128  # chunks of a prompt
STEP = 32  # of them stored in one call: 8,192 tokens of 256, a large step of an engine
PAGE_BYTES = 4096
LOOKUPS = 2_000
EVICTIONS = 200  # prompts stored when everything is taken
_ROOT = ChunkHash(bytes(HASH_BYTES))
_NO_CAPS = Limits(staging_fraction=1.0, session_staging_fraction=1.0, session_reserve_fraction=1.0)

Say = Callable[[str], None]


@dataclass(slots=True)
class _Calls:
    """CPU seconds of every call of one kind."""

    seconds: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def longest_ms(self) -> float:
        return 1e3 * max(self.seconds)

    @property
    def median_us(self) -> float:
        return 1e6 * statistics.median(self.seconds)


class _Filled:
    """A directory whose arena holds exactly `chunks`, and the time its calls took."""

    def __init__(self, chunks: int) -> None:
        self.chunks = chunks
        self.calls = {name: _Calls() for name in ("stage", "commit", "lookup", "evict", "end")}
        ids = count(1)
        words = memoryview(mmap.mmap(-1, 8 * chunks)).cast("Q")
        self.directory = Directory(words, lambda: next(ids), limits=_NO_CAPS)
        row = RowSpec(0, GroupKind.FULL_ATTENTION, PAGE_BYTES)
        mark = Fingerprint(bytes(HASH_BYTES))
        self._do(ev.Join("bench", PeerId(1), Role.BOTH, 0, 1, (row,), mark))
        self._do(ev.Grown(chunks * PAGE_BYTES))

    def store(self, prompt: int, chunks: int = CHAIN, *, evicts: bool = False) -> None:
        """Stage and commit one prompt."""
        hashes, parent = _hashes(prompt, chunks), _ROOT
        for first in range(0, chunks, STEP):
            part = hashes[first * HASH_BYTES : (first + STEP) * HASH_BYTES]
            item = ev.StageItem("r", parent, part, None, first)
            staged = self._do(ev.Stage("bench", (item,)), "evict" if evicts else "stage")
            assert isinstance(staged, ev.Staged)
            if len(staged.leases) < len(part) // HASH_BYTES:
                raise BenchFailed(f"prompt {prompt}: not all of its {chunks} chunks were staged")
            self._do(ev.Commit("bench", staged.leases), "commit")
            parent = ChunkHash(part[-HASH_BYTES:])

    def fill(self, say: Say) -> None:
        """Store prompts until no page is free."""
        for first in range(0, self.chunks, CHAIN):
            self.store(first // CHAIN, min(CHAIN, self.chunks - first))
            if first % (CHAIN << 6) == 0:
                say(f"{first:,} of {self.chunks:,} chunks stored")

    def look_up(self, lookups: int) -> None:
        """Look up prompts at random, each whole, and give them back."""
        prompts = self.chunks // CHAIN
        choose = random.Random(1)
        for _ in range(lookups):
            packed = _hashes(choose.randrange(prompts), CHAIN)
            hit = self._do(ev.Lookup("bench", "r", packed), "lookup")
            assert isinstance(hit, ev.Hit)
            if hit.chunks != CHAIN:
                raise BenchFailed(f"a prompt that was stored has {hit.chunks} of {CHAIN} chunks")
            self._do(ev.End("bench", LeaseId(hit.lease), (0,), EndOutcome.USED), "end")

    def evict(self, prompts: int) -> None:
        """Store prompts for which others have to go."""
        first = -(-self.chunks // CHAIN)
        for prompt in range(first, first + prompts):
            self.store(prompt, evicts=True)
        if not self.directory.residents.evicted_chunks:
            raise BenchFailed("nothing was evicted although every page was taken")

    def _do(self, event: ev.Event, name: str = "") -> ev.Reply:
        handle = self.directory.handle
        started_s = time.thread_time()
        reply, _ = handle(event, 0.0)
        if name:
            self.calls[name].seconds.append(time.thread_time() - started_s)
        return reply


def run(chunks: int, say: Say) -> dict[str, Any]:
    """The report that `--json` prints."""
    collects = gc.isenabled()
    gc.disable()
    try:
        few = _Filled(min(FEW, chunks))  # also warms everything that is not an entry
        few.fill(say)
        few.look_up(LOOKUPS)
        few.evict(1)
        gc.collect()
        before_bytes = _resident_bytes()
        many = _Filled(chunks)
        many.fill(say)
        per_entry = (_resident_bytes() - before_bytes) / chunks
        say("looking up")
        many.look_up(LOOKUPS)
        say("evicting")
        many.evict(min(EVICTIONS, chunks // CHAIN))
    finally:
        if collects:
            gc.enable()
    return _report(few, many, per_entry)


def _report(few: _Filled, many: _Filled, per_entry: float) -> dict[str, Any]:
    medians = {str(one.chunks): one.calls["lookup"].median_us for one in (few, many)}
    longest = {name: round(calls.longest_ms, 3) for name, calls in many.calls.items()}
    return {
        "chunks": many.chunks,
        "bytes_per_entry": round(per_entry, 1),
        "lookup_128_us": {name: round(us, 1) for name, us in medians.items()},
        "lookup_ratio": round(many.calls["lookup"].median_us / few.calls["lookup"].median_us, 2),
        "longest_call_ms": longest,
    }


def _hashes(prompt: int, chunks: int) -> bytes:
    """Keys of one prompt: any bytes do, the same ones for the same prompt."""
    return random.Random(prompt).randbytes(HASH_BYTES * chunks)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
