"""The slot table alone: which state may follow which, and what a reused slot looks like."""

import pytest

from kvkeep.core.arena import ALIGN_BYTES, Arena
from kvkeep.core.slots import SlotTable
from kvkeep.types import SlotId, SlotState

STAGING, RESIDENT, FREE = SlotState.STAGING, SlotState.RESIDENT, SlotState.FREE
ORPHANED, QUARANTINED = SlotState.ORPHANED, SlotState.QUARANTINED
WAYS = {
    STAGING: {RESIDENT, ORPHANED, QUARANTINED, FREE},
    RESIDENT: {FREE},
    ORPHANED: {QUARANTINED, FREE},
    QUARANTINED: {FREE},
    FREE: set(),
}


def table(slots: int = 3) -> SlotTable:
    arena = Arena(slots)
    arena.grow(8 * ALIGN_BYTES)
    return SlotTable(arena, [0] * slots)


def in_state(slots: SlotTable, state: SlotState) -> SlotId:
    slot = slots.stage(ALIGN_BYTES + 1)
    assert slot is not None
    if state is not STAGING:
        slots.move(slot, state)
    return slot


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("to", SlotState)
def test_which_state_may_follow(state: SlotState, to: SlotState) -> None:
    slots = table()
    slot = in_state(slots, state)
    if to not in WAYS[state]:
        with pytest.raises(AssertionError, match=f"{state.name} -> {to.name}"):
            slots.move(slot, to)
        assert slots.state[slot] is state
        return
    before = slots.generations[slot]
    slots.move(slot, to)
    assert slots.state[slot] is to
    assert slots.bytes_in[state] == 0
    assert slots.bytes_in[to] == (0 if to is FREE else 2 * ALIGN_BYTES)
    assert slots.generations[slot] == before + (state in (STAGING, RESIDENT))
    assert slots.arena.free_bytes == (8 if to is FREE else 6) * ALIGN_BYTES


def test_slots_are_used_again_and_there_are_no_more_than_generations() -> None:
    slots = table(2)
    first, second = in_state(slots, RESIDENT), in_state(slots, STAGING)
    assert slots.stage(1) is None, "memory is there, a slot is not"
    slots.move(first, FREE)
    slots.move(second, FREE)
    again = {slots.stage(1), slots.stage(1)}
    assert again == {first, second}
    assert slots.stage(1) is None
    assert list(slots.state) == [STAGING, STAGING]
    assert [slots.length[slot] for slot in (first, second)] == [1, 1]


def test_what_is_read_is_not_freed() -> None:
    slots = table()
    slot = in_state(slots, RESIDENT)
    slots.hold([slot, slot])
    assert slots.reserved_bytes == 2 * ALIGN_BYTES
    assert not slots.unhold(slot)
    with pytest.raises(AssertionError):
        slots.move(slot, FREE)
    assert slots.unhold(slot)
    assert slots.reserved_bytes == 0
    with pytest.raises(AssertionError):
        slots.unhold(slot)
    slots.move(slot, FREE)
    with pytest.raises(AssertionError):
        slots.hold([slot])
