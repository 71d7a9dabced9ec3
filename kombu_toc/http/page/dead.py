"""Dead letters of all queues, grouped by why they died, by task and by error."""

from __future__ import annotations

import time
from collections.abc import Iterable

from . import html
from .actions import ACTS
from .dead_letter_groups import LOOKED, LOOKED_IN_ALL, Group
from .html import Markup, h, link, markup
from .layout import Ask, Column, View, badge, form, hidden, live, table
from .reading import DIED
from .tools import Tools

#: Milliseconds after which they are looked at again.
EVERY = 5_000

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
    parts: list[Markup] = []
    looked = 0
    for row in sorted(rows, key=lambda row: -row.counts.dead):
        most = min(LOOKED, LOOKED_IN_ALL - looked)
        if most <= 0 or len(parts) >= QUEUES:
            left = len(rows) - len(parts)
            parts.append(h.p(f"... and {html.counted(left, 'queue')} with fewer.", class_="about"))
            break
        seen = await tools.dead_letters.look(row.queue, row.counts.dead, most, now_us)
        looked += seen.looked
        parts.append(
            markup(
                h.h2(
                    h.a(row.queue, href=link("queue", queue=row.queue, state=DIED)),
                    " ",
                    badge(f"{row.counts.dead:,} dead"),
                ),
                h.p(seen.which, class_="about") if seen.which else None,
                _table_of(ask, seen.groups, now_us),
            )
        )
    content = parts or h.p("Nothing is dead.", class_="nothing")
    return View(
        f"Dead letters of {chosen}" if chosen else "Dead letters",
        markup(live("dead", content)),
        "dead",
        # What takes long is not looked at again all the time.
        max(EVERY, round((time.monotonic() - began) * 10_000)),
        now_us=now_us,
    )


def _table_of(ask: Ask, groups: Iterable[Group], now_us: int) -> Markup:
    return table(
        (
            Column("Number", "number"),
            Column("Task", "wide"),
            Column("Reason", "wide"),
            Column("Error", "wide mono"),
            Column("Last"),
            Column("", "do"),
        ),
        (
            (
                h.a(
                    html.number(one.number),
                    href=link(
                        "queue",
                        queue=one.queue,
                        state=DIED,
                        task=one.task,
                        reason=one.reason,
                        error=one.error,
                        alike=1,
                    ),
                    class_="open",
                ),
                one.task or h.span("no task", class_="dim"),
                one.reason,
                one.error or h.span("-", class_="dim"),
                html.when(one.last_us, now_us),
                _acts(ask, one),
            )
            for one in groups
        ),
        nothing="Nothing is dead.",
    )


def _acts(ask: Ask, group: Group) -> Markup | None:
    acts = [ACTS[name] for name in ("requeue", "purge")]
    allowed = [act for act in acts if ask.visitor.may(act.role, group.queue)]
    if not allowed:
        return None
    return form(
        ask,
        "all",
        hidden(
            {
                "queue": group.queue,
                "state": DIED,
                "task": group.task,
                "reason": group.reason,
                "error": group.error,
                "alike": 1,
            }
        ),
        (
            h.button(act.title, name="act", value=act.name, class_="danger" if act.asks else None)
            for act in allowed
        ),
        class_="row",
    )
