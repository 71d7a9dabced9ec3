"""What a number means, and what is made of many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """A number that a measurement returns."""

    title: str
    unit: str
    more_is_better: bool = False


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not less than so many percent of them."""
    ordered = sorted(values)
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def distribution(seconds: Sequence[float]) -> dict[str, Any]:
    """Times in milliseconds, as the tables have them, and all of them for plots."""
    return {
        "min": min(seconds) * 1000,
        "p50": percentile(seconds, 50) * 1000,
        "p90": percentile(seconds, 90) * 1000,
        "p99": percentile(seconds, 99) * 1000,
        "max": max(seconds) * 1000,
        "samples": [round(value * 1000, 3) for value in sorted(seconds)],
    }


#: The metrics of a distribution.
TIMES = {name: Metric(name, "ms") for name in ("min", "p50", "p90", "p99", "max")}
