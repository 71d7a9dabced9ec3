"""Recurring tasks: when they fire, and what can be done to them."""

from __future__ import annotations

from ..problems import invalid, not_found
from ..request import Answer
from . import html
from .html import Markup, h, link, markup
from .layout import Ask, Column, View, badge, details, form, hidden, live, redirect, table
from .reading import ScheduleRow
from .tools import Tools, check_any, check_role

#: Schedules of a page, and milliseconds after which it is looked at again.
PAGE = 100
EVERY = 2_000

#: act -> what is said of it, and the states in which it can be done
ACTS = {
    "pause": ("Pause", "paused", ("active",)),
    "resume": ("Resume", "resumed", ("paused",)),
    "skip": ("Skip next", "will leave out its next firing", ("active",)),
    "run": ("Run now", "was sent", ("active", "paused", "ended")),
}


async def schedules(tools: Tools, ask: Ask) -> View:
    """The schedules of all queues that the visitor may look at, or one with its latest firings."""
    _check(tools)
    check_any(ask, "read")
    now_us = await tools.now_us()
    if name := ask.query.get("name", ""):
        row, firings = await tools.extras.schedule(name)
        if not ask.visitor.may("read", row.queue):
            raise not_found(f"there is no schedule {name!r}")
        return View(
            name,
            markup(
                live(
                    "schedule",
                    details(
                        (
                            ("Task", row.task),
                            ("Fires", f"{row.rule} ({row.zone})" if row.zone else row.rule),
                            ("State", badge(row.state)),
                            ("Queue", h.a(row.queue, href=link("queue", queue=row.queue))),
                            ("Next", html.when(row.next_us, now_us) if row.next_us else None),
                            ("Last", html.when(row.last_us, now_us) if row.last_us else None),
                            ("Runs", html.number(row.runs)),
                            ("Put by", row.owner),
                        )
                    ),
                    _acts(ask, row, link("schedules", name=name)),
                    h.h2("Latest firings"),
                    table(
                        (
                            Column("Planned"),
                            Column("Started"),
                            Column("Outcome"),
                            Column("Why", "wide"),
                        ),
                        (
                            (
                                html.when(one.planned_us, now_us),
                                html.when(one.started_us, now_us) if one.started_us else "-",
                                one.outcome,
                                one.reason,
                            )
                            for one in firings
                        ),
                        nothing="It has not fired yet.",
                    ),
                )
            ),
            "schedules",
            EVERY,
            now_us=now_us,
        )
    after = ask.query.get("after", "")
    rows, more_after = await tools.extras.schedules(ask.visitor.token, PAGE, after)
    more = None
    if more_after is not None:
        more = h.p(h.a("Next page", href=link("schedules", after=more_after), class_="button"))
    return View(
        "Schedules",
        markup(live("schedules", _table_of(ask, rows, now_us), more)),
        "schedules",
        EVERY,
        now_us=now_us,
    )


def _table_of(ask: Ask, rows: list[ScheduleRow], now_us: int) -> Markup:
    return table(
        (
            Column("Name", "wide"),
            Column("Task", "wide"),
            Column("Fires"),
            Column("Queue"),
            Column("State"),
            Column("Next"),
            Column("Last"),
            Column("Runs", "number"),
            Column("", "do"),
        ),
        (
            (
                h.a(one.name, href=link("schedules", name=one.name), class_="open"),
                one.task,
                one.rule,
                one.queue,
                badge(one.state),
                html.when(one.next_us, now_us) if one.next_us else "-",
                html.when(one.last_us, now_us) if one.last_us else "-",
                html.number(one.runs),
                _acts(ask, one, "schedules"),
            )
            for one in rows
        ),
        nothing="There are no schedules: docs/recurring.md says how to put one.",
    )


def _acts(ask: Ask, row: ScheduleRow, back: str) -> Markup | None:
    if not ask.visitor.may("operate", None):
        return None
    return form(
        ask,
        "schedules",
        hidden({"name": row.name, "back": "one" if back != "schedules" else ""}),
        (
            h.button(title, name="act", value=name)
            for name, (title, _, states) in ACTS.items()
            if row.state in states
        ),
        class_="row",
    )


def _check(tools: Tools) -> None:
    if not tools.extras.has_schedules:
        raise not_found("schedules are of an app of Celery: celery -A shop toc web shows them")


async def change(tools: Tools, ask: Ask) -> Answer:
    """Pause, resume, skip or run one."""
    _check(tools)
    check_role(ask, "operate", None)
    name, act = ask.field("name"), ask.field("act")
    if act not in ACTS:
        raise invalid("act", f"it must be one of {', '.join(ACTS)}")
    async with tools.audit.doing(ask.visitor.name, f"{act} schedule", what=name):
        await tools.extras.change_schedule(name, act)
    to = link("schedules", name=name) if ask.field("back") else "schedules"
    return redirect(ask, to, f"{name} {_is(act)}{ACTS[act][1]}.")


def _is(act: str) -> str:
    return "is " if act in ("pause", "resume") else ""
