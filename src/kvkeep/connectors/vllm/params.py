"""What one request may say to kvkeep: the key `kvkeep` of its `kv_transfer_params`.

    {"kvkeep": {"no_lookup": true, "no_store": true, "prefetch_deadline_ms": 300}}

Other keys belong to others and are not looked at. A word that is not understood never fails a
request: it is then neither looked up nor stored, and told so in its timeline.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

KEY = "kvkeep"
KEYS = ("no_lookup", "no_store", "prefetch_deadline_ms")
MAX_DEADLINE_MS = 600_000.0


@dataclass(frozen=True, slots=True)
class Params:
    """One request's wishes; the defaults are those of a request that says nothing."""

    given: bool = False  # the request has the key
    no_lookup: bool = False
    no_store: bool = False
    deadline_ms: float | None = None  # the longest wait for L2; None: the server's own
    problem: str | None = None  # what was not understood


def parse(kv_transfer_params: object) -> Params:
    """Wishes of a request from its `kv_transfer_params` (vLLM: `v1/request.py`)."""
    if not isinstance(kv_transfer_params, Mapping) or kv_transfer_params.get(KEY) is None:
        return Params()
    wishes = kv_transfer_params[KEY]
    if not isinstance(wishes, Mapping):
        return Params(given=True, problem=f"{KEY} is no object with {', '.join(KEYS)}")
    for key, value in wishes.items():
        problem = _problem(key, value)
        if problem is not None:
            return Params(given=True, problem=problem)
    deadline = wishes.get("prefetch_deadline_ms")
    return Params(
        given=True,
        no_lookup=wishes.get("no_lookup", False),
        no_store=wishes.get("no_store", False),
        deadline_ms=None if deadline is None else float(deadline),
    )


def _problem(key: object, value: object) -> str | None:
    if key not in KEYS:
        near = difflib.get_close_matches(str(key), KEYS, 1)
        meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(KEYS)}"
        return f"{KEY} has the unknown key {str(key)[:80]!r}; {meant}"
    if key != "prefetch_deadline_ms":
        return None if isinstance(value, bool) else f"{KEY}.{key} must be true or false"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and math.isfinite(value) and 0 <= value <= MAX_DEADLINE_MS:  # type: ignore[arg-type,operator]
        return None
    return f"{KEY}.{key} must be a number of milliseconds from 0 to {MAX_DEADLINE_MS:.0f}"
