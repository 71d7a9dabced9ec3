"""What is done to all that match: how many there are, whether it is meant, how far it has come."""

from __future__ import annotations

from ..request import Answer
from . import html
from .actions import ACTS, Act
from .html import Markup, h, link, markup
from .jobs import ASKING, COUNTING, DONE, FAILED, LOST, RUNNING, STOPPED, Job
from .layout import Ask, View, badge, details, form, hidden, live, redirect
from .tools import Tools, check_role

#: Milliseconds after which it is looked at again.
EVERY = 500


async def job(tools: Tools, ask: Ask) -> View | Answer:
    """How far something has come that is done to all that match."""
    found = await tools.jobs.get(ask.query.get("id", ""))
    check_role(ask, "read", found.selection.queue)
    act = ACTS[found.act]
    return View(
        f"{act.title} {found.selection.described()}",
        markup(
            live("job", _facts(found), _controls(ask, found)),
            h.p(h.a("To the queue", href=link("queue", queue=found.selection.queue))),
        ),
        every=0 if found.is_over else EVERY,
    )


def _facts(job: Job) -> Markup:
    act = ACTS[job.act]
    over = {
        COUNTING: f"Counting: {job.matching:,} so far, of {job.looked:,} that were looked at.",
        ASKING: f"{html.counted(job.matching, 'message')} "
        f"{'matches' if job.matching == 1 else 'match'}.",
        RUNNING: f"{job.number:,} of {job.matching:,} {act.done}.",
        DONE: f"Done: {html.counted(job.number, 'message')} {act.done}."
        + _missing(job)
        + _skipped(job)
        + (" More match than were counted: begin it again for those." if job.more else ""),
        STOPPED: f"Stopped: {html.counted(job.number, 'message')} {act.done}." + _skipped(job),
        FAILED: f"Failed after {html.counted(job.number, 'message')}: {job.said}",
        LOST: f"Its process is gone; {html.counted(job.number, 'message')} {act.done} until "
        "then. Begin it again for the others.",
    }
    bar = None
    if job.phase == RUNNING:
        share = min(job.looked, job.matching)
        bar = h.progress(value=share, max=max(job.matching, 1), aria_label="how much is done")
    elif job.phase == COUNTING:
        bar = h.progress(aria_label="counting")
    to = html.moment(round(job.at * 1e6)) if job.at is not None else None
    return markup(
        h.p(badge(job.phase), " ", h.strong(over[job.phase]), role="status"),
        bar,
        h.p(_meant(job, act), class_="about") if job.phase == ASKING and job.matching else None,
        details(
            (
                ("New time", to),
                ("Too late for", f"{job.late:,}: gone, or with a worker" if job.late else None),
                ("By", job.who),
            )
        ),
    )


def _meant(job: Job, act: Act) -> str:
    """To which it would be done."""
    said = "This cannot be taken back. " if act.asks else ""
    if job.more:
        return f"{said}These are the first that match, and there are more: those are left alone."
    return f"{said}It is done to just these: what comes from now on is left alone."


def _missing(job: Job) -> str:
    """What became of those that were counted and not met again."""
    missing = job.matching - job.number - job.late
    if missing <= 0:
        return ""
    return f" {missing:,} more that were counted are gone, or were moved meanwhile."


def _skipped(job: Job) -> str:
    """What becomes of schedules whose next firing was cancelled."""
    return f" {html.skipped(*job.skipped)}" if job.skipped[1] else ""


def _controls(ask: Ask, job: Job) -> Markup | None:
    act = ACTS[job.act]
    if job.is_over or not ask.visitor.may(act.role, job.selection.queue):
        return None
    begin = None
    if job.phase == ASKING:
        begin = form(
            ask,
            "job",
            hidden({"id": job.id, "do": "go"}),
            h.button(
                f"{act.title} {job.matching:,}",
                class_="main danger" if act.asks else "main",
                disabled=not job.matching,
            ),
        )
    stop = form(
        ask,
        "job",
        hidden({"id": job.id, "do": "stop"}),
        h.button("Stop" if job.phase == RUNNING else "Do not"),
    )
    return h.div(begin, stop, class_="acts")


async def control(tools: Tools, ask: Ask) -> Answer:
    """Begin or stop it."""
    id = ask.field("id")
    found = await tools.jobs.get(id)
    check_role(ask, ACTS[found.act].role, found.selection.queue)
    who = ask.visitor.name
    if ask.field("do") == "go":
        await tools.jobs.confirm(id, who)
    elif found.is_meant and not found.is_over:
        # Its own entry says how far it has come, and who has begun it.
        selection = found.selection
        async with tools.audit.doing(
            who, f"stop {found.act} all", selection.queue, selection.described()
        ):
            await tools.jobs.stop(id)
    else:
        await tools.jobs.stop(id)
    return redirect(ask, link("job", id=id))
