"""What is done to all that match: how many there are, whether it is meant, how far it has come."""

from __future__ import annotations

from ..request import Answer
from . import words
from .actions import ACTS
from .jobs import ASKING, COUNTING, DONE, FAILED, LOST, RUNNING, STOPPED, Job
from .render import Ask, View, redirect
from .tools import Tools, check_role

#: Milliseconds after which it is looked at again.
EVERY = 500


async def job(tools: Tools, ask: Ask) -> View | Answer:
    """How far something has come that is done to all that match."""
    found = await tools.jobs.get(ask.query.get("id", ""))
    queue = found.selection.queue
    check_role(ask, "read", queue)
    act = ACTS[found.act]
    return View(
        f"{act.title} {found.selection.described()}",
        "job",
        {
            "job": found,
            "act": act,
            "come": _come(found),
            "may": not found.is_over and ask.visitor.may(act.role, queue),
        },
        every=0 if found.is_over else EVERY,
    )


def _come(job: Job) -> str:
    """How far it has come."""
    act = ACTS[job.act]
    done = f"{words.counted(job.number, 'message')} {act.done}"
    missing = job.matching - job.number - job.late
    gone = f" {missing:,} more that were counted are gone, or were moved meanwhile."
    skipped = f" {words.skipped(*job.skipped)}" if job.skipped[1] else ""
    return {
        COUNTING: f"Counting: {job.matching:,} so far, of {job.looked:,} that were looked at.",
        ASKING: f"{words.counted(job.matching, 'message')} "
        f"{'matches' if job.matching == 1 else 'match'}.",
        RUNNING: f"{job.number:,} of {job.matching:,} {act.done}.",
        DONE: f"Done: {done}."
        + (gone if missing > 0 else "")
        + skipped
        + (" More match than were counted: begin it again for those." if job.more else ""),
        STOPPED: f"Stopped: {done}.{skipped}",
        FAILED: f"Failed after {words.counted(job.number, 'message')}: {job.said}",
        LOST: f"Its process is gone; {done} until then. Begin it again for the others.",
    }[job.phase]


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
    return redirect(ask, words.link("job", id=id))
