"""The table and the histogram of latenesses. Times are in seconds, and shown in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Upper ends of the histogram's rows, in milliseconds.
EDGES = (1, 2, 3, 4, 5, 7, 10, 20, 50, 100, 1000, math.inf)

#: Characters of the longest bar.
WIDTH = 48


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed."""
    return ordered[max(math.ceil(len(ordered) * percent / 100) - 1, 0)]


def table(latenesses: Sequence[float], sent: int, started: int) -> str:
    """What happened to the tasks.

    sent: how many were
    started: how often a worker started one; more than were sent if any ran twice
    """
    ordered = sorted(1000 * lateness for lateness in latenesses)
    rows = [
        ("tasks sent", f"{sent}"),
        ("tasks run", f"{started}"),
        ("results", f"{len(ordered)}"),
        ("early", f"{sum(1 for ms in ordered if ms < 0)}"),
    ]
    if ordered:
        rows += [(f"p{p} lateness", f"{percentile(ordered, p):.1f} ms") for p in (50, 90, 99)]
        rows.append(("max lateness", f"{ordered[-1]:.1f} ms"))
    return "\n".join(f"  {name:<14}{value:>12}" for name, value in rows)


def histogram(latenesses: Sequence[float]) -> str:
    """How many tasks started how late, a row per range of milliseconds."""
    counts = [0] * (len(EDGES) + 1)
    for lateness in latenesses:
        ms = 1000 * lateness
        row = 0 if ms < 0 else 1 + next(i for i, edge in enumerate(EDGES) if ms < edge)
        counts[row] += 1
    labels = ["early"]
    for low, high in zip((0, *EDGES), EDGES, strict=False):
        labels.append(f"{low} or more" if math.isinf(high) else f"{low} to {high}")
    most = max(counts)
    last = max((row for row, count in enumerate(counts) if count), default=0)
    lines = ["  late by, ms   tasks"]
    for label, count in list(zip(labels, counts, strict=True))[: last + 1]:
        bar = "#" * math.ceil(WIDTH * count / most) if count else ""
        lines.append(f"  {label:>11}   {count:>5}  {bar}".rstrip())
    return "\n".join(lines)
