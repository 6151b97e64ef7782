"""What all tests share: how hard hypothesis works, and that no test leaves its log to the next.

`KVKEEP_HYPOTHESIS_PROFILE=prove` runs 20 times the examples of the everyday profile.
"""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from kvkeep.server.logs import LOGGER

EXAMPLES = 40
SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.data_too_large)

for name, times in (("quick", 1), ("prove", 20)):
    settings.register_profile(
        name,
        max_examples=EXAMPLES * times,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=SLOW_IS_FINE,
    )
settings.load_profile(os.environ.get("KVKEEP_HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A server composed in this process leaves no handler on a stream that is closed later."""
    logger = logging.getLogger(LOGGER)
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)
