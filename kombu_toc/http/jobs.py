"""Jobs: what is done to all messages or failed tasks of a queue that match, in steps. A job goes on
when nobody looks; the page shows the same jobs."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from . import fields
from .fields import TEXT, WHOLE, Object, Text, Time, array, described, or_null, record, shown_time
from .page.jobs import ASKING, COUNTING, DONE, FAILED, LOST, RUNNING, STOPPED, Job
from .page.reading import STATES
from .page.selection import ALL_WAITING, ANY, EVERY_ACT, FAILED_ACTS, FAILED_TASK, Selection
from .problems import invalid, not_found
from .request import Answer, Operations, Request, answer
from .tokens import check_role

_PHASES = [COUNTING, ASKING, RUNNING, DONE, STOPPED, FAILED, LOST]

_JOB = record(
    "id queue act what phase matching looked number late by",
    id=TEXT,
    queue=TEXT,
    act={**TEXT, "enum": [*EVERY_ACT]},
    what=described(TEXT, "What it is done to, in words."),
    phase=described(
        {**TEXT, "enum": _PHASES},
        "asking: somebody at the page is asked; lost: its process is gone, so begin it again.",
    ),
    matching=described(WHOLE, "How many match; while counting, so far."),
    looked=described(WHOLE, "How many were looked at, or tried, in this phase."),
    number=described(WHOLE, "How many it was done to."),
    late=described(WHOLE, "For how many it was too late."),
    by=TEXT,
    time=or_null(TEXT, "The new time of what is rescheduled."),
    slots=or_null(WHOLE, "The new number of slots."),
    error=described(TEXT, "Why it has failed."),
    notes=described(
        {"type": "object", "additionalProperties": WHOLE}, "Of retried tasks, what was taken away."
    ),
    skipped=described(array(TEXT), "Some schedules whose next firing was cancelled."),
)

_NEW = Object(
    {
        "act": Text("What is done.", choices=tuple(EVERY_ACT)),
        "state": Text(
            "Only in this state; waiting: scheduled and ready.", choices=(*STATES, ALL_WAITING, ANY)
        ),
        "since": Time("Not before this time: due, or failed."),
        "until": Time("Before this time."),
        "task": Text("Only tasks of this name; * and ? match any.", most=255),
        "exception": Text("Of failed tasks: only with this type of exception.", most=255),
        "text": Text("Of messages: only with this in their arguments.", most=1000),
        "bizId": Text("Of messages: only of this business id.", most=255),
        "time": Time("The new time, to reschedule."),
        "slots": fields.Number("The new number of slots, to reshard.", least=1, whole=True),
        "settle": fields.Number("To reshard: seconds after which producers know of it.", most=3600),
    },
    needed=("act",),
    name="NewJob",
)

OPERATIONS = Operations("jobs")


def _shown(job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "queue": job.selection.queue,
        "act": job.act,
        "what": job.selection.described(),
        **{name: getattr(job, name) for name in ("phase", "matching", "looked", "number", "late")},
        "by": job.who,
        "time": None if job.at is None else shown_time(round(job.at * 1e6)),
        "slots": job.slots or None,
        "error": job.said,
        "notes": job.notes,
        "skipped": [*job.skipped[0]],
    }


def _check(request: Request, act: str) -> None:
    """Raises Problem for a token that may not do this."""
    check_role(request.token, EVERY_ACT[act].role, request.segments[0])


@OPERATIONS.add(
    "POST /v1/queues/{queue}/jobs",
    "Begin a job",
    request=_NEW,
    status=202,
    returns=("It has begun: ask its address, in the header Location, for its phase.", _JOB),
    problems=("not-found", "forbidden", "rate-limited"),
    about="write: to cancel, run and reschedule messages; operate: to requeue and purge what is "
    "dead, to retry and forget failed tasks, and to reshard.",
)
async def begin(api: Any, request: Request) -> Answer:
    """Begin what is done to all that match."""
    said = request.fields()
    act, state = said["act"], said.get("state", ALL_WAITING)
    _check(request, act)
    queue = await api.known_queue(request.segments[0])
    unfit = {"text", "bizId", "state"} if act in FAILED_ACTS else {"exception"}
    unfit.add("settle")
    unfit = {*_NEW.fields} - {"act", "slots", "settle"} if act == "reshard" else unfit
    for name in sorted(unfit & said.keys()):
        raise invalid(name, f"it does not go with the act {act}")
    for name, needs in (("time", "reschedule"), ("slots", "reshard")):
        if (name in said) != (act == needs):
            raise invalid(name, f"it goes with the act {needs}, which needs it")
    if act not in FAILED_ACTS and "state" in said and not EVERY_ACT[act].could(state):
        raise invalid("state", f"nothing that is {state} can be {EVERY_ACT[act].done}")
    selection = Selection(
        queue,
        FAILED_TASK if act in FAILED_ACTS else said.get("state", ANY),
        *(said.get("since"), said.get("until"), said.get("task", ""), said.get("text", "")),
        *(said.get("bizId", ""), "", said.get("exception", "")),
    )
    who = request.token.name or "this machine"
    how = {name: said[name] for name in ("slots", "settle") if name in said}
    job = await api.page.tools.jobs.begin(act, selection, who, said.get("time"), asks=False, **how)
    path = "/".join(quote(part, safe="") for part in (queue, "jobs", job.id))
    location = f"{request.root}/v1/queues/{path}".encode()
    return answer(_shown(job), 202)._replace(headers=((b"location", location),))


@OPERATIONS.add(
    "GET /v1/queues/{queue}/jobs",
    "List jobs",
    returns=("The latest ones.", record("jobs", jobs=array(_JOB))),
    problems=("not-found",),
)
async def list_jobs(api: Any, request: Request) -> Answer:
    """The latest jobs of a queue, those of the page among them, the latest first."""
    queue = await api.known_queue(request.segments[0])
    found = await api.page.tools.jobs.latest()
    return answer({"jobs": [_shown(one) for one in found if one.selection.queue == queue]})


async def _job_of(api: Any, request: Request) -> Job:
    """The job that a path names. Raises Problem."""
    queue, id = request.segments
    found: Job = await api.page.tools.jobs.get(id)
    if found.selection.queue != queue:
        raise not_found(f"queue {queue!r} has no such job")
    return found


@OPERATIONS.add(
    "GET /v1/queues/{queue}/jobs/{id}",
    "Show how far a job has come",
    returns=("The job; it is kept for an hour.", _JOB),
    problems=("not-found",),
)
async def show_job(api: Any, request: Request) -> Answer:
    """How far a job has come."""
    return answer(_shown(await _job_of(api, request)))


@OPERATIONS.add(
    "POST /v1/queues/{queue}/jobs/{id}:stop",
    "Stop a job between two steps",
    act="stop job",
    returns=("The job; it may still be in a step.", _JOB),
    problems=("not-found", "forbidden"),
)
async def stop_job(api: Any, request: Request) -> Answer:
    """Have a job end where it is. It needs the role that began it."""
    found = await _job_of(api, request)
    _check(request, found.act)
    await api.page.tools.jobs.stop(found.id)
    return answer(_shown(await _job_of(api, request)))
