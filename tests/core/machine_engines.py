"""Who the state machines let join: sessions that differ in ranks, groups, sizes and rights."""

from dataclasses import dataclass

from kvkeep.types import GroupKind, RowSpec

FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT
SMALL = (RowSpec(0, FULL, 5_000),)
BIG = (RowSpec(0, FULL, 40_000),)
TWO_GROUPS = (RowSpec(0, FULL, 9_000), RowSpec(1, WINDOW, 3_000, 2))
WINDOW_ONLY = (RowSpec(0, WINDOW, 6_000, 2),)
STATE_ONLY = (RowSpec(0, STATE, 12_288),)


@dataclass(frozen=True)
class Engine:
    """How one session's processes say Hello; `layouts` are what its workers may come with."""

    world: int
    layouts: tuple[tuple[RowSpec, ...], ...]
    both: bool = False
    dma: bool = False
    recompute: bool = True
    writes: bool = True


ENGINES = {
    "plain": Engine(1, (SMALL,), both=True),
    "dma": Engine(1, (SMALL,), both=True, dma=True, recompute=False),
    "reader": Engine(1, (SMALL,), writes=False),
    "pair": Engine(2, (TWO_GROUPS, SMALL)),
    "pair dma": Engine(2, (TWO_GROUPS,), dma=True, recompute=False),
    "big": Engine(1, (BIG, TWO_GROUPS), both=True),
    "window": Engine(1, (WINDOW_ONLY,), both=True),
    "state": Engine(1, (STATE_ONLY,), both=True, recompute=False),
}
