"""Small charts, as SVG without a style of its own: colours are of the page's style sheet."""

from __future__ import annotations

from collections.abc import Sequence

from .html import Markup, h, markup

#: Units of a sparkline, of which one is about a pixel.
WIDTH, HEIGHT = 96, 22

#: Units of a bar chart; it is as wide as there is room.
BAR, CHART = 10, 80


def sparkline(values: Sequence[float | None], about: str) -> Markup:
    """A line through values; where one is None, it has a gap. Nothing, if all are None.

    about: what is told of it to who cannot see it
    """
    if all(value is None for value in values):
        return markup()
    most = max((value for value in values if value is not None), default=0) or 1.0
    step = WIDTH / max(len(values) - 1, 1)
    pieces: list[str] = []
    drawing = False
    for place, value in enumerate(values):
        if value is None:
            drawing = False
            continue
        x, y = place * step, HEIGHT - 2 - (HEIGHT - 4) * value / most
        alone = not drawing and (place + 1 == len(values) or values[place + 1] is None)
        pieces.append(f"{'L' if drawing else 'M'}{x:.1f} {y:.1f}{'h1' if alone else ''}")
        drawing = True
    return h.svg(
        h.title(about),
        h.path(d=" ".join(pieces), class_="spark"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        width=WIDTH,
        height=HEIGHT,
        role="img",
    )


def bars(numbers: Sequence[int], labels: Sequence[str], about: str) -> Markup:
    """A bar for each number, with what it says when it is pointed at; a number above 0 is always
    visible."""
    most = max(max(numbers, default=0), 1)
    drawn = []
    for place, (number, label) in enumerate(zip(numbers, labels, strict=True)):
        high = max(CHART * number / most, 2.0) if number else 0.0
        drawn.append(
            h.g(
                h.title(label),
                h.rect(x=place * BAR, y=0, width=BAR, height=CHART, class_="room"),
                h.rect(
                    x=place * BAR + 1,
                    y=f"{CHART - high:.1f}",
                    width=BAR - 2,
                    height=f"{high:.1f}",
                    class_="bar",
                )
                if number
                else None,
            )
        )
    return h.svg(
        h.title(about),
        drawn,
        h.line(x1=0, y1=CHART, x2=BAR * len(numbers), y2=CHART, class_="axis"),
        viewBox=f"0 0 {BAR * len(numbers)} {CHART + 1}",
        preserveAspectRatio="none",
        class_="chart",
        role="img",
    )
