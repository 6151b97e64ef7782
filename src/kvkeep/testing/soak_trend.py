"""Does a series of samples grow? A straight line through the means of its parts, with its error.

Samples that follow each other are alike (an allocator grows in steps), so the error is taken from
the means of `PARTS` equal parts rather than from single samples: any wobble would look certain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, median_low

PARTS = 20
ERRORS = 2.0  # a growth counts when it is more than this many standard errors away


@dataclass(frozen=True, slots=True)
class Trend:
    """Slope per unit of time, its standard error, and the mean of all samples."""

    slope: float
    error: float
    mean: float

    def grows(self, tolerance: float) -> bool:
        """Whether even the lower end of the slope is above the tolerance."""
        return self.slope - ERRORS * self.error > tolerance


def trend(times: Sequence[float], values: Sequence[float]) -> Trend:
    """Least squares over the parts' means; too few samples have an error without bound."""
    count = min(PARTS, len(values))
    if count < 3:
        return Trend(0.0, inf, fmean(values) if values else 0.0)
    edges = [len(values) * n // count for n in range(count + 1)]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    xs, ys = [fmean(times[p]) for p in parts], [fmean(values[p]) for p in parts]
    x, y = fmean(xs), fmean(ys)
    spread = sum((a - x) ** 2 for a in xs)
    slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread
    left = sum((b - y - slope * (a - x)) ** 2 for a, b in zip(xs, ys, strict=True))
    return Trend(slope, sqrt(left / (count - 2) / spread), fmean(values))


def level_growth(values: Sequence[int]) -> int:
    """How much higher the middle value of the last third is than that of the first."""
    third = len(values) // 3
    return median_low(values[-third:]) - median_low(values[:third]) if third else 0
