"""Chooses what one seed is like: sizes, speeds, habits of its engines (a swarm, not an average).

Each seed switches on a random part of the habits, so that rare combinations are not drowned by all
faults happening all the time. `calm` ends them for the liveness phase.
"""

import random
from dataclasses import dataclass
from fractions import Fraction

from kvkeep.core.directory import Limits
from kvkeep.core.quota import EVERYTHING
from kvkeep.testing import sim_l2_knobs
from kvkeep.testing.layouts import some_layouts
from kvkeep.testing.network import Conditions
from kvkeep.testing.sim_l2_knobs import L2Knobs
from kvkeep.types import RowSpec, StorePolicy

PAGE_BYTES = 4096


@dataclass(slots=True)
class Knobs:
    """Probabilities are per occasion; times are the most that something lasts."""

    arena_pages: int
    slots: int
    limits: Limits
    network: Conditions
    engines: int
    layouts: list[tuple[RowSpec, ...]]  # the models that are served
    step_s: float  # an engine step
    stall: float  # a step that takes very long: a big batch, a stopped scheduler
    copy_s: float  # one piece of a copy
    patience_s: float  # then a call is abandoned
    abort: float  # a request is cancelled
    load_fails: float  # the device refuses a load
    end_twice: float
    unconfirmed: float  # an abort that does not say that the copies have ended
    far: float  # a lookup long before the request is scheduled
    sync_loads: float  # the chunks after a load are staged in the step that loads
    dma: float
    read_only: float
    trusting: float  # an engine that cannot recompute: its reads are never revoked
    same_session: float  # an engine comes back under its old name
    keeps_mapping_s: float  # how long a process that lost its server waits before it comes back
    l2: L2Knobs
    no_fetch: float  # a lookup that does not want L2
    waits_ms: tuple[float, ...]  # how long lookups say that they may wait for L2
    give_up: float  # a pending lookup that nobody waits for any more
    forget: float  # per step
    salted: float  # prompts of a tenant of its own

    def calm(self) -> None:
        """No faults and no odd habits any more."""
        self.abort = self.load_fails = self.end_twice = self.unconfirmed = self.stall = 0.0
        self.give_up = self.forget = 0.0
        self.network.delay_s, self.network.cut = 0.001, 0.1
        self.patience_s, self.keeps_mapping_s = 5.0, 0.05


def drawn(rng: random.Random) -> Knobs:
    """The knobs of one seed."""

    def habit(most: float) -> float:
        return (0.2 + 0.8 * rng.random()) * most if rng.random() < 0.6 else 0.0

    pages = rng.choice((64, 96, 128))
    limits = Limits(
        staging_fraction=rng.choice((0.5, 0.8)),
        session_staging_fraction=rng.choice((0.25, 0.5, 1.0)),
        session_reserve_fraction=rng.choice((0.25, 0.5, 0.9)),
        in_progress_after_s=rng.choice((0.05, 0.5, 2.0)),
        quarantine_s=rng.choice((0.5, 2.0)),
        backends=rng.choice((0, 1, 1, 1, 2)),
        lookup_wait_s=rng.choice((0.05, 0.2, 0.5)),
        fetch_fraction=rng.choice((0.05, 0.25, 0.5)),
        fetches_per_backend=rng.choice((1, 3, 8)),
        persists_per_backend=rng.choice((1, 4)),
        persist_queue_bytes=rng.choice((12 * PAGE_BYTES, 1 << 30, 1 << 30)),
        persist_tries=rng.choice((1, 3)),
        low_water_fraction=rng.choice((0.2, 0.6)),
        store_policy=rng.choice(list(StorePolicy)),
        default_quota=rng.choice((EVERYTHING, EVERYTHING, Fraction(1, 2), Fraction(1, 4))),
    )
    return Knobs(
        arena_pages=pages,
        slots=rng.choice((pages, pages, pages // 2)),
        limits=limits,
        network=Conditions(rng.choice((0.0003, 0.002, 0.02)), rng.choice((0.0, 0.3, 0.9))),
        engines=rng.randint(2, 5),
        layouts=some_layouts(rng),
        step_s=rng.choice((0.005, 0.02)),
        stall=habit(0.05),
        copy_s=rng.choice((0.001, 0.01, 0.03)),
        patience_s=rng.choice((0.5, 0.1, 0.03)),
        abort=habit(0.2),
        load_fails=habit(0.2),
        end_twice=habit(0.5),
        unconfirmed=habit(0.5),
        far=habit(0.5),
        sync_loads=habit(1.0),
        dma=habit(1.0),
        read_only=habit(0.5),
        trusting=habit(0.7),
        same_session=habit(1.0),
        keeps_mapping_s=rng.choice((0.01, 0.3)),
        l2=sim_l2_knobs.drawn(rng),
        no_fetch=habit(0.5),
        waits_ms=rng.choice(((-1.0,), (5.0, 50.0), (0.0, 20.0, 1000.0), (-1.0, 100.0))),
        give_up=habit(0.4),
        forget=habit(0.02),
        salted=habit(0.5),
    )
