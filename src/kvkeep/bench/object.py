"""`kvkeep bench object`: moves KV between a block pool and the arena of a real server; looks up.

Client and server are two processes, and one thread copies. Per round and shape: memcpy of the same
bytes, store (stage, gather, commit), memcpy again, retrieve (scatter, check generations, release);
then every byte is compared, outside the timing. Rounds use fresh keys, and other blocks per chunk,
so that bytes left from an earlier round would be found. Reported are medians.
"""

import gc
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvkeep.bench.serving import started_server
from kvkeep.bench.session import BenchFailed, Handles, Session
from kvkeep.bench.shapes import CHUNK_TOKENS, SHAPES, Shape
from kvkeep.core.keys import extend_chain
from kvkeep.types import ChunkHash
from kvkeep.wire import messages as m

if TYPE_CHECKING:
    from kvkeep.bench.pool import Pool

LOOKUP_CHUNKS = (1, 16, 128)
LOOKUP_SAMPLES = 1_000
LOOKUP_CHUNK_BYTES = 64 << 10  # a lookup moves no KV: small objects, so that L1 stays small
_HASH_ROUNDS = 30
_WARM_ROUNDS = 2
_MIB = 1 << 20
_TOKEN_IDS = 50_000

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. Without `socket` the bench starts a server of its own."""

    tokens: int = 4_096
    rounds: int = 11
    shapes: tuple[str, ...] = tuple(SHAPES)
    socket: str | None = None
    seed: int = 1
    lookup_samples: int = LOOKUP_SAMPLES

    @property
    def chunks(self) -> int:
        """Whole chunks of the request."""
        return self.tokens // CHUNK_TOKENS


@dataclass(slots=True)
class _Times:
    """Seconds of every round; `*_copy` is the part of the whole that moves bytes."""

    memcpy: list[float] = field(default_factory=list)
    store: list[float] = field(default_factory=list)
    store_copy: list[float] = field(default_factory=list)
    retrieve: list[float] = field(default_factory=list)
    retrieve_copy: list[float] = field(default_factory=list)


def run_object_bench(plan: Plan, say: Say) -> dict[str, Any]:
    """Measure and return the report of `bench object --json`. Raises KVKeepError."""
    if importlib.util.find_spec("torch") is None:
        raise BenchFailed(
            "bench object copies KV with torch, which is not installed: python -m pip install torch"
        )
    if plan.chunks < 1:
        raise BenchFailed(f"a request of {plan.tokens} tokens has no whole chunk: {CHUNK_TOKENS}")
    with _no_gc(), _server(plan) as path:
        shapes = [
            _measure_shape(path, SHAPES[name], plan, say, scattered=scattered)
            for name in plan.shapes
            for scattered in (True, False)
        ]
        return {"shapes": shapes, "lookup": list(_measure_lookups(path, plan, say))}


@contextmanager
def _server(plan: Plan) -> Iterator[str]:
    if plan.socket is not None:
        with nullcontext(plan.socket) as path:
            yield path
        return
    largest = max(SHAPES[name].chunk_bytes for name in plan.shapes)
    # Two requests: a dropped chunk frees its extent before the next round, one more to be safe.
    l1_bytes = 2 * plan.chunks * largest + LOOKUP_CHUNK_BYTES * max(LOOKUP_CHUNKS) + 64 * _MIB
    settings = {
        "l1.size": f"{-(-l1_bytes // _MIB)}MiB",
        "l1.staging_fraction": 1,
        "l1.session_staging_fraction": 1,
        "l1.session_reserve_fraction": 1,
    }
    with started_server(settings) as path:
        yield path


# ---- bytes


def _measure_shape(
    path: str, shape: Shape, plan: Plan, say: Say, *, scattered: bool
) -> dict[str, Any]:
    from kvkeep.bench.pool import Pool

    name = shape.name if scattered else f"{shape.name} contiguous"
    say(f"{name}: preparing")
    pool = Pool(shape, plan.chunks, scattered=scattered, seed=plan.seed)
    times = _Times()
    verified = True
    with Session(path, name, shape.chunk_bytes) as session:
        for number in range(_WARM_ROUNDS + plan.rounds):
            pool.shuffle()
            into = times if number >= _WARM_ROUNDS else _Times()
            hashes = _store(session, pool, f"{name} {plan.seed} {number}", into)
            _retrieve(session, pool, hashes, into)
            verified = pool.equal() and verified
            session.forget()
            say(f"{name}: round {number + 1} of {_WARM_ROUNDS + plan.rounds}")
    return {"name": name, "bytes": pool.bytes, **_rates(pool.bytes, times), "verified": verified}


def _store(session: Session, pool: "Pool", salt: str, times: _Times) -> list[ChunkHash]:
    root = session.root(salt)
    hashes = _chain(root, len(pool.source))
    packed, blocks = b"".join(hashes), pool.source
    times.memcpy.append(pool.memcpy_s())
    with session.mapping.use() as mapping:
        started = time.perf_counter()
        leases, handles = session.stage(root, packed)
        jobs = [(mapping.address + o, ids) for o, ids in zip(handles.offsets, blocks, strict=True)]
        staged = time.perf_counter()
        pool.device.gather(jobs)
        pool.device.synchronize()
        copied = time.perf_counter()
        session.commit(leases)
        times.store.append(time.perf_counter() - started)
        times.store_copy.append(copied - staged)
    return hashes


def _retrieve(session: Session, pool: "Pool", hashes: Sequence[ChunkHash], times: _Times) -> None:
    handles, blocks = session.lookup(b"".join(hashes)), pool.target
    times.memcpy.append(pool.memcpy_s())
    with session.mapping.use() as mapping:
        started = time.perf_counter()
        jobs = [(mapping.address + o, ids) for o, ids in zip(handles.offsets, blocks, strict=True)]
        before = _is_current(session, handles)
        copying = time.perf_counter()
        pool.device.scatter(jobs)
        pool.device.synchronize()
        copied = time.perf_counter()
        after = _is_current(session, handles)
        session.release(handles.lease)
        times.retrieve.append(time.perf_counter() - started)
        times.retrieve_copy.append(copied - copying)
    if not (before and after):
        raise BenchFailed("an extent changed while it was reserved for reading")


def _is_current(session: Session, handles: Handles) -> bool:
    generation = session.mapping.generation
    return all(
        generation(slot) == wanted
        for slot, wanted in zip(handles.slots, handles.generations, strict=True)
    )


def _rates(moved_bytes: int, times: _Times) -> dict[str, float]:
    def gbps(seconds: list[float]) -> float:
        return moved_bytes / statistics.median(seconds) / 1e9

    copy_s = statistics.median(times.store_copy)
    memcpy, store, retrieve = gbps(times.memcpy), gbps(times.store), gbps(times.retrieve)
    return {
        "memcpy_gbps": round(memcpy, 3),
        "store_gbps": round(store, 3),
        "retrieve_gbps": round(retrieve, 3),
        "store_over_memcpy": round(store / memcpy, 3),
        "retrieve_over_memcpy": round(retrieve / memcpy, 3),
        "store_copy_gbps": round(gbps(times.store_copy), 3),
        "retrieve_copy_gbps": round(gbps(times.retrieve_copy), 3),
        "store_calls_ms": round(1e3 * (statistics.median(times.store) - copy_s), 3),
    }


# ---- lookups


def _measure_lookups(path: str, plan: Plan, say: Say) -> Iterator[dict[str, Any]]:
    with Session(path, "lookup", LOOKUP_CHUNK_BYTES) as session:
        most = max(LOOKUP_CHUNKS)
        root = session.root(f"lookup {plan.seed}")
        hashes = _chain(root, most)
        leases, _ = session.stage(root, b"".join(hashes))
        session.commit(leases)
        for chunks in LOOKUP_CHUNKS:
            say(f"lookup of {chunks} chunks")
            yield _measure_lookup(session, b"".join(hashes[:chunks]), plan.lookup_samples)
        session.forget()


def _measure_lookup(session: Session, hashes: bytes, samples: int) -> dict[str, Any]:
    lookups: list[float] = []
    pings: list[float] = []
    for _ in range(samples):
        started = time.perf_counter()
        session.ask(m.Pong, lambda seq: m.Ping(seq))
        pings.append(time.perf_counter() - started)
        started = time.perf_counter()
        handles = session.lookup(hashes)
        lookups.append(time.perf_counter() - started)
        session.release(handles.lease)
    chunks = len(hashes) // 32
    return {
        "chunks": chunks,
        "p50_us": _percentile_us(lookups, 50),
        "p99_us": _percentile_us(lookups, 99),
        "socket_rtt_us": _percentile_us(pings, 50),
        "hash_us": _hash_us(session, chunks),
    }


def _hash_us(session: Session, chunks: int) -> float:
    """Naming these chunks from their tokens; no part of a lookup, which starts with hashes."""
    root, tokens = session.root("hash"), _tokens(chunks)
    took: list[float] = []
    for _ in range(_HASH_ROUNDS):
        started = time.perf_counter()
        extend_chain(root, tokens, CHUNK_TOKENS)
        took.append(time.perf_counter() - started)
    return _percentile_us(took, 50)


def _percentile_us(seconds: list[float], percent: int) -> float:
    """The nearest-rank percentile in microseconds."""
    rank = -(-len(seconds) * percent // 100)
    return round(sorted(seconds)[max(0, rank - 1)] * 1e6, 1)


def _chain(root: ChunkHash, chunks: int) -> list[ChunkHash]:
    return extend_chain(root, _tokens(chunks), CHUNK_TOKENS)


def _tokens(chunks: int) -> list[int]:
    return random.Random(0).choices(range(_TOKEN_IDS), k=chunks * CHUNK_TOKENS)


@contextmanager
def _no_gc() -> Iterator[None]:
    """Keep the collector out of the measurements, as `timeit` does."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
