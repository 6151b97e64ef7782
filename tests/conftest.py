"""What all tests share: how hard hypothesis works.

`KVKEEP_HYPOTHESIS_PROFILE=prove` runs 20 times the examples of the everyday profile.
"""

import os

from hypothesis import HealthCheck, settings

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
