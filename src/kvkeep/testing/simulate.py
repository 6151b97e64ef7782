"""Runs the simulation: per seed a safety phase with faults, then a liveness phase where all drains.

The real core, service and wire run on virtual time with engines that move real bytes. The same seed
gives the same digest in any process. What later parts simulate plugs in as faults and engines.
"""

import asyncio
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvkeep.backends.breaker import State
from kvkeep.core import audit
from kvkeep.testing import faults, sim_coverage, virtual_loop
from kvkeep.testing.filler import fill
from kvkeep.testing.world import World
from kvkeep.types import Namespace, SlotState

DEFAULT_STEPS = 1000  # core events of one seed's safety phase
_SAFETY_S = 120.0  # a safety phase ends at the latest then, in virtual time
_SETTLE_S = 60.0  # and a calm world must have settled within this
_LOOK_S = 0.05
_MOVES = ("get", "put")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed showed."""

    events: int
    coverage: Counter[tuple[SlotState, str]]
    copies: Counter[str]
    faults: Counter[str]
    digest: bytes
    what: str  # "" when nothing was wrong


def run(
    seeds: int,
    first_seed: int = 0,
    steps: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    jobs: int = 1,
) -> dict[str, Any]:
    """Simulate `seeds` seeds; the answer of `kvkeep simulate --json`.

    With more `jobs` in so many processes; the report is the same.
    """
    failures: list[dict[str, Any]] = []
    coverage: Counter[tuple[SlotState, str]] = Counter()
    copies: Counter[str] = Counter()
    struck: Counter[str] = Counter()
    digest, events = blake3(), 0
    chosen = range(first_seed, first_seed + seeds)
    for done, (seed, outcome) in enumerate(_outcomes(chosen, steps, jobs), start=1):
        if outcome.what:
            failures.append({"seed": seed, "step": outcome.events, "what": outcome.what})
        coverage += outcome.coverage
        copies += outcome.copies
        struck += outcome.faults
        events += outcome.events
        digest.update(outcome.digest)
        if progress is not None:
            progress(done, seeds)
    report: dict[str, Any] = {
        "seeds": seeds,
        "failures": failures,
        "events": events,
        "coverage": sim_coverage.pair_table(coverage),
        "faults": sim_coverage.fault_table(struck),
        "copies": dict(sorted(copies.items())),
        "digest": digest.hexdigest(),
    }
    report["impossible"] = sim_coverage.IMPOSSIBLE
    report["never"] = sim_coverage.never(report)
    return report


def _outcomes(seeds: range, steps: int | None, jobs: int) -> Iterator[tuple[int, Outcome]]:
    """Each seed with its outcome, in order."""
    if jobs == 1:
        yield from ((seed, run_seed(seed, steps)) for seed in seeds)
        return
    with get_context("spawn").Pool(jobs, _leave_interrupts_to_the_parent) as pool:
        yield from zip(seeds, pool.imap(partial(run_seed, steps=steps), seeds), strict=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_seed(seed: int, steps: int | None = None) -> Outcome:
    """One seed, from an empty server to a drained one."""
    return virtual_loop.run(_seed(seed, steps))


async def _seed(seed: int, steps: int | None) -> Outcome:
    world = World(seed, asyncio.get_running_loop())
    story = asyncio.create_task(_story(world, steps or DEFAULT_STEPS))
    story.add_done_callback(world.story_ended)
    error = await world.over
    story.cancel()
    what = _said(error, world, seed, steps) if error is not None else ""
    struck = sim_coverage.of_faults(world)
    return Outcome(world.events, world.coverage, world.copies, struck, world.digest(), what)


async def _story(world: World, steps: int) -> None:
    """Safety, then liveness."""
    world.may_leave = True
    world.start(faults.drawn(world.rng))
    while world.events < steps and world.loop.time() < _SAFETY_S:
        await asyncio.sleep(_LOOK_S)
    world.may_leave = False
    world.calm()
    await _until(world, lambda: _nothing_leased(world), "idle engines hold leases")
    world.may_leave = True
    await _until(world, lambda: all(place.done() for place in world.places), "engines do not end")
    await _until(world, lambda: _only_stuck(world), "L2 holds more than what hangs")
    for disk in world.disks:
        disk.backend.unstick()
    await _until(world, lambda: _nothing_held(world), "bytes are held for nobody")
    _forgotten_is_gone(world)
    audit.check(world.host.directory)
    await fill(world)


async def _until(world: World, holds: Callable[[], bool], otherwise: str) -> None:
    deadline_s = world.loop.time() + _SETTLE_S
    while not holds():
        if world.loop.time() > deadline_s:
            raise AssertionError(f"after {_SETTLE_S:.0f} calm seconds {otherwise}")
        await asyncio.sleep(_LOOK_S)


def _nothing_leased(world: World) -> bool:
    """Every engine is idle, and the server agrees that it holds nothing.

    Not so for a session that cannot recompute: nothing ends its reads but itself or its death, and
    a lease whose answer was lost with its connection is unknown to it.
    """
    if world.host.service is None or not all(e.idle for e in world.engines.values()):
        return False
    sessions = world.host.directory.sessions.values()
    return not any((s.recompute and s.reads_open) or s.writes_open for s in sessions)


def _only_stuck(world: World) -> bool:
    """What L2 still holds in L1 is exactly what calls touch that never returned."""
    directory, mounts = world.host.directory, world.host.mounts
    fetching = sorted(fetch.hash for fetch in directory.fetcher.flights.fetches.values())
    writing = sorted(job.chunk.hash for job in directory.persister.running.values())
    hanging = sum(disk.backend.hanging for disk in world.disks)
    return (
        not directory.fetcher.tickets
        and fetching == sorted(h for mount in mounts for h in mount.chunks_under_way("get"))
        and writing == sorted(h for mount in mounts for h in mount.chunks_under_way("put"))
        and len(fetching) + len(writing) <= hanging
    )


def _forgotten_is_gone(world: World) -> None:
    """No L2 that did every deletion has what was stored before this epoch's last Forget."""
    io = world.host.io
    for disk, store in zip(world.disks, io.stores if io is not None else (), strict=True):
        deletions = store.status()["operations"].get("delete", {"outcomes": {"ok": 0}})
        if set(deletions["outcomes"]) - {"ok"}:
            continue
        for fingerprint, when_s in world.host.directory.model.l2.forgotten_s.items():
            left = disk.stored_before(Namespace(fingerprint), when_s)
            assert not left, f"{len(left)} objects are left of what was forgotten"


def _l2_is_quiet(world: World) -> bool:
    """Nothing is under way or queued, every breaker is closed."""
    directory, io = world.host.directory, world.host.io
    stores = io.stores if io is not None else []
    return (
        not directory.fetcher.tickets
        and not directory.fetcher.flights.fetches
        and directory.persister.idle
        and not any(mount.chunks_under_way(what) for mount in world.host.mounts for what in _MOVES)
        and all(store.health().state is State.CLOSED for store in stores)
        and not (io is not None and io._unforgotten)
    )


def _nothing_held(world: World) -> bool:
    """No session, no peer but the operator's, no byte that is not free or resident."""
    slots, directory = world.host.directory.slots, world.host.directory
    waiting = (SlotState.STAGING, SlotState.ORPHANED, SlotState.QUARANTINED)
    return (
        directory.arena.populated_bytes == len(world.host.memory.arena)
        and not any(slots.bytes_in[state] for state in waiting)
        and not slots.reserved_bytes
        and not directory.sessions
        and not any(peer.session for peer in directory.peers.values())
        and not directory.residents.unlinked
        and _l2_is_quiet(world)
    )


def _said(error: BaseException, world: World, seed: int, steps: int | None) -> str:
    """The error, where it was raised, what came before, and the line that shows it again."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    more = f" --steps {steps}" if steps is not None else ""
    return (
        f"{type(error).__name__}: {error}{place} (events: {', '.join(world.recent)}); "
        f"again: kvkeep simulate --first-seed {seed} --seeds 1{more}"
    )
