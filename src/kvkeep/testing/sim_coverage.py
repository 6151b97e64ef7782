"""What a simulation has met: pairs of slot state and event, and known faults; also those never met.

What was never met was never judged. A pair that cannot happen is named here with the reason; a new
event or fault appears in the tables by itself.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from kvkeep.core import events as ev
from kvkeep.testing import faults, sim_storage
from kvkeep.testing.world import World
from kvkeep.types import SlotState

Pairs = Counter[tuple[SlotState, str]]

IMPOSSIBLE: dict[str, str] = {}  # pair -> why it cannot be met


def of_faults(world: World) -> Counter[str]:
    """Every fault that struck in one world."""
    struck = Counter({f"world {name}": count for name, count in world.struck.items()})
    for disk in world.disks:
        struck.update({f"l2 {name}": count for name, count in disk.plan.struck.items()})
    return struck


def fault_table(struck: Mapping[str, int]) -> dict[str, int]:
    """Every known fault with its count."""
    known = [f"world {getattr(make, '__name__', make)}" for make, _ in faults.FAULTS]
    known += [f"l2 {name}" for name in sim_storage.KNOWN]
    assert set(struck) <= set(known), f"not in the table: {sorted(set(struck) - set(known))}"
    return {name: struck.get(name, 0) for name in known}


def pair_table(pairs: Pairs) -> dict[str, int]:
    """Every pair of state and event with its count."""
    events = [kind.__name__ for kind in get_args(ev.Event)]
    return {f"{s.name}/{e}": pairs[s, e] for s in SlotState for e in events}


def never(report: Mapping[str, Any]) -> list[str]:
    """Pairs and faults that could be met and were not."""
    tables = {**report["coverage"], **report["faults"]}
    return [name for name, count in tables.items() if not count and name not in IMPOSSIBLE]
