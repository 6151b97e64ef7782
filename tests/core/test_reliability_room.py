"""Room is made when it is wanted, by every policy, and what L2 brought stays for the next."""

from typing import get_args, get_type_hints

import pytest
from tests.core.build import NO_CAPS, PAGE, World, alone, chain
from tests.core.conftest import MakeShell

from kvkeep.config import PolicyConfig
from kvkeep.core.audit import check
from kvkeep.core.directory import Directory, Limits
from kvkeep.core.eviction import POLICIES
from kvkeep.types import StageOutcome

GRANTED = StageOutcome.GRANTED


class Policed(World):
    """A world whose directory has one of the policies."""

    def __init__(self, pages: int, policy: str) -> None:
        super().__init__(0, limits=NO_CAPS)
        ids = iter(range(1000, 1 << 30))
        made = POLICIES[policy]()
        self.directory = Directory(self.generations, lambda: next(ids), limits=NO_CAPS, policy=made)
        self.directory.arena.grow(pages * PAGE)


def test_every_policy_that_can_be_configured_is_there() -> None:
    words = get_type_hints(PolicyConfig)["eviction"]
    assert words is not str, "a closed list: a typing error is refused at start"
    assert set(get_args(words)) == set(POLICIES) != set()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_makes_room_at_once(policy: str) -> None:
    """Ten times what fits is stored: no store waits for a clock, none is dropped."""
    world = Policed(8, policy)
    world.join("s")
    for number in range(80):
        assert world.store("s", alone(str(number))) == [GRANTED]
        assert world.touch("s", alone(str(number))) == 1
    check(world.directory)
    assert world.directory.residents.evicted_chunks == 72


def test_lookups_that_are_never_released_leave_room_for_stores() -> None:
    """A session may ask and not release as often as it likes: its share is bounded."""
    world = World(pages=8, limits=Limits(staging_fraction=9.0, session_staging_fraction=1.0))
    world.join("asks", recompute=False)
    world.join("stores")
    prompts = [alone(str(number)) for number in range(8)]
    for prompt in prompts:
        world.store("stores", prompt)
    for _ in range(20):
        for prompt in prompts:
            world.lookup("asks", prompt)
    assert world.directory.slots.reserved_bytes == 4 * PAGE
    for number in range(100, 120):
        assert world.store("stores", alone(str(number))) == [GRANTED]


def test_a_second_lookup_of_what_l2_brought_asks_nobody(shell: MakeShell) -> None:
    """It stays in L1 when its first reader has gone."""
    w = shell()
    w.join("s")
    keys = chain("a", 3)
    w.put(keys)
    ticket = w.ask("s", keys)
    w.bring()
    w.end("s", w.hit(ticket).lease)
    assert w.touch("s", keys) == 3
    assert w.touch("s", keys) == 3
    assert w.counters["fetches"] == 3
