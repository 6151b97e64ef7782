"""Each of twelve planted bugs is found by a check that finds nothing without it."""

from collections.abc import Callable

import pytest
from tests.mutations import bugs, connector_checks
from tests.testing.test_simulate import a_second_end_counts_again, no_generation_change
from tests.testing.test_simulate_l2 import (
    a_cancelled_lookup_keeps_its_chunks,
    bytes_are_published_unverified,
)

from kvkeep.testing import simulate

SEEDS = 60  # the slowest to be found needs a few

Plant = Callable[[pytest.MonkeyPatch], None]

SIMULATED: dict[str, Plant] = {
    "publish before verify": bytes_are_published_unverified,
    "free on a timer": bugs.freed_by_a_timer,
    "missing generation change": no_generation_change,
    "double release accepted": a_second_end_counts_again,
    "first chunk's checksum skipped": bugs.the_first_chunk_is_not_verified,
    "quota not returned": bugs.a_quota_is_not_returned,
    "reservation leak on abort": a_cancelled_lookup_keeps_its_chunks,
    "window row dropped": bugs.a_window_is_not_asked_for,
    "persist reported before done": bugs.persisted_is_said_before_it_is,
    "breaker that never closes": bugs.a_breaker_never_closes,
}
CONNECTOR: dict[str, tuple[Plant, Callable[[], None]]] = {
    "commit in the failing step": (
        bugs.committed_in_the_failing_step,
        connector_checks.nothing_is_committed_in_a_step_with_a_failed_load,
    ),
    "an old epoch's handle accepted": (
        bugs.an_old_epochs_handle_is_accepted,
        connector_checks.no_handle_of_another_epoch_is_used,
    ),
}


def test_there_are_twelve() -> None:
    assert len(SIMULATED) + len(CONNECTOR) == 12


@pytest.mark.slow
@pytest.mark.parametrize("plant", SIMULATED.values(), ids=SIMULATED)
def test_the_simulator_finds_it(plant: Plant) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        found = (seed for seed in range(SEEDS) if simulate.run_seed(seed).what)
        seed = next(found, None)
    assert seed is not None, "no seed noticed"
    assert not simulate.run_seed(seed).what, "the seed that found it is not clean without it"


@pytest.mark.engine
@pytest.mark.parametrize(("plant", "check"), CONNECTOR.values(), ids=CONNECTOR)
def test_a_check_of_the_connector_finds_it(plant: Plant, check: Callable[[], None]) -> None:
    check()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError):
            check()
    check()
