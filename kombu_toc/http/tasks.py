"""Messages: put, get, list, cancel, reschedule, run; and jobs, which do it to all that match."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import quote

from ..errors import MessageError, PutManyError, RateLimitedError, ReplicationError
from ..model.results import IN_FLIGHT, Found, Page, Put
from . import fields as schema
from . import messages
from .fields import TEXT, WHOLE, Problem, described, invalid, not_found, problem_of
from .page import jobs, presentation
from .page.jobs import ALL_WAITING, ANY, EVERY_ACT, FAILED_ACTS, FAILED_TASK, Job, Selection
from .request import Answer, Operations, Request, answer
from .tokens import check_role

#: Messages of one page, and of one request, at most.
MAX_PAGE = 1000
MAX_LIST = 1000

_WHEN = ("scheduleTime", "delay")
BATCH = schema.Object(
    {"tasks": schema.Listed(messages.LISTED_TASK, "The messages, in order.", most=MAX_LIST)},
    needed=("tasks",),
    name="NewTasks",
)
RESCHEDULE = schema.Object(
    {name: messages.NEW_TASK.fields[name] for name in _WHEN}, at_most_one=_WHEN, name="NewTime"
)
_IDS = schema.Listed(schema.Text(most=2000), "The ids of messages.", most=MAX_LIST)
_IN_FLIGHT = schema.Flag("Whether what a consumer has is deleted, too. The consumer is not told.")
CANCELLING = schema.Object(
    {"ids": _IDS, "inFlight": _IN_FLIGHT}, needed=("ids",), name="Cancellation"
)

#: States in a URL -> those of a center.
STATES = {name: state for state, name in messages.STATES.items()}

_CANCELLED = schema.record(
    "cancelled schedules tasks",
    cancelled=described(WHOLE, "How many are deleted."),
    schedules=schema.array(TEXT, "Those whose next firing was among them."),
    tasks=schema.array(schema.record(id=TEXT, state=TEXT, cancelled=schema.FLAG)),
)
PAGE = schema.page_of("tasks", messages.TASK)

#: What is known of a message whose put had no answer.
_PERHAPS = "it was not put, or perhaps not: the broker has not said"
_MOVED = {
    **messages.PUT_TASK,
    "properties": {**messages.PUT_TASK["properties"], "scheduleTime": schema.TIME},
}

OPERATIONS = Operations("tasks")


@OPERATIONS.add(
    "POST /v1/queues/{queue}/tasks",
    role="write",
    request=messages.NEW_TASK,
    returns=("It is kept.", messages.PUT_TASK),
    status=201,
    problems=("unsupported-media-type", "conflict"),
    media=messages.MEDIA,
)
async def put(api: Any, request: Request, queue: str) -> Answer:
    """Put a message.

    A CloudEvent is accepted as well, in binary or structured form: its id is the id of the message,
    and its bytes are the event as structured JSON.
    """
    unique = messages.unique_of(request.asked)
    if request.asked:
        arguments = messages.arguments_of(request.asked, request)
    else:  # nothing was read of an event
        arguments = messages.arguments_of_event(request)
    _check(api, [arguments])
    made = await api.center.put(queue, unique=unique, **arguments)
    return answer(messages.shown_put(queue, made.id, outcome=made.outcome), 201)


@OPERATIONS.add(
    "PUT /v1/queues/{queue}/tasks/{id}",
    role="write",
    request=messages.REPLACING_TASK,
    answers={
        200: ("It has taken the place of another, or this is a repetition.", messages.PUT_TASK),
        201: ("None of its id waited: it is added.", messages.PUT_TASK),
    },
    problems=("conflict",),
)
async def replace(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Put a message in the place of the one of its id that waits.

    The newest message of this id that waits gets the bytes, the time and all else of this one, in
    one step. One that is in flight or dead stays as it is. With an Idempotency-Key a repetition
    changes nothing.
    """
    arguments = messages.arguments_of({**request.asked, "id": id}, request)
    _check(api, [arguments])
    try:
        made = await api.center.put(queue, if_exists="replace", **arguments)
    except MessageError as exc:
        raise Problem("conflict", str(exc), "id") from None
    status = 201 if made.added else 200
    return answer(messages.shown_put(queue, made.id, outcome=made.outcome), status)


def _check(api: Any, given: Sequence[dict[str, Any]]) -> None:
    """Raises Problem for a message that may not be put here."""
    check = api.check_message
    if check is not None:
        for one in given:
            check(one["id"], one["body"])


@OPERATIONS.add(
    "POST /v1/queues/{queue}/tasks:batch",
    role="write",
    request=BATCH,
    returns=(
        "What became of each, in their order.",
        schema.record("tasks", tasks=schema.array(messages.PUT_TASK)),
    ),
    status=201,
)
async def put_batch(api: Any, request: Request, queue: str) -> Answer:
    """Put many messages."""
    tasks = request.asked["tasks"]
    given = [messages.arguments_of(task, request, place) for place, task in enumerate(tasks)]
    _check(api, given)
    for one in given:
        one.pop("token", None)
    try:
        puts = await api.center.put_many(queue, given, token=messages.token_of(request))
    except MessageError as exc:
        raise invalid("tasks", str(exc)) from None
    except (PutManyError, RateLimitedError, ReplicationError) as exc:
        raise _in_part(exc, _shown_puts(queue, given, exc.results)) from exc
    return answer({"tasks": _shown_puts(queue, given, puts)}, 201)


def _shown_puts(
    queue: str, given: Sequence[dict[str, Any]], puts: Iterable[Any]
) -> list[dict[str, Any]]:
    """What became of each message of a list.

    puts: for each a :class:`Put`, or the error that took its place
    """
    shown: list[dict[str, Any]] = []
    for one, made in itertools.zip_longest(given, puts):
        if isinstance(made, Put):
            shown.append(messages.shown_put(queue, made.id, outcome=made.outcome))
        else:
            refused = isinstance(made, RateLimitedError)
            shown.append({"id": one["id"], "error": str(made) if refused else _PERHAPS})
    return shown


def _in_part(exc: Exception, shown: list[dict[str, Any]]) -> Problem:
    """The problem of a list of which some were put."""
    problem = problem_of(exc)
    problem.detail = problem.detail.replace("The error's results say", "tasks says")
    problem.more["tasks"] = shown
    return problem


@OPERATIONS.add(
    "GET /v1/queues/{queue}/tasks/{id}",
    returns=("The message.", messages.TASK),
    problems=("not-found",),
)
async def get(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Read a message."""
    found: list[Found] = await api.center.get(id, topic=queue)
    if not found:
        raise not_found(f"queue {queue!r} has no message {id!r}: it is done, or was never there")
    found.sort(key=lambda one: one.id != id)
    shown = await asyncio.to_thread(api.shown, request.token, found[0])
    if len(found) > 1:
        shown["copies"] = [one.id for one in found[1:]]
    return answer(shown)


@OPERATIONS.add(
    "GET /v1/queues/{queue}/tasks",
    query={
        "state": schema.Text("Only those of this state.", choices=tuple(STATES)),
        "since": schema.Time("Only those whose time is not before this."),
        "until": schema.Time("Only those whose time is before this."),
        **schema.paging(MAX_PAGE, "Messages at most."),
        "bodies": schema.Flag("Whether their bytes are shown.", default=True),
    },
    returns=("A page.", PAGE),
    problems=("not-found",),
)
async def list_tasks(api: Any, request: Request, queue: str) -> Answer:
    """List messages by state and time."""
    await api.known_queue(queue)
    asked = {**request.asked, "state": STATES.get(request.asked.get("state", ""))}
    with_body = asked.pop("bodies")
    page = await messages.read_page(api.center, queue, **asked)
    return answer(await shown_page(api, request, page, with_body=with_body))


async def shown_page(
    api: Any, request: Request, page: Page, *, with_body: bool = True
) -> dict[str, Any]:
    """A page of messages as JSON. They are read in a thread: to expand them takes its time."""
    how: dict[str, Any] = {"with_body": with_body, "budget": messages.DecompressionBudget()}
    shown = (api.shown(request.token, one, **how) for one in page.messages)
    return {"tasks": await asyncio.to_thread(list, shown), "nextPageToken": page.after}


async def cancel(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Delete a message; one that is in flight only if that is asked for."""
    found = await api.acting.cancel(id, topic=queue, in_flight=request.asked["inFlight"])
    if not found:
        raise not_found(f"queue {queue!r} has no message {id!r}: it is done, or was never there")
    if not any(one.deleted for one in found):
        detail = f"message {id!r} is in flight: only inFlight=true deletes it then"
        raise Problem("conflict", detail)
    return answer(_cancelled(found), number=sum(one.deleted for one in found))


for _address in (
    "POST /v1/queues/{queue}/tasks/{id}:cancel",
    "DELETE /v1/queues/{queue}/tasks/{id}",
):
    OPERATIONS.add(
        _address,
        "Cancel a message",
        role="write",
        act="cancel",
        query={"inFlight": _IN_FLIGHT},
        returns=("It is deleted.", _CANCELLED),
        problems=("not-found", "conflict"),
    )(cancel)


@OPERATIONS.add(
    "POST /v1/queues/{queue}/tasks:cancel",
    role="write",
    act="cancel",
    request=CANCELLING,
    returns=("What became of those that there were.", _CANCELLED),
)
async def cancel_many(api: Any, request: Request, queue: str) -> Answer:
    """Cancel many messages."""
    ids, in_flight = request.asked["ids"], request.asked["inFlight"]
    found = await api.acting.cancel(ids, topic=queue, in_flight=in_flight)
    return answer(_cancelled(found), number=sum(one.deleted for one in found))


def _cancelled(found: Sequence[Any]) -> dict[str, Any]:
    tasks = [
        {"id": one.id, "state": messages.STATES[one.state], "cancelled": one.deleted}
        for one in found
    ]
    schedules = sorted({one.schedule for one in found if one.schedule})
    number = sum(one.deleted for one in found)
    return {"cancelled": number, "schedules": schedules, "tasks": tasks}


@OPERATIONS.add(
    "POST /v1/queues/{queue}/tasks/{id}:reschedule",
    role="write",
    act="reschedule",
    request=RESCHEDULE,
    returns=("It has that time.", _MOVED),
    problems=("not-found", "conflict"),
)
async def reschedule(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Give a message another time."""
    asked = request.asked
    if not asked:
        raise invalid("scheduleTime", "say scheduleTime or delay; :run makes it due now")
    return await _move(api, queue, id, at=asked.get("scheduleTime"), delay=asked.get("delay"))


@OPERATIONS.add(
    "POST /v1/queues/{queue}/tasks/{id}:run",
    role="write",
    act="run",
    returns=("It is due.", _MOVED),
    problems=("not-found", "conflict"),
)
async def run(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Make a message due now."""
    return await _move(api, queue, id)


async def _move(api: Any, queue: str, id: str, **when: float | None) -> Answer:
    found = await api.acting.reschedule(id, topic=queue, **when)
    if not found:
        raise not_found(f"queue {queue!r} has no message {id!r}: it is done, or was never there")
    moved = next((one for one in found if one.moved), None)
    if moved is None:
        state = "in flight" if found[0].state == IN_FLIGHT else "dead"
        raise Problem("conflict", f"message {id!r} is {state}: only what waits can be moved")
    shown = messages.shown_put(queue, moved.id)
    return answer({**shown, "scheduleTime": schema.shown_time(moved.time_us)}, number=1)


# -- jobs: what is done to all messages or failed tasks of a queue that match, in steps
#
# A job goes on when nobody looks; the page shows the same jobs.

_JOB = schema.record(
    "id queue act what phase matching looked number late by",
    texts="id queue by",
    act={**TEXT, "enum": [*EVERY_ACT]},
    what=described(TEXT, "What it is done to, in words."),
    phase=described(
        {**TEXT, "enum": [*jobs.PHASES]},
        "asking: somebody at the page is asked; lost: its process is gone, so begin it again.",
    ),
    matching=described(WHOLE, "How many match; while counting, so far."),
    looked=described(WHOLE, "How many were looked at, or tried, in this phase."),
    number=described(WHOLE, "How many it was done to."),
    late=described(WHOLE, "For how many it was too late."),
    time=schema.or_null(TEXT, "The new time of what is rescheduled."),
    slots=schema.or_null(WHOLE, "The new number of slots."),
    error=described(TEXT, "Why it has failed."),
    notes=described(
        {"type": "object", "additionalProperties": WHOLE}, "Of retried tasks, what was taken away."
    ),
    skipped=described(schema.array(TEXT), "Some schedules whose next firing was cancelled."),
)

_NEW = schema.Object(
    {
        "act": schema.Text("What is done.", choices=tuple(EVERY_ACT)),
        "state": schema.Text(
            "Only in this state; waiting: scheduled and ready.",
            choices=(*presentation.STATES, ALL_WAITING, ANY),
        ),
        "since": schema.Time("Not before this time: due, or failed."),
        "until": schema.Time("Before this time."),
        "task": schema.Text("Only tasks of this name; * and ? match any.", most=255),
        "exception": schema.Text("Of failed tasks: only with this type of exception.", most=255),
        "text": schema.Text("Of messages: only with this in their arguments.", most=1000),
        "bizId": schema.Text("Of messages: only of this business id.", most=255),
        "time": schema.Time("The new time, to reschedule."),
        "slots": schema.Number("The new number of slots, to reshard.", least=1, whole=True),
        "settle": schema.Number("To reshard: seconds after which producers know of it.", most=3600),
    },
    needed=("act",),
    name="NewJob",
)

JOBS = Operations("jobs", problems=("not-found",))

#: Members that a job has as attributes.
_OF_JOBS = ("id", "act", "phase", "matching", "looked", "number", "late", "by", "error", "notes")


def _shown(job: Job) -> dict[str, Any]:
    return {
        **schema.members(job, _OF_JOBS, by="who", error="said"),
        "queue": job.selection.queue,
        "what": job.selection.described(),
        "time": None if job.at is None else schema.shown_time(round(job.at * 1e6)),
        "slots": job.slots or None,
        "skipped": [*job.skipped[0]],
    }


def _check_act(request: Request, act: str, queue: str) -> None:
    """Raises Problem for a token that may not do this."""
    check_role(request.token, EVERY_ACT[act].role, queue)


@JOBS.add(
    "POST /v1/queues/{queue}/jobs",
    request=_NEW,
    status=202,
    returns=("It has begun: ask its address, in the header Location, for its phase.", _JOB),
    problems=("not-found", "forbidden", "rate-limited"),
)
async def begin(api: Any, request: Request, queue: str) -> Answer:
    """Begin a job.

    write: to cancel, run and reschedule messages; operate: to requeue and purge what is dead, to
    retry and forget failed tasks, and to reshard.
    """
    said = request.asked
    act, state = said["act"], said.get("state", ALL_WAITING)
    _check_act(request, act, queue)
    await api.known_queue(queue)
    unfit = {"text", "bizId", "state"} if act in FAILED_ACTS else {"exception"}
    if act == "reshard":
        unfit = {*_NEW.fields} - {"act", "slots"}
    for name in sorted((unfit ^ {"settle"}) & said.keys()):
        raise invalid(name, f"it does not go with the act {act}")
    for name, needs in (("time", "reschedule"), ("slots", "reshard")):
        if (name in said) != (act == needs):
            raise invalid(name, f"it goes with the act {needs}, which needs it")
    if act not in FAILED_ACTS and "state" in said and not EVERY_ACT[act].could(state):
        raise invalid("state", f"nothing that is {state} can be {EVERY_ACT[act].done}")
    selection = Selection(
        queue,
        FAILED_TASK if act in FAILED_ACTS else said.get("state", ANY),
        **{name: said[name] for name in ("since", "until", "task", "text") if name in said},
        biz=said.get("bizId", ""),
        error=said.get("exception", ""),
    )
    who = request.token.name or "this machine"
    how = {name: said[name] for name in ("slots", "settle") if name in said}
    job = await api.page.tools.jobs.begin(act, selection, who, said.get("time"), asks=False, **how)
    path = "/".join(quote(part, safe="") for part in (queue, "jobs", job.id))
    location = f"{request.root}/v1/queues/{path}".encode()
    return answer(_shown(job), 202)._replace(headers=((b"location", location),))


@JOBS.add(
    "GET /v1/queues/{queue}/jobs",
    returns=("The latest ones.", schema.record("jobs", jobs=schema.array(_JOB))),
)
async def list_jobs(api: Any, request: Request, queue: str) -> Answer:
    """List jobs."""
    await api.known_queue(queue)
    found = await api.page.tools.jobs.latest()
    return answer({"jobs": [_shown(one) for one in found if one.selection.queue == queue]})


async def _job_of(api: Any, queue: str, id: str) -> Job:
    """The job that a path names. Raises Problem."""
    found: Job = await api.page.tools.jobs.get(id)
    if found.selection.queue != queue:
        raise not_found(f"queue {queue!r} has no such job")
    return found


@JOBS.add(
    "GET /v1/queues/{queue}/jobs/{id}",
    returns=("The job; it is kept for an hour.", _JOB),
)
async def show_job(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Show how far a job has come."""
    return answer(_shown(await _job_of(api, queue, id)))


@JOBS.add(
    "POST /v1/queues/{queue}/jobs/{id}:stop",
    act="stop job",
    returns=("The job; it may still be in a step.", _JOB),
    problems=("not-found", "forbidden"),
)
async def stop_job(api: Any, request: Request, queue: str, id: str) -> Answer:
    """Stop a job between two steps."""
    found = await _job_of(api, queue, id)
    _check_act(request, found.act, queue)
    await api.page.tools.jobs.stop(found.id)
    return answer(_shown(await _job_of(api, queue, id)))
