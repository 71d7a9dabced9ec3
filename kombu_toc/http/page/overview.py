"""The first view: what each queue holds, what comes due, and who works."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ...center.find import MOST_FAR
from ..problems import invalid
from . import html
from .html import Markup, bars, h, link, markup, sparkline
from .layout import Ask, Column, View, badge, live, opening, table, tabs
from .reading import WorkerRow
from .snapshots import ENDS, SPANS, Row, Snapshot, Span
from .tools import Tools

#: Milliseconds after which a viewer looks again.
EVERY = 1_000

#: Queues that are shown; those with the most to do, if there are more.
MOST = 300

_COLUMNS = (
    Column("Queue", "wide"),
    Column("Ready", "number"),
    Column("Scheduled", "number"),
    Column("In flight", "number"),
    Column("Dead", "number"),
    Column("Oldest", "number"),
    Column("Per second", "number"),
    Column("Last 14 min"),
    Column("Late p50", "number"),
    Column("Late p99", "number"),
    Column("Last 14 min"),
    Column("Consumers", "number"),
)


async def overview(tools: Tools, ask: Ask) -> View:
    """What there is in all queues that the visitor may look at."""
    name = ask.query.get("span", "hour")
    span = SPANS.get(name)
    if span is None:
        raise invalid("span", f"it must be one of {', '.join(SPANS)}")
    snapshot = await tools.snapshots.read(name)
    rows = [row for row in snapshot.rows if ask.visitor.may("read", row.queue)]
    known = await tools.far.read()
    far = {row.queue: known[row.queue] for row in rows if row.queue in known}
    trouble = ""
    if tools.snapshots.trouble is not None:
        gone = html.span(tools.snapshots.age())
        trouble = f"{tools.snapshots.trouble.said}. What is shown is {gone} old; it is tried again."
    drawn = tools.snapshots.drawn(
        snapshot,
        (name, tuple(row.queue for row in rows), tuple(far.items())),
        lambda: markup(
            live("numbers", _cards(rows)),
            live("coming", _coming(rows, name, span, snapshot), _further(far)),
            live("queues", h.h2("Queues"), _queues(rows)),
        ),
    )
    return View(
        "Overview",
        markup(
            drawn,
            opening("queue") if len(rows) > MOST else None,
            live("workers", h.h2("Workers"), await _workers(tools, ask, rows)),
        ),
        "",
        EVERY,
        trouble,
        now_us=snapshot.now_us + round(tools.snapshots.age() * 1e6),
        typed=len(rows) > MOST,
    )


def _cards(rows: Sequence[Row]) -> Markup:
    def total(name: str) -> int:
        return sum(getattr(row.counts, name) for row in rows)

    def due(end: float) -> int:
        return sum(row.due.get(end, row.counts.ready) - row.counts.ready for row in rows)

    oldest = max((row.oldest for row in rows), default=0.0)
    cards = [
        ("ready", html.number(total("ready")), f"oldest {html.span(oldest)}" if oldest else ""),
        ("scheduled", html.number(total("scheduled")), ""),
        ("in flight", html.number(total("in_flight")), "not acknowledged"),
        ("dead", html.number(total("dead")), ""),
    ]
    for name, end in zip(SPANS, ENDS, strict=True):
        article = "an" if name == "hour" else "a"
        cards.append((f"due within {article} {name}", html.number(max(due(end), 0)), ""))
    return h.div(
        (
            h.div(h.b(value), h.span(title, f", {more}" if more else None))
            for title, value, more in cards
        ),
        class_="cards",
    )


def _coming(rows: Sequence[Row], name: str, span: Span, snapshot: Snapshot) -> Markup:
    """The timeline: a bar for each part of a span, from counts by their times."""
    choose = tabs(
        "How far ahead",
        name,
        ((one, f"next {one}", link("./", span=one)) for one in SPANS),
    )
    edges = [span.seconds * place for place in range(span.bars + 1)]
    if name not in snapshot.spans:
        numbers = [0] * span.bars
    else:
        ends = [sum(row.due.get(edge, 0) for row in rows) for edge in edges]
        numbers = [max(later - sooner, 0) for sooner, later in itertools.pairwise(ends)]
    labels = [
        f"{html.counted(number, 'message')} in {html.span(start)} to "
        f"{html.span(start + span.seconds)}"
        for number, start in zip(numbers, edges, strict=False)
    ]
    total = sum(numbers)
    about = f"{html.counted(total, 'message')} due within the next {name}"
    marks = [h.span("now")] + [
        h.span(f"+{html.span(span.whole * part / 4)}") for part in (1, 2, 3, 4)
    ]
    return markup(
        h.h2("Coming due"),
        choose,
        h.div(
            h.p(
                h.strong(about),
                f", at most {html.number(max(numbers))} in {html.span(span.seconds)}",
                class_="about",
            ),
            bars(numbers, labels, about),
            h.div(marks, class_="scale"),
            class_="panel",
        ),
    )


def _further(far: Mapping[str, int | None]) -> Markup | None:
    """What is in the task library only, and so in none of the other numbers.

    far: of each queue with a horizon; None: it is not known
    """
    if not far:
        return None
    told = [
        "the library cannot be asked what there is of " + name
        if number is None
        else f"{html.number(number)}{'+' if number >= MOST_FAR else ''} of {name}"
        for name, number in sorted(far.items())
    ]
    more = f", and {len(told) - 10:,} more queues" if len(told) > 10 else ""
    return h.p(
        "Further ahead than a queue's horizon, in the task library only, and not counted here: ",
        "; ".join(told[:10]),
        f"{more}.",
        id="further",
        class_="dim",
    )


def _queues(rows: Sequence[Row]) -> Markup:
    shown = list(rows)
    if len(shown) > MOST:
        busiest = sorted(
            shown,
            key=lambda row: (
                -row.counts.ready - row.counts.in_flight,
                -row.rate,
                -row.counts.scheduled,
                row.queue,
            ),
        )
        kept = {row.queue for row in busiest[:MOST]}
        shown = [row for row in shown if row.queue in kept]
    drawn = table(
        _COLUMNS,
        map(_cells, shown),
        nothing="There are no queues yet: a worker declares its own when it starts.",
    )
    left = len(rows) - len(shown)
    if left:
        drawn = markup(drawn, h.p(f"... and {left:,} queues with less to do.", class_="dim"))
    return drawn


def _cells(row: Row) -> list[object]:
    counts, late = row.counts, row.late

    def to(state: str, number: int, kind: str = "") -> Markup | str:
        text = html.number(number)
        if not number:
            return h.span(text, class_="dim")
        return h.a(text, href=link("queue", queue=row.queue, state=state), class_=kind or None)

    if row.paused:
        consumers: object = badge("paused")
    elif row.stopped:
        consumers = badge("target stopped")
    elif not row.consumers and row.waiting:
        consumers = h.span("0", class_="warn")
    else:
        consumers = len(row.consumers)
    return [
        h.a(row.queue, href=link("queue", queue=row.queue), class_="open"),
        to("ready", counts.ready, "warn"),
        to("scheduled", counts.scheduled),
        to("in-flight", counts.in_flight),
        to("dead", counts.dead, "bad")
        if not counts.dead
        else h.a(html.number(counts.dead), href=link("dead", queue=row.queue), class_="bad"),
        h.span(html.span(row.oldest), class_="warn" if row.oldest >= 1 else "dim")
        if row.oldest
        else h.span("-", class_="dim"),
        html.number(row.rate),
        sparkline(row.rates, f"deliveries a second, up to {html.number(max(row.rates))}"),
        html.lateness(late.quantile(0.5)),
        html.lateness(late.quantile(0.99)),
        sparkline(row.lates, "how late 99 of 100 were delivered, minute by minute"),
        consumers,
    ]


async def _workers(tools: Tools, ask: Ask, rows: Sequence[Row]) -> Markup:
    """Who consumes which queues; what each holds, if they can be asked."""
    processes: dict[str, list[str]] = {}
    for row in rows:
        for one in row.consumers:
            processes.setdefault(one.name, []).append(row.queue)
    asked = tools.extras.has_workers and ask.visitor.may("read", None)
    told = await tools.extras.workers() if asked else None
    by_process = table(
        (Column("Process", "id"), Column("Queues", "wide")),
        ((name, ", ".join(sorted(queues))) for name, queues in sorted(processes.items())),
        nothing="No process consumes any of these queues: start a worker.",
    )
    if not asked:
        return by_process
    return markup(
        h.p("The workers are asked what they hold.", class_="about")
        if told is None
        else _holdings(told),
        h.details(
            h.summary(f"Processes that consume ({len(processes)})"), by_process, id="processes"
        ),
    )


def _holdings(told: Sequence[WorkerRow]) -> Markup:
    def named(held: Sequence[tuple[str, str]]) -> Markup:
        shown = [h.li(task or "a message", " ", h.code(id)) for id, task in held[:10]]
        if len(held) > 10:
            shown.append(h.li(f"... and {len(held) - 10:,} more"))
        return h.ul(shown, class_="held") if shown else h.span("nothing", class_="dim")

    number = sum(len(one.running) for one in told)
    about = f"{html.counted(number, 'task')} {'runs' if number == 1 else 'run'}. {html.FLIGHT}"
    workers = table(
        (
            Column("Worker", "wide"),
            Column("Queues", "wide"),
            Column("Free", "number"),
            Column("Running", "wide"),
            Column("Fetched besides", "wide"),
        ),
        (
            (
                markup(one.name, " ", badge("paused") if one.paused else None),
                ", ".join(one.queues),
                "-" if one.free is None else one.free,
                named(one.running),
                named(one.held),
            )
            for one in told
        ),
        nothing="No worker has answered.",
    )
    return markup(h.p(about, class_="about") if told else None, workers)
