"""Chooses what one seed's L2 is like: its deadlines, its size, and how its calls go wrong."""

import random
from dataclasses import dataclass

from kvkeep.backends.guarded import GuardSettings
from kvkeep.testing.faulty_backend import HANGS, Kind


@dataclass(slots=True)
class L2Knobs:
    """What one seed's L2 is like."""

    guard: GuardSettings
    share: float  # of calls that fail
    kinds: frozenset[Kind]
    most_stuck: int  # calls that never return, per disk
    later: bool  # whether `contains` needs time
    latency_s: float  # the most that a call takes when nothing is wrong
    capacity_bytes: int | None


def drawn(rng: random.Random) -> L2Knobs:
    """The knobs of one seed."""
    guard = GuardSettings(
        get_timeout_s=rng.choice((0.05, 0.3)),
        put_timeout_s=rng.choice((0.1, 0.5)),
        lookup_timeout_s=rng.choice((0.03, 0.2)),
        breaker_failures=rng.choice((2, 5)),
        breaker_open_s=rng.choice((0.1, 0.5)),
        breaker_open_most_s=1.0,
    )
    kinds = {kind for kind in Kind if rng.random() < 0.5} - HANGS
    most_stuck = rng.choice((0, 0, 2, 8))
    if most_stuck:
        kinds.add(Kind.NEVER)
    return L2Knobs(
        guard=guard,
        share=rng.choice((0.0, 0.05, 0.2, 0.4)),
        kinds=frozenset(kinds),
        most_stuck=most_stuck,
        later=rng.random() < 0.4,
        latency_s=rng.choice((0.0, 0.002, 0.02)),
        capacity_bytes=rng.choice((None, None, 40 * 8192)),
    )
