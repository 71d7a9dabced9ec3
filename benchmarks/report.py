"""The table of a run: a column for each peer, ratios, and the targets.

A run is what `__main__` saves as JSON: under ``cases``, per case and peer, the list of its rounds
(a dict of numbers each, or None for one that failed).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from .measure import CASES
from .metrics import Metric
from .peers import TITLES
from .targets import BEST, ITSELF, TARGETS, Target

PRODUCT = "toc"

Run = dict[str, Any]


def values(run: Run, case: str, peer: str, metric: str) -> list[float | None]:
    """A metric's value in each round."""
    rounds = run["cases"].get(case, {}).get(peer, [])
    return [None if found is None else found.get(metric) for found in rounds]


def median(some: Iterable[float | None]) -> float | None:
    there = [value for value in some if value is not None]
    return statistics.median(there) if there else None


def best(run: Run, case: str, metric: str) -> list[float | None]:
    """The best of the peers, round by round."""
    choose = max if CASES[case].METRICS[metric].more_is_better else min
    columns = [
        values(run, case, peer, metric) for peer in run["cases"].get(case, {}) if peer != PRODUCT
    ]
    rows = zip(*columns) if columns else ()  # noqa: B905 - an interrupted run has uneven columns
    return [choose((v for v in row if v is not None), default=None) for row in rows]


def ratios(ours: list[float | None], theirs: list[float | None]) -> list[float]:
    """Ours to theirs, round by round: what disturbs the machine disturbs both."""
    return [a / b for a, b in zip(ours, theirs) if a is not None and b]  # noqa: B905 - as above


def judged(run: Run, target: Target) -> list[float]:
    """What a target is about, in each round; empty if it was not measured."""
    ours = values(run, target.case, PRODUCT, target.metric)
    if target.against == ITSELF:
        return [value for value in ours if value is not None]
    if target.against == BEST:
        return ratios(ours, best(run, target.case, target.metric))
    if target.against.startswith("case:"):
        other = target.against.partition(":")[2]
        return ratios(ours, values(run, other, PRODUCT, target.metric))
    return ratios(ours, values(run, target.case, target.against, target.metric))


def text(run: Run) -> str:
    """Everything that people want to see of a run."""
    parts = [_heading(run)]
    for case, peers in run["cases"].items():
        parts.append(_case(run, case, list(peers)))
    parts.append(_targets(run))
    if run["failures"]:
        parts.append("Failed\n" + "\n".join(f"  {failure}" for failure in run["failures"]))
    return "\n\n".join(parts) + "\n"


def _heading(run: Run) -> str:
    machine = run["machine"]
    lines = [
        f"{run['form']} form, {machine['processors']} processors ({machine['model']}), "
        f"{machine['memory_gb']} GB, {machine['system']}",
        f"load at the beginning {machine['load'][0]}, at the end {machine['load'][1]}",
        *(f"{name}: {version}" for name, version in run["servers"].items()),
        *(
            f"{title}: " + ", ".join(f"{name} {version}" for name, version in versions.items())
            for title, versions in run["versions"].items()
        ),
        *run["notes"],
        "Medians of the rounds. 'to ...': celery-toc's number divided by theirs, round by round, "
        "the median of that.",
    ]
    return "\n".join(lines)


def _case(run: Run, case: str, peers: list[str]) -> str:
    module = CASES[case]
    metrics: dict[str, Metric] = module.METRICS
    often = max((len(rounds) for rounds in run["cases"][case].values()), default=0)
    doc = " ".join(module.__doc__.split("\n\n")[0].split()).partition(":")[2].strip()
    options = ", ".join(
        f"{name} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"
        for name, value in run["arguments"][case].items()
    )
    others = [peer for peer in peers if peer != PRODUCT]
    head = ["", "unit", *(run["titles"][peer] for peer in peers)]
    if PRODUCT in peers and "redis" in others:
        head.append("to redis://")
    if PRODUCT in peers and others:
        head.append("to best")
    head.append("target")
    rows = []
    for name, metric in metrics.items():
        row = [metric.title, metric.unit]
        row += [number(median(values(run, case, peer, name))) for peer in peers]
        ours = values(run, case, PRODUCT, name)
        if "to redis://" in head:
            row.append(number(median(ratios(ours, values(run, case, "redis", name)))))
        if "to best" in head:
            row.append(number(median(ratios(ours, best(run, case, name)))))
        found = [_verdict(run, t) for t in TARGETS if (t.case, t.metric) == (case, name)]
        row.append("; ".join(filter(None, found)))
        if any(cell not in ("", "-") for cell in row[2:]):
            rows.append(row)
    title = f"{case}: {doc}\n({options}; rounds: {often})"
    return title + "\n" + _grid([head, *rows])


def _verdict(run: Run, target: Target) -> str:
    value = median(judged(run, target))
    bound = f"{target.sign} {target.bound:g}{_of(run, target)}"
    if value is None:
        return f"{bound}: not measured"
    return f"{bound}: {'met' if target.met_by(value) else 'NOT met'}"


def _of(run: Run, target: Target) -> str:
    if target.against == ITSELF:
        return ""
    if target.against == BEST:
        return " of the best"
    if target.against.startswith("case:"):
        return f" of {target.against.partition(':')[2]}"
    return f" of {TITLES[target.against]}"


def _targets(run: Run) -> str:
    rows = [["target", "", "measured", "lowest", "highest", "rounds", ""]]
    for target in TARGETS:
        found = judged(run, target)
        if target.case not in run["cases"]:
            continue
        title = CASES[target.case].METRICS[target.metric].title
        row = [f"{target.case}, {title}", f"{target.sign} {target.bound:g}{_of(run, target)}"]
        if found:
            middle = statistics.median(found)
            row += [number(middle), number(min(found)), number(max(found)), str(len(found))]
            row.append("met" if target.met_by(middle) else "NOT met")
        else:
            row += ["-", "", "", "0", "not measured"]
        rows.append(row)
    return "Targets\n" + _grid(rows)


def number(value: float | None) -> str:
    """A number as people read it."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def _grid(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left: list[Callable[[str, int], str]] = []
    for i in range(len(widths)):
        cells = [row[i] for row in rows[1:]]
        numbers = all(cell.replace(",", "").lstrip("-")[:1].isdigit() or cell in ("", "-")
                      for cell in cells)  # fmt: skip
        left.append(str.rjust if i > 1 and numbers else str.ljust)
    lines = [
        "  ".join(pad(cell, width) for cell, width, pad in zip(row, widths, left, strict=True))
        for row in rows
    ]
    return "\n".join(f"  {line.rstrip()}" for line in lines)
