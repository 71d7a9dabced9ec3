"""All queues: what each holds, what comes due, and who works; why messages were given up on; the
search box of every page; the task library, and the audit log."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import Any, NamedTuple

from ...center.topics import MOST_FAR
from ...model.library import STATUSES, Record
from ...model.results import Counts
from ..fields import going_on, invalid, not_found
from ..library import between, read_attributes, shown_record
from ..request import Answer
from . import snapshots
from .jobs import FIRST
from .presentation import DIED, Ask, View, link, read_time, redirect, render, span
from .snapshots import Row, Snapshot, Tools, acts_of, check_any, check_role

#: Milliseconds after which a viewer looks again.
EVERY = 1_000

#: Queues that are shown; those with the most to do, if there are more.
MOST = 300


async def overview(tools: Tools, ask: Ask) -> View:
    """What there is in all queues that the visitor may look at."""
    name = ask.query.get("span", "hour")
    if name not in snapshots.SPANS:
        raise invalid("span", f"it must be one of {', '.join(snapshots.SPANS)}")
    snapshot = await tools.snapshots.read(name)
    rows = [row for row in snapshot.rows if ask.visitor.may("read", row.queue)]
    known = await tools.far.read()
    far = {row.queue: known[row.queue] for row in rows if row.queue in known}
    trouble = ""
    if tools.snapshots.trouble:
        gone = span(tools.snapshots.age())
        trouble = f"{tools.snapshots.trouble}. What is shown is {gone} old; it is tried again."
    hour = tools.snapshots.drawn(
        snapshot.now_us // 60_000_000,
        tuple(row.queue for row in rows),
        lambda: drawn_hour(
            [snapshots.sum_of(some) for some in zip(*(row.hour for row in rows), strict=True)]
            or [snapshots.IDLE],
            snapshot.now_us,
        ),
    )
    drawn = tools.snapshots.drawn(
        snapshot.number,
        (name, tuple(row.queue for row in rows), tuple(far.items())),
        lambda: render("queues", hour=hour, **_of_queues(rows, name, snapshot, far)),
    )
    processes: dict[str, list[str]] = {}
    for row in rows:
        for one in row.consumers:
            processes.setdefault(one.name, []).append(row.queue)
    asked = tools.extras.has_workers and ask.visitor.may("read", None)
    return View(
        "Overview",
        "overview",
        {
            "drawn": drawn,
            "are_many": len(rows) > MOST,
            "sends": "write" in ask.visitor.token.roles,
            "asked": asked,
            "workers": await tools.extras.workers() if asked else None,
            "processes": sorted(processes.items()),
        },
        "",
        EVERY,
        trouble,
        now_us=snapshot.now_us + round(tools.snapshots.age() * 1e6),
        typed=len(rows) > MOST,
    )


def drawn_hour(minutes: Sequence[snapshots.Minute], now_us: int, *, folded: bool = False) -> str:
    """Charts of the last minutes, and the same as a table.

    minutes: those that are over, the latest last
    folded: show the numbers only, until somebody opens it
    """
    first = now_us // 60_000_000 - len(minutes)
    timed = [((first + place) * 60_000_000, one) for place, one in enumerate(minutes)]
    return render("hour", minutes=timed, total=snapshots.sum_of(minutes), folded=folded)


def _of_queues(
    rows: Sequence[Row], name: str, snapshot: Snapshot, far: Mapping[str, int | None]
) -> dict[str, Any]:
    """What is drawn of a look, for all who see the same queues.

    name: of the span that is drawn
    far: what is in the task library only, of each queue with a horizon; None: it is not known
    """
    drawn = snapshots.SPANS[name]
    edges = [drawn.seconds * place for place in range(drawn.bars + 1)]
    numbers = [0] * drawn.bars
    if name in snapshot.spans:
        ends = [sum(row.due.get(edge, 0) for row in rows) for edge in edges]
        numbers = [max(later - sooner, 0) for sooner, later in itertools.pairwise(ends)]
    totals = Counts(*(sum(getattr(row.counts, one) for row in rows) for one in Counts._fields))
    return {
        "totals": totals,
        "oldest": max((row.oldest for row in rows), default=0.0),
        "due": [
            (one, max(sum(row.due.get(end, row.counts.ready) for row in rows) - totals.ready, 0))
            for one, end in zip(snapshots.SPANS, snapshots.ENDS, strict=True)
        ],
        "spans": snapshots.SPANS,
        "chosen": name,
        "numbers": numbers,
        "far": sorted(far.items()),
        "most_far": MOST_FAR,
        "rows": _busiest(rows),
        "left": max(len(rows) - MOST, 0),
    }


def _busiest(rows: Sequence[Row]) -> Sequence[Row]:
    """Those with the most to do, in their order, if there are too many."""

    def busy(row: Row) -> tuple[float, ...]:
        return row.counts.ready + row.counts.in_flight, row.rate, row.counts.scheduled

    kept = {row.queue for row in nlargest(MOST, rows, busy)}
    return [row for row in rows if row.queue in kept]


# -- dead letters, grouped by why they died, by task and by error

#: Milliseconds after which they are looked at again.
EVERY_DEAD = 5_000

#: Queues that are shown, those with the most dead letters.
QUEUES = 50


async def dead(tools: Tools, ask: Ask) -> View:
    """Why messages were given up on."""
    chosen = ask.query.get("queue", "")
    snapshot = await tools.snapshots.read("hour")
    rows = [
        row
        for row in snapshot.rows
        if row.counts.dead and ask.visitor.may("read", row.queue) and chosen in ("", row.queue)
    ]
    now_us = await tools.now_us()
    began = time.monotonic()
    queues: list[Any] = []
    looked = 0
    for row in sorted(rows, key=lambda row: -row.counts.dead):
        most = min(snapshots.LOOKED, snapshots.LOOKED_IN_ALL - looked)
        if most <= 0 or len(queues) >= QUEUES:
            break
        seen = await tools.dead_letters.look(row.queue, row.counts.dead, most, now_us)
        looked += seen.looked
        queues.append((row, seen, acts_of(ask, row.queue, DIED)))
    return View(
        f"Dead letters of {chosen}" if chosen else "Dead letters",
        "dead",
        {"queues": queues, "left": len(rows) - len(queues)},
        "dead",
        # What takes long is not looked at again all the time.
        max(EVERY_DEAD, round((time.monotonic() - began) * 10_000)),
        now_us=now_us,
    )


# -- the search box of every page: an id, a business id, a task's name, or a queue


#: Hits of each kind that are shown.
MOST_HITS = 50


class Hit(NamedTuple):
    """Something that was found.

    to: the address of its view
    """

    what: str
    name: str
    queue: str
    to: str


async def search(tools: Tools, ask: Ask) -> View | Answer:
    """What has a text as its id, business id, task or queue; the only one at once."""
    check_any(ask, "read")
    text = ask.query.get("q", "").strip()
    found, silent = await _hits(tools, ask, text) if text else ([], "")
    hits = dict.fromkeys(found)
    if len(hits) == 1:
        return redirect(ask, next(iter(hits)).to)
    shown = {"hits": list(hits), "silent": silent}
    return View(text or "Search", "search", shown)


async def _hits(tools: Tools, ask: Ask, text: str) -> tuple[list[Hit], str]:
    """What was found, and what has not answered."""
    may = ask.visitor.may
    ids = [(one.topic, one.id) for one in await tools.center.get(text)]
    failed, missing = await tools.as_far(tools.center.failures.get(text))
    history, silent = await tools.recorded(ask, "history", id=text)
    ids += [(one.topic, one.id) for one in (*failed, *history)]
    hits: list[Hit] = []
    if not silent:
        business, silent = await tools.recorded(ask, "find", biz_id=text, limit=MOST_HITS)
        hits += [Hit("Business id", text, "", link("library", biz=text))] if business else []
    hits += [
        Hit("Message", id, queue, link("message", queue=queue, id=id))
        for queue, id in dict.fromkeys(ids)
        if may("read", queue)
    ][:MOST_HITS]
    queues = await tools.center.queues.names(prefix=text, limit=MOST_HITS)
    queues = [name for name in queues if may("read", name)]
    hits += [Hit("Queue", name, name, link("queue", queue=name)) for name in queues]
    hits += [
        Hit(
            f"{one.number:,} failed, {one.exception}",
            one.task,
            one.topic,
            link("failures", queue=one.topic, task=one.task, exception=one.exception),
        )
        for one in (await tools.failure_groups())[0]
        if text.lower() in one.task.lower() and may("read", one.topic)
    ][:MOST_HITS]
    named, _ = await tools.extras.tasks(True)
    if "." in text or any(text.lower() in one.lower() for one in named):
        task = text if text in named or "." in text else f"*{text}*"
        hits += [
            Hit("Filter of a queue", task, row.queue, link("queue", queue=row.queue, task=task))
            for row in (await tools.snapshots.read("hour")).rows
            if row.counts.ready + row.counts.scheduled and may("read", row.queue)
        ][:MOST_HITS]
    return hits, silent or missing


# -- what is kept beside Redis and of people

#: Records of a page, and entries of the log.
PAGE = 100

#: The name of an entry of the log.
_ENTRY = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")

#: Milliseconds after which the log is looked at again.
EVERY_RECORDS = 5_000


async def library(tools: Tools, ask: Ask) -> View:
    """Find tasks by business id, status, name and time; or all that is known of one."""
    check_role(ask, "read", None)
    if not tools.api.has_library:
        raise not_found("there is no task library: set toc_library in the broker's URL")
    now_us = await tools.now_us()
    query = ask.query
    shown: dict[str, Any] = {"statuses": STATUSES, "after": None, "silent": ""}
    if id := query.get("id", "").strip():
        found = await tools.api.ask_library("history", id)
        shown["nothing"] = f"The library knows no task {id!r}."
    else:
        status = query.get("status") or None
        if status is not None and status not in STATUSES:
            raise invalid("status", f"it must be one of {', '.join(STATUSES)}")
        times = {at: read_time(query.get(at, ""), at, now_us / 1e6) for at in ("since", "until")}
        with going_on(FIRST):
            page = await tools.api.ask_library(
                "find",
                biz_type=query.get("type") or None,
                biz_id=query.get("biz") or None,
                status=status,
                task=query.get("task") or None,
                attributes=read_attributes(query.get("attributes", "")),
                between=between(times),
                limit=PAGE,
                after=query.get("after") or None,
            )
        found, shown["after"], shown["silent"] = page.records, page.after, ", ".join(page.away)
        shown["nothing"] = "The library knows no such task."
    shown["records"] = shown_records(tools, found)
    return View(id or "Task library", "library", shown, "library", now_us=now_us)


def shown_records(tools: Tools, found: Sequence[Record]) -> list[tuple[Record, dict[str, Any]]]:
    """Records, and what may be shown of each."""
    return [(one, shown_record(one, tools.mask)) for one in found]


async def audit(tools: Tools, ask: Ask) -> View:
    """Who has done what."""
    check_role(ask, "read", None)
    now_us = await tools.now_us()
    before = ask.query.get("before", "")
    if before and not _ENTRY.fullmatch(before):
        raise invalid("before", f"no page goes on there; {FIRST}")
    entries, after = await tools.audit.read(PAGE, before)
    return View(
        "Audit log",
        "audit",
        {"entries": entries, "after": after},
        "audit",
        0 if before else EVERY_RECORDS,
        now_us=now_us,
    )
