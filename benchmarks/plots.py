"""The pictures of a run: lateness and drain, a line for each peer; memory, a bar for each."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from .report import PRODUCT, Run

#: Inches, and dots per inch: as wide as a page of documentation.
_SIZE, _DPI = (8.0, 4.5), 110

#: One colour per peer, the same in every picture, told apart by people who see few colours
#: (Okabe and Ito's palette).
_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"),
    *("#56B4E9", "#000000", "#999999", "#7B5AA6"),
)


def draw(run: Run, base: Path) -> list[Path]:
    """Make the pictures for which the run has numbers; return where they are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = []
    for case, picture in (("lateness", _lateness), ("drain", _drain), ("memory", _memory)):
        rounds = {
            peer: there
            for peer, all_ in run["cases"].get(case, {}).items()
            if (there := [found for found in all_ if found is not None])
        }
        if not rounds:
            continue
        figure, axes = pyplot.subplots(figsize=_SIZE, dpi=_DPI)
        for number, (peer, there) in enumerate(rounds.items()):
            picture(
                axes,
                there,
                label=run["titles"][peer],
                color=_COLOURS[number % len(_COLOURS)],
                linewidth=2.5 if peer == PRODUCT else 1.3,
                zorder=3 if peer == PRODUCT else 2,
            )
        picture(axes, [])
        axes.grid(True, alpha=0.3)
        axes.legend(fontsize="small")
        place = Path(f"{base}-{case}.png")
        figure.tight_layout()
        figure.savefig(place)
        pyplot.close(figure)
        made.append(place)
    return made


def _lateness(axes: Any, rounds: list[dict[str, Any]], **style: Any) -> None:
    """How many percent of the tasks had started so many milliseconds after their action time."""
    if not rounds:
        axes.set(
            xscale="log",
            xlabel="milliseconds from action time to start",
            ylabel="percent of tasks started",
            title="Lateness: countdown tasks, no two due together",
            ylim=(0, 101),
        )
        return
    samples = sorted(max(value, 0.01) for found in rounds for value in found["samples"])
    axes.plot(samples, [100 * (n + 1) / len(samples) for n in range(len(samples))], **style)


def _memory(axes: Any, rounds: list[dict[str, Any]], *, label: str = "", **style: Any) -> None:
    """How many bytes a scheduled task takes in Redis."""
    bytes_each = [found["bytes"] for found in rounds if found.get("bytes") is not None]
    if bytes_each:
        value = statistics.median(bytes_each)
        bar = axes.bar(label, value, label=label, color=style["color"], zorder=style["zorder"])
        axes.bar_label(bar, fmt="%.0f")
    elif not rounds:
        axes.set(ylabel="bytes", title="Memory: bytes in Redis for a scheduled task")


def _drain(axes: Any, rounds: list[dict[str, Any]], **style: Any) -> None:
    """How many tasks have started, by the seconds since the first; of the round in the middle."""
    if not rounds:
        axes.set(
            xlabel="seconds since the first start",
            ylabel="tasks started",
            title="Drain: a backlog of immediate tasks, one worker with two processes",
            xlim=(0, None),
            ylim=(0, None),
        )
        return
    middle = statistics.median_low(found["rate"] for found in rounds)
    curve = next(found["curve"] for found in rounds if found["rate"] == middle)
    axes.plot([at for at, _ in curve], [number for _, number in curve], **style)
