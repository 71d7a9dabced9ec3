"""Messages: put, get, list, cancel, reschedule, run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import MessageError, PutManyError, RateLimitedError, ReplicationError
from ..model.results import DEAD, IN_FLIGHT, WAITING, Found, Page, Put
from . import cloudevents
from .fields import Flag, Listed, Number, Object, Text, Time, shown_time
from .messages import (
    LISTED_TASK,
    NEW_TASK,
    PUT_TASK,
    TASK,
    Room,
    arguments_of,
    shown_put,
    trace_of,
    unique_of,
    without_trace,
)
from .operations import Operation, answer, read_body, read_query
from .problems import Problem, invalid, not_found, problem_of
from .requests import Answer, Request

#: Messages of one page, and of one request, at most.
MAX_PAGE = 1000
MAX_LIST = 1000

#: Bytes that the bodies of a page have, from which on it ends; messages that are read at a time.
PAGE_BYTES = 8 << 20
_STEP = 50

_WHEN = ("scheduleTime", "delay")
BATCH = Object(
    {"tasks": Listed(LISTED_TASK, "The messages, in order.", most=MAX_LIST)},
    needed=("tasks",),
    name="NewTasks",
)
RESCHEDULE = Object(
    {name: NEW_TASK.fields[name] for name in _WHEN}, at_most_one=_WHEN, name="NewTime"
)
_IDS = Listed(Text(most=2000), "The ids of messages.", most=MAX_LIST)
IDS = Object({"ids": _IDS}, needed=("ids",), name="Ids")

#: States in a URL -> those of a center.
STATES = {"waiting": WAITING, "inFlight": IN_FLIGHT, "dead": DEAD}

_CANCELLED = {
    "type": "object",
    "required": ["cancelled", "tasks"],
    "properties": {
        "cancelled": {"type": "integer", "description": "How many are deleted."},
        "tasks": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "state": {"type": "string"},
                    "cancelled": {"type": "boolean"},
                },
            },
        },
    },
}
PAGE = {
    "type": "object",
    "required": ["tasks", "nextPageToken"],
    "properties": {
        "tasks": {"type": "array", "items": TASK},
        "nextPageToken": {
            "type": ["string", "null"],
            "description": "The parameter after of the next page; null: this is the last one.",
        },
    },
}


async def put(api: Any, request: Request) -> Answer:
    """Put a message."""
    queue = request.segments[0]
    if cloudevents.is_event(request):
        arguments = cloudevents.arguments_of(request)
        unique = None
    else:
        task = read_body(PUT, request)
        arguments = arguments_of(task, request)
        unique = unique_of(task)
    _check(api, [arguments])
    if there := await _traced_before(api, request, queue, [arguments]):
        return answer(shown_put(queue, there[arguments["id"]]), 201)
    id = await api.center.put(queue, unique=unique, **arguments)
    return answer(shown_put(queue, id), 201)


def _check(api: Any, messages: Sequence[dict[str, Any]]) -> None:
    """Raises Problem for a message that may not be put here."""
    check = api.check_message
    if check is not None:
        for one in messages:
            check(one["id"], one["body"])


async def _traced_before(
    api: Any, request: Request, queue: str, messages: Sequence[dict[str, Any]]
) -> dict[str, str]:
    """Of messages that belong to a trace, those that are there already but for their place in it:
    their bytes differ, so the broker would take them for others. Id -> the id it is kept under."""
    if not trace_of(request) or await api.center.declared(queue) is None:
        return {}
    wanted = {one["id"]: without_trace(one["body"], one["id"]) for one in messages}
    there = {}
    for found in await api.center.get(list(wanted), topic=queue):
        for id in (found.id, found.id.rpartition("#")[0]):
            if id in wanted and without_trace(found.body, found.id) == wanted[id]:
                there[id] = found.id
    return there


async def put_batch(api: Any, request: Request) -> Answer:
    """Put many messages, with an answer for each."""
    queue = request.segments[0]
    tasks = read_body(PUT_BATCH, request)["tasks"]
    messages = [arguments_of(task, request, place) for place, task in enumerate(tasks)]
    _check(api, messages)
    there = await _traced_before(api, request, queue, messages)
    new = [one for one in messages if one["id"] not in there] if there else messages
    try:
        puts = await api.center.put_many(queue, new)
    except MessageError as exc:
        raise invalid("tasks", str(exc)) from None
    except (PutManyError, RateLimitedError, ReplicationError) as exc:
        raise _in_part(exc, _shown_puts(queue, messages, there, exc.results)) from exc
    return answer({"tasks": _shown_puts(queue, messages, there, puts)}, 201)


def _shown_puts(
    queue: str, messages: Sequence[dict[str, Any]], there: dict[str, str], puts: Iterable[Any]
) -> list[dict[str, Any]]:
    """What became of each message of a list.

    there: of those that were there already, under which id
    puts: for each of the others, a :class:`Put`, or the error that took its place
    """
    rest = iter(puts)
    shown: list[dict[str, Any]] = []
    for one in messages:
        if one["id"] in there:
            shown.append(shown_put(queue, there[one["id"]], added=False))
        elif isinstance(made := next(rest, None), Put):
            shown.append(shown_put(queue, made.id, added=made.added))
        else:
            refused = isinstance(made, RateLimitedError)
            shown.append({"id": one["id"], "error": str(made) if refused else _PERHAPS})
    return shown


#: What is known of a message whose put had no answer.
_PERHAPS = "it was not put, or perhaps not: the broker has not said; put it again"


def _in_part(exc: Exception, shown: list[dict[str, Any]]) -> Problem:
    """The problem of a list of which some were put."""
    problem = problem_of(exc)
    problem.detail = problem.detail.replace("The error's results say", "tasks says")
    problem.more["tasks"] = shown
    return problem


async def get(api: Any, request: Request) -> Answer:
    """Read one message."""
    queue, id = request.segments
    found: list[Found] = await api.center.get(id, topic=queue)
    if not found:
        raise not_found(f"queue {queue!r} has no message {id!r}: it is done, or was never there")
    found.sort(key=lambda one: one.id != id)
    shown = api.shown(request.token, found[0])
    if len(found) > 1:
        shown["copies"] = [one.id for one in found[1:]]
    return answer(shown)


async def list_tasks(api: Any, request: Request) -> Answer:
    """Read messages by state and time, in the order of their times."""
    asked = read_query(LIST, request.query)
    queue = await api.known_queue(request.segments[0])
    state = asked.get("state")
    page = await read_page(
        api,
        queue,
        state=None if state is None else STATES[state],
        since=asked.get("since"),
        until=asked.get("until"),
        limit=asked.get("limit", 100),
        after=asked.get("after"),
    )
    with_body = asked.get("bodies", True)
    return answer(shown_page(api, request, page, with_body=with_body))


def shown_page(api: Any, request: Request, page: Page, *, with_body: bool = True) -> dict[str, Any]:
    room, token = Room(), request.token
    return {
        "tasks": [api.shown(token, one, with_body=with_body, room=room) for one in page.messages],
        "nextPageToken": page.after,
    }


async def read_page(api: Any, queue: str, *, limit: int, after: str | None, **how: Any) -> Page:
    """A page of messages, bounded in number and in bytes. Raises Problem for an `after` that no
    page has."""
    found: list[Found] = []
    size = 0
    while True:
        try:
            step = min(_STEP, limit - len(found))
            page = await api.center.scan(
                queue, limit=step, after=after, size=PAGE_BYTES - size, **how
            )
        except ValueError:
            raise invalid("after", "no page goes on there; use the nextPageToken of one") from None
        found += page.messages
        size += sum(len(one.body) for one in page.messages)
        after = page.after
        if after is None or len(found) >= limit or size >= PAGE_BYTES:
            return Page(found, after)


async def cancel(api: Any, request: Request) -> Answer:
    """Delete a message, unless it is in flight."""
    queue, id = request.segments
    found = await api.acting.cancel(id, topic=queue)
    if not found:
        raise not_found(f"queue {queue!r} has no message {id!r}: it is done, or was never there")
    if not any(one.deleted for one in found):
        raise Problem("conflict", f"message {id!r} is in flight: it is too late to cancel it")
    return answer(_cancelled(found))


async def cancel_many(api: Any, request: Request) -> Answer:
    """Delete messages, but for those in flight."""
    ids = read_body(CANCEL_MANY, request)["ids"]
    found = await api.acting.cancel(ids, topic=request.segments[0])
    return answer(_cancelled(found))


def _cancelled(found: Sequence[Any]) -> dict[str, Any]:
    names = {value: name for name, value in STATES.items()}
    tasks = [{"id": one.id, "state": names[one.state], "cancelled": one.deleted} for one in found]
    return {"cancelled": sum(one.deleted for one in found), "tasks": tasks}


async def reschedule(api: Any, request: Request) -> Answer:
    """Give a waiting message another time."""
    fields = read_body(RESCHEDULE_TASK, request)
    if not fields:
        raise invalid("scheduleTime", "say scheduleTime or delay; :run makes it due now")
    return await _move(api, request, at=fields.get("scheduleTime"), delay=fields.get("delay"))


async def run(api: Any, request: Request) -> Answer:
    """Make a waiting message due now."""
    return await _move(api, request)


async def _move(api: Any, request: Request, **when: float | None) -> Answer:
    queue, id = request.segments
    found = await api.acting.reschedule(id, topic=queue, **when)
    if not found:
        raise not_found(f"queue {queue!r} has no message {id!r}: it is done, or was never there")
    moved = next((one for one in found if one.moved), None)
    if moved is None:
        state = "in flight" if found[0].state == IN_FLIGHT else "dead"
        raise Problem("conflict", f"message {id!r} is {state}: only what waits can be moved")
    shown = shown_put(queue, moved.id)
    return answer({**shown, "scheduleTime": shown_time(moved.time_us)})


_TASKS = ("v1", "queues", "{queue}", "tasks")
_ONE = (*_TASKS, "{id}")
_MOVED = {
    **PUT_TASK,
    "properties": {
        **PUT_TASK["properties"],
        "scheduleTime": {"type": "string", "format": "date-time"},
    },
}

PUT = Operation(
    "POST",
    _TASKS,
    put,
    "Put a message",
    role="write",
    request=NEW_TASK,
    answers={201: ("It is kept.", PUT_TASK)},
    problems=("unsupported-media-type", "conflict"),
    media=cloudevents.MEDIA,
    about="A CloudEvent is accepted as well, in binary or structured form: its id is the id of the "
    "message, and its bytes are the event as structured JSON.",
)
PUT_BATCH = Operation(
    "POST",
    _TASKS,
    put_batch,
    "Put many messages",
    role="write",
    verb="batch",
    request=BATCH,
    answers={
        201: (
            "What became of each, in their order.",
            {
                "type": "object",
                "required": ["tasks"],
                "properties": {"tasks": {"type": "array", "items": PUT_TASK}},
            },
        )
    },
)
LIST = Operation(
    "GET",
    _TASKS,
    list_tasks,
    "List messages by state and time",
    query={
        "state": Text("Only those of this state.", choices=tuple(STATES)),
        "since": Time("Only those whose time is not before this."),
        "until": Time("Only those whose time is before this."),
        "limit": Number("Messages at most.", least=1, most=MAX_PAGE, whole=True, default=100),
        "after": Text("The nextPageToken of the page before.", most=4000),
        "bodies": Flag("Whether their bytes are shown.", default=True),
    },
    answers={200: ("A page.", PAGE)},
    problems=("not-found",),
)
GET = Operation(
    "GET",
    _ONE,
    get,
    "Read a message",
    answers={200: ("The message.", TASK)},
    problems=("not-found",),
)
CANCEL = Operation(
    "DELETE",
    _ONE,
    cancel,
    "Cancel a message",
    role="write",
    answers={200: ("It is deleted.", _CANCELLED)},
    problems=("not-found", "conflict"),
)
CANCEL_BY_POST = Operation(
    "POST",
    _ONE,
    cancel,
    "Cancel a message",
    role="write",
    verb="cancel",
    answers={200: ("It is deleted.", _CANCELLED)},
    problems=("not-found", "conflict"),
)
CANCEL_MANY = Operation(
    "POST",
    _TASKS,
    cancel_many,
    "Cancel many messages",
    role="write",
    verb="cancel",
    request=IDS,
    answers={200: ("What became of those that there were.", _CANCELLED)},
)
RESCHEDULE_TASK = Operation(
    "POST",
    _ONE,
    reschedule,
    "Give a message another time",
    role="write",
    verb="reschedule",
    request=RESCHEDULE,
    answers={200: ("It has that time.", _MOVED)},
    problems=("not-found", "conflict"),
)
RUN = Operation(
    "POST",
    _ONE,
    run,
    "Make a message due now",
    role="write",
    verb="run",
    answers={200: ("It is due.", _MOVED)},
    problems=("not-found", "conflict"),
)

OPERATIONS = (
    PUT,
    PUT_BATCH,
    LIST,
    GET,
    CANCEL,
    CANCEL_BY_POST,
    CANCEL_MANY,
    RESCHEDULE_TASK,
    RUN,
)
