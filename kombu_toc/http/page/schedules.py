"""Recurring tasks: when they fire, and what can be done to them."""

from __future__ import annotations

from typing import Any

from ..problems import invalid, not_found
from ..request import Answer
from .render import Ask, View, redirect
from .tools import Tools, check_any, check_role
from .words import link, read_time

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
    shown: dict[str, Any] = {"acts": ACTS if ask.visitor.may("operate", None) else {}}
    if name := ask.query.get("name", ""):
        row, firings = await tools.extras.schedule(name)
        if not ask.visitor.may("read", row.queue):
            raise not_found(f"there is no schedule {name!r}")
        shown.update(row=row, firings=firings)
        return View(name, "schedule", shown, "schedules", EVERY, now_us=now_us)
    after = ask.query.get("after", "")
    rows, more = await tools.extras.schedules(ask.visitor.token, PAGE, after)
    shown.update(rows=rows, after=more)
    return View("Schedules", "schedules", shown, "schedules", EVERY, now_us=now_us)


def _check(tools: Tools) -> None:
    if not tools.extras.has_schedules:
        raise not_found("schedules are of an app of Celery: celery -A shop toc web shows them")


async def change(tools: Tools, ask: Ask) -> Answer:
    """Pause, resume, skip or run one."""
    _check(tools)
    check_role(ask, "operate", None)
    name, act = ask.field("name"), ask.field("act")
    who = ask.visitor.name
    given: tuple[float, ...] = ()
    to = link("schedules", name=name) if ask.field("back") else "schedules"
    if act == "backfill":
        now = await tools.now_us() / 1e6
        start = read_time(ask.field("start"), "start", now)
        if start is None:
            raise invalid("start", "it must be a time: 2026-01-31 09:30, or 2 days ago")
        end = read_time(ask.field("end"), "end", now)
        given = (start,) if end is None else (start, end)
    elif act not in ACTS:
        raise invalid("act", f"it must be one of {', '.join(ACTS)}")
    async with tools.audit.doing(who, f"{act} schedule", what=name):
        done = await tools.extras.change_schedule(name, act, who, *given)
    if act == "backfill":
        return redirect(ask, to, f"{name}: {len(done)} firings of the past were sent.")
    return redirect(ask, to, f"{name} {_is(act)}{ACTS[act][1]}.")


def _is(act: str) -> str:
    return "is " if act in ("pause", "resume") else ""
