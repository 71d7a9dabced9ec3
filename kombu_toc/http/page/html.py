"""HTML whose text is escaped by construction: what was not made here is text, wherever it
stands."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta, timezone
from html import escape
from typing import Any, Protocol
from urllib.parse import urlencode

from ..problems import Problem, invalid

# -- HTML whose text is escaped by construction
#
# There are no templates: a template is text in which somebody can forget to escape, and an engine
# would be one more package for the few tags that the page has.

#: Elements that have no end tag.
_VOID = frozenset(("br", "hr", "input", "link", "meta"))

#: Names of attributes that Python has words for.
_NAMES = {"class_": "class", "for_": "for"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


class Tag(Protocol):
    """Makes an element."""

    def __call__(self, *children: Any, **attributes: Any) -> Markup: ...


def markup(*children: Any) -> Markup:
    """Children one behind the other. One that is no :class:`Markup` is text; None is nothing; a
    list or another iterable is its members."""
    parts: list[str] = []
    _add(parts, children)
    return Markup("".join(parts))


def _add(parts: list[str], children: Iterable[Any]) -> None:
    for child in children:
        if isinstance(child, Markup):
            parts.append(child)
        elif child is None or child is False:
            continue
        elif isinstance(child, str):
            parts.append(escape(shown(child)))
        elif isinstance(child, (int, float)):
            parts.append(str(child))
        else:
            _add(parts, child)


def shown(text: str) -> str:
    """Text that a page can hold: half of a surrogate pair, a NUL and what turns the direction of
    text are shown as what they are."""
    if text.isascii() and "\0" not in text:
        return text
    return "".join(_visible(one) for one in text)


def _visible(one: str) -> str:
    if "\ud800" <= one <= "\udfff" or one == "\0" or one in _TURNS:
        return f"\\u{ord(one):04x}"
    return one


#: What makes text look like another text: it is written as its number.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. An attribute that is True has no value; one that is None or False is left out;
    the underscore of a name is a hyphen."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = _NAMES.get(key) or key.replace("_", "-")
        if value is True:
            parts.append(f" {label}")
        else:
            parts.append(f' {label}="{escape(shown(str(value)))}"')
    parts.append(">")
    if name not in _VOID:
        _add(parts, children)
        parts.append(f"</{name}>")
    return Markup("".join(parts))


class _Tags:
    """Makes elements by their names: ``h.p("text", class_="dim")``."""

    def __getattr__(self, name: str) -> Tag:
        def make(*children: Any, **attributes: Any) -> Markup:
            return tag(name, *children, **attributes)

        setattr(self, name, make)
        return make


h = _Tags()


def link(view: str, **query: Any) -> str:
    """The address of a view, relative to the page: so it is the same wherever the page is mounted.
    What is None or empty is left out."""
    said = {name: value for name, value in query.items() if value not in (None, "")}
    return f"{view}?{urlencode(said, errors='surrogatepass')}" if said else view


# -- numbers, times and spans of time as a person reads them

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

#: Seconds, and what they are called.
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def number(value: float) -> str:
    """``1,234``; below 10 with one digit behind the point if it is no whole number."""
    if value == int(value) or value >= 10:
        return f"{value:,.0f}"
    return f"{value:.2g}" if value < 1 else f"{value:.1f}"


#: What is in flight, for who sees that tasks run.
FLIGHT = (
    "In flight is what a worker has and has not acknowledged: a task that is acknowledged as it "
    "begins, as is Celery's default, runs without being in flight."
)


def skipped(schedules: Collection[str], number: int = 0) -> str:
    """What becomes of schedules whose next firing was deleted: these, or more, `number` in all."""
    shown = [repr(name) for name in sorted(schedules)]
    *some, last = shown if number <= len(shown) else [*shown, f"{number - len(shown):,} more"]
    names = f"{', '.join(some)} and {last}" if some else last
    goes = "each goes" if some else "it goes"
    return f"The next firing of {names} was among them; {goes} on with the one after that."


def counted(value: int, thing: str) -> str:
    """``1 message``, ``2,000 messages``."""
    return f"{value:,} {thing}" if value == 1 else f"{value:,} {thing}s"


def span(seconds: float) -> str:
    """``5 s``, ``1 min 5 s``, ``3 d 2 h``: the two largest units."""
    seconds = abs(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "0 s"
    left, said = int(seconds), []
    for size, name in _UNITS:
        if left >= size:
            said.append(f"{left // size} {name}")
            left %= size
        elif said:
            break
        if len(said) == 2:
            break
    return " ".join(said)


def lateness(seconds: float | None) -> str:
    """``4.2 ms``, ``1.3 s``; a dash where nothing is known."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def moment(us: int) -> str:
    """``2026-01-31 09:30:00 UTC``."""
    try:
        made = _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return f"{us} µs"
    return f"{made:%Y-%m-%d %H:%M:%S} UTC"


def iso(us: int) -> str:
    """``2026-01-31T09:30:00.000000Z``."""
    try:
        made = _EPOCH + timedelta(microseconds=us)
    except OverflowError:
        return ""
    return f"{made:%Y-%m-%dT%H:%M:%S.%f}Z"


def when(us: int, now_us: int) -> Markup:
    """A time, and how far away it is. The script shows it in the viewer's zone, and counts."""
    away = h.span(_away(us, now_us), class_="away", data_us=us)
    return h.span(h.time(moment(us), datetime=iso(us), data_us=us), " ", away, class_="when")


def ago(us: int, now_us: int) -> Markup:
    """How far away a time is; what is pointed at says it in full."""
    return h.span(_away(us, now_us), class_="away", title=moment(us), data_us=us)


def _away(us: int, now_us: int) -> str:
    away = (us - now_us) / 1e6
    return f"in {span(away)}" if away > 0 else f"{span(away)} ago"


# -- times as people type them

_SPAN = re.compile(r"\s*(?:in\s+)?([+-]?)\s*((?:\d+(?:\.\d+)?\s*[a-z]+\s*)+)(ago)?\s*")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
_SECONDS = {
    "ms": 0.001,
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
    **dict.fromkeys(("w", "week", "weeks"), 604_800.0),
}

#: The latest moment: scores hold no later one.
LAST = 9.0e9

#: Characters of a time: a longer text is none, and would take long to look through.
_LONGEST = 100


def read_time(text: str, field: str, now: float) -> float | None:
    """Seconds since the epoch of a span (``1h 30m``, ``-5m``, ``10 min ago``), ``now``, or a moment
    (``2026-01-31 09:30``; UTC unless it has an offset). None for nothing.

    now: by Redis's clock

    Raises Problem.
    """
    said = text.strip().lower()
    if not said:
        return None
    if len(said) > _LONGEST:
        raise _unclear(text, field)
    if said == "now":
        return now
    if (found := _SPAN.fullmatch(said)) is not None:
        return _checked(now + _seconds(found, field), text, field)
    try:
        moment = datetime.fromisoformat(said.upper().replace("Z", "+00:00").replace(" UTC", ""))
    except ValueError:
        raise _unclear(text, field) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return _checked(moment.timestamp(), text, field)


def _seconds(found: re.Match[str], field: str) -> float:
    total = 0.0
    for size, unit in _PART.findall(found[2]):
        if unit not in _SECONDS:
            raise _unclear(found[0], field)
        total += float(size) * _SECONDS[unit]
    back = (found[1] == "-") != bool(found[3])
    return -total if back else total


def _checked(moment: float, text: str, field: str) -> float:
    if not -LAST < moment < LAST:
        raise _unclear(text, field)
    return moment


def _unclear(text: str, field: str) -> Problem:
    return invalid(
        field,
        f"{text[:60]!r} is no time: say a span from now such as 1h30m or -5m, or a moment such as "
        "2026-01-31 09:30 (UTC unless it has an offset)",
    )


# -- small charts, as SVG without a style of its own

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
