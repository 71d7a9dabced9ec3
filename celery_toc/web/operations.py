"""What knows Celery over HTTP: tasks, which are sent as Celery sends them, and their results; and
schedules."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from celery import VERSION as celery_version
from celery.backends.base import DisabledBackend
from celery.exceptions import QueueNotFound
from celery.schedules import solar
from kombu import serialization
from kombu.exceptions import EncodeError, KombuError, OperationalError
from kombu.utils import json as kombu_json

from kombu_toc import ActionTimeError, EnvelopeError, http, unpack

from .. import aio
from ..schedules import state
from ..schedules.rules import ScheduleError, UnknownScheduleError, read_cron

if TYPE_CHECKING:
    from celery import Celery

    from ..schedules.state import Schedule

#: The kinds of fields, and of answers.
schema = http.fields

# -- tasks

NEW_TASK = schema.Object(
    {
        "task": schema.Text("The name of a task that may be sent.", most=500),
        "args": schema.Anything("Its arguments.", of=("array",)),
        "kwargs": schema.Anything("Its arguments by name.", of=("object",)),
        "id": schema.Text("Its id; one is made unless given.", most=500),
        "eta": schema.Time("When it is to run."),
        "countdown": schema.Number("Instead of eta: seconds from now.", most=7e9),
        "queue": schema.Text("Its queue, unless its routes say it.", most=500),
        "priority": schema.Number("0 goes first.", most=255, whole=True),
        "expires": schema.Number("Seconds after which no worker starts it.", least=0.001, most=7e9),
        "headers": schema.Headers("Headers of its message; their names begin with x-."),
    },
    needed=("task",),
    at_most_one=("eta", "countdown"),
    name="NewCeleryTask",
)


class Allowed:
    """The tasks of an app that may be sent.

    allow: their names, or patterns
    """

    def __init__(self, app: Celery, allow: Iterable[str]) -> None:
        self.app = app
        self.name = app.main or "celery"
        self._allow = tuple(allow)
        #: a result backend need not be safe for threads: one asks it
        self.results = ThreadPoolExecutor(1, "toc-web-results")

    @property
    def recurring(self) -> Any:
        """The schedules of the app, awaited."""
        return aio.timeout_center(self.app).schedules

    def check_app(self, name: str) -> None:
        """Raises Problem for the name of another app."""
        if name != self.name:
            raise schema.not_found(f"the app is {self.name!r}, not {name!r}")

    def allows(self, task: str) -> bool:
        return http.matches(task, self._allow)

    def check(self, task: str) -> None:
        """Raises Problem for a task that may not be sent."""
        if not self.allows(task):
            raise http.Problem(
                "forbidden",
                f"the task {task[:100]!r} is not among those that may be sent: "
                "celery toc web --allow NAME allows it",
                "task",
            )

    def check_message(self, id: str, raw: bytes) -> None:
        """Raises Problem for a message that a worker would read as a task: whoever sends it would
        choose its name, what follows it and how its arguments are decoded.

        It goes by what a worker does with the bytes, whatever they were made of.
        """
        if raw[:1] in _DEFLATED or (raw[:1] == b"{" and _is_task(id, raw)):
            raise http.Problem(
                "forbidden",
                "a worker may read this message as a task; "
                f"POST /v1/apps/{self.name}/tasks sends tasks, those that are allowed",
            )

    async def result(self, id: str, masking: Any = None) -> dict[str, Any]:
        """What the result backend knows of a task.

        masking: what hides it from who asks; None: nothing is hidden
        """
        if isinstance(self.app.backend, DisabledBackend):
            raise schema.not_found("the app has no result backend")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.results, self._ask, id, masking)

    def _ask(self, id: str, masking: Any) -> dict[str, Any]:
        found = self.app.AsyncResult(id)
        shown: dict[str, Any] = {"id": id, "state": found.state}
        if found.state in ("SUCCESS", "FAILURE"):
            value, done = found.result, found.date_done
            if isinstance(done, datetime):
                shown["doneTime"] = _utc(self.app, done).isoformat().replace("+00:00", "Z")
            if found.state == "FAILURE":
                error = f"{type(value).__name__}: {value}"
                shown["error"] = error if masking is None else masking.error(error)
            else:
                result = _as_json(value)
                shown["result"] = result if masking is None else _hidden(masking, found, result)
        return shown


def _as_json(value: Any) -> Any:
    """A result as JSON has it; one with what JSON has no form for, as Python writes that."""
    try:
        return json.loads(json.dumps(value, default=repr))
    except (TypeError, ValueError, RecursionError):  # a key that is no text, or a circle
        return repr(value)


def _utc(app: Celery, done: datetime) -> datetime:
    """When a task was done, as its result backend says it. A database may keep no time zone: then
    it is that in which Celery reads the clock, which was UTC before 5.5."""
    if done.tzinfo is None:
        done = done.replace(tzinfo=app.timezone if celery_version >= (5, 5) else timezone.utc)
    return done.astimezone(timezone.utc)


def _hidden(masking: Any, found: Any, result: Any) -> Any:
    """A result without what is hidden. The backend knows the arguments with Celery's setting
    ``result_extended``."""
    name, args, kwargs = found.name, found.args, found.kwargs
    is_known = name is not None and isinstance(args, (list, tuple)) and isinstance(kwargs, dict)
    if is_known:
        masking.args(name, args)
        masking.kwargs(kwargs)
    return masking.result(result, is_known=is_known)


#: What a message begins with that is kept compressed: only its stored id tells what it holds.
_DEFLATED = (b"\x01", b"\x02")


def _is_task(id: str, raw: bytes) -> bool:
    """Whether a worker might read a message as a task, of protocol 2 or 1."""
    line, newline, _ = raw.partition(b"\n")
    if not newline or _parses(line) is False:
        return False  # no envelope to any worker
    try:
        message = unpack(raw, id)
    except EnvelopeError:
        # It may be one to a worker: it parses more, or knows a type that is registered there.
        return b'"__type__"' in line or _parses(line) is None
    headers, kind = message["headers"], message["content-type"]
    if "task" in headers or "compression" in headers or message["properties"]:
        return True
    serializer = serialization.registry.type_to_name.get(kind) if isinstance(kind, str) else None
    if serializer in (None, "raw"):
        return False
    if serializer != "json":
        return True  # perhaps with pickle: what it holds is known when it is too late
    try:
        body = kombu_json.loads(message["body"])
    except Exception:
        return _parses(message["body"]) is not False
    return isinstance(body, Mapping) and isinstance(body.get("task"), str)


def _parses(text: bytes) -> bool | None:
    """Whether a text is JSON; None: another Python may read it. How deep it may be nested, and how
    long an integer may be, differs; what is no JSON to one is none to all."""
    try:
        json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    except (ValueError, RecursionError):
        return None
    return True


async def send(
    app: Celery, fields: Mapping[str, Any], token: http.Token, request: http.Request
) -> tuple[str, str]:
    """Send a task as Celery does; return its id and its queue. Raises Problem.

    fields: as NEW_TASK reads them
    token: of who sends it
    """
    name, args, kwargs = fields["task"], fields.get("args", []), fields.get("kwargs", {})
    options = _options(app, fields, request)
    queue, alone = queue_of(app, name, args, kwargs, options)
    if not token.allows("write", queue if alone else None):
        where = f"of queue {queue!r}"
        if not alone:
            where = f"of all queues: an exchange decides where {queue!r} leads to"
        raise http.Problem("forbidden", f"this needs a token with the role write {where}")
    signature = app.signature(name, args=args, kwargs=kwargs)
    try:
        with _traced(request):
            await aio.send(signature, **options)
    except (TypeError, EncodeError) as exc:  # arguments that the task does not take
        raise schema.invalid("args", str(exc)) from None
    except ActionTimeError as exc:
        raise schema.invalid("countdown" if "countdown" in fields else "eta", str(exc)) from None
    except OperationalError as exc:
        detail = "the broker cannot be reached or refuses this for now; try again later"
        raise http.Problem("broker", detail, headers=schema.retry_after(1)) from exc
    return options["task_id"], queue


@contextmanager
def _traced(request: http.Request) -> Iterator[None]:
    """While a task is sent: in the trace that its request names, if this process makes any. What
    makes a span for ``apply_async`` goes by it, and writes over the task's headers."""
    headers = http.trace_of(request)
    if not headers or "opentelemetry.propagate" not in sys.modules:
        yield
        return
    from opentelemetry import context, propagate, trace

    if trace.get_current_span().get_span_context().is_valid:  # of whoever serves the request
        yield
        return
    token = context.attach(propagate.extract(headers))
    try:
        yield
    finally:
        context.detach(token)


def _options(app: Celery, fields: Mapping[str, Any], request: http.Request) -> dict[str, Any]:
    """The options of ``apply_async``. Raises Problem."""
    options: dict[str, Any] = {"task_id": http.id_of(fields, request)}
    for name in ("countdown", "queue", "priority", "expires"):
        if name in fields:
            options[name] = fields[name]
    if "eta" in fields:
        try:
            options["eta"] = datetime.fromtimestamp(fields["eta"], timezone.utc)
        except ValueError:  # no calendar of Python's has it; far too late for a broker, too
            raise schema.invalid(
                "eta", "it is beyond the year 9999; choose an earlier eta"
            ) from None
    headers = fields.get("headers", {})
    for name in headers:
        # What Celery writes there says which task it is: nobody else shall.
        if not name.startswith("x-") or name == "x-schedule":
            raise schema.invalid(f"headers.{name[:100]}", "names of headers begin with x-")
    if headers := {**http.trace_of(request), **headers}:
        options["headers"] = headers
    task = app.tasks.get(fields["task"])
    if (getattr(task, "serializer", None) or app.conf.task_serializer) != "json":
        options["serializer"] = "json"
    return options


def queue_of(
    app: Celery, name: str, args: Any, kwargs: Any, options: Mapping[str, Any]
) -> tuple[str, bool]:
    """The queue that a task goes to, and True; or the routing key with which it goes to an
    exchange, whose bindings say where, and False. Raises Problem."""
    task = app.tasks.get(name)
    given = {}
    for part in ("queue", "exchange", "routing_key"):
        said = options.get(part) or getattr(task, part, None)
        if said:
            given[part] = said
    try:
        routed = app.amqp.router.route(given, name, args, kwargs, task)
    except QueueNotFound as exc:
        raise schema.invalid("queue", str(exc)) from None
    queue, key, exchange = (routed.get(part) for part in ("queue", "routing_key", "exchange"))
    # As Celery does: with an exchange of type direct, what lacks one of them goes to the queue.
    if queue is None and exchange is not None:
        return str(key or exchange), False
    queue = queue or app.amqp.queues[app.conf.task_default_queue]
    if (routed.get("exchange_type") or queue.exchange.type) == "direct" and not (key and exchange):
        return queue.name, True
    return str(key or queue.routing_key), False


_SENT = schema.record("name id task queue", texts="name id task queue")
_RESULT = schema.record("id state", texts="id state error doneTime", result=schema.ANYTHING)


TASKS = http.Operations("tasks", problems=("not-found",))


@TASKS.add(
    "POST /v1/apps/{app}/tasks",
    role="write",
    many_queues=True,
    request=NEW_TASK,
    returns=("It is sent.", _SENT),
    status=201,
)
async def run_send(api: Any, request: http.Request, app: str) -> http.Answer:
    """Send a task of Celery.

    The message is what apply_async sends, in JSON. Only tasks that were allowed are sent.
    """
    allowed: Allowed = api.extras.allowed
    allowed.check_app(app)
    name = request.asked["task"]
    allowed.check(name)
    id, queue = await send(allowed.app, request.asked, request.token, request)
    path = f"apps/{quote(allowed.name, safe='')}/tasks/{quote(id, safe='')}"
    return http.answer({"name": path, "id": id, "task": name, "queue": queue}, 201)


@TASKS.add(
    "GET /v1/apps/{app}/tasks/{id}",
    returns=("What the result backend knows.", _RESULT),
)
async def run_result(api: Any, request: http.Request, app: str, id: str) -> http.Answer:
    """Read the result of a task.

    A task that the backend does not know is PENDING.
    """
    api.extras.allowed.check_app(app)
    masking = api.masking_for(request.token)
    return http.answer(await api.extras.allowed.result(id, masking))


# -- pages of schedules, by queue and name


async def page_of_schedules(
    schedules: Any, token: http.Token, limit: int, after: str = "", queue: str | None = None
) -> tuple[list[Schedule], str | None]:
    """A page of schedules, and where the next one begins, if there are more. It may have fewer than
    the limit, or none: a bounded number of queues is looked at, and of names.

    schedules: of an app, awaited
    after: where it begins, as this has returned it; empty: at the first one
    queue: only those of this one, which the token may see

    Raises Problem if this has never returned `after`.
    """
    first, name = _read(after)
    more = None
    if queue is None:
        queues, more = await http.page_of_names(schedules.queues, token, first, limit)
        if name and token.sees(first):
            queues = [first, *queues]
        else:
            name = ""
    else:
        if after and (first != queue or not name):
            raise _invalid(after)
        queues = [queue]
    found: list[Schedule]
    found, behind = await schedules.page(queues, limit=limit + 1, after=name)
    if len(found) > limit:
        last = found[limit - 1]
        return found[:limit], _written(last.queue, last.name)
    if behind is not None:
        return found, _written(*behind)
    return found, None if more is None else _written(more)


def _written(*names: str) -> str:
    return ":".join(quote(name, safe="") for name in names if name)


def _read(after: str) -> tuple[str, str]:
    """The queue and the name behind which a page begins; without a name, behind all of that
    queue."""
    queue, *names = map(unquote, after.split(":"))
    if len(names) > 1 or (after and not queue) or names == [""]:
        raise _invalid(after)
    return queue, names[0] if names else ""


def _invalid(after: str) -> Exception:
    return schema.invalid(
        "after", f"{after[:80]!r} is not what a page of these schedules has given"
    )


# -- schedules over HTTP: read, put, paused, resumed, skipped, run, deleted

PUT = schema.Object(
    {
        "task": schema.Text("The name of a task that may be sent.", most=500),
        "every": schema.Number("Seconds between two firings.", least=0.001, most=3e8),
        "cron": schema.Text(
            "Minute, hour, day, month, day of the week: 0 3 * * *; a day must be among both kinds "
            "of days. Or @daily and the like.",
            most=500,
        ),
        "sun": schema.Text("An event of the sun, such as sunrise; with latitude and longitude."),
        "latitude": schema.Number(least=-90, most=90),
        "longitude": schema.Number(least=-180, most=180),
        "args": schema.Anything("Its arguments.", of=("array",)),
        "kwargs": schema.Anything("Its arguments by name.", of=("object",)),
        "queue": schema.Text("Its queue, unless its routes say it.", most=500),
        "timezone": schema.Text("Of a crontab; the app's unless given."),
        "misfire": schema.Text("What was missed by the grace.", choices=("skip", "once", "all")),
        "grace": schema.Number("Seconds that a firing may be late.", most=3e8),
        "overlap": schema.Text("While the firing before still runs.", choices=state.OVERLAPS),
        "jitter": schema.Number(
            "Each firing is due up to so many seconds later; the delay of one is always the same.",
            most=3e8,
        ),
        "start": schema.Time("Not before."),
        "end": schema.Time("Not after."),
        "maxRuns": schema.Number("So often, then it ends.", least=1, most=1e9, whole=True),
        "exclude": schema.Anything("Days on which it does not fire: 2026-12-25.", of=("array",)),
    },
    needed=("task",),
    one_of=("every", "cron", "sun"),
    name="NewSchedule",
)

BACKFILL = schema.Object(
    {
        "startTime": schema.Time("The first moment."),
        "endTime": schema.Time("The last one; now unless given."),
        "rate": schema.Number("Tasks a second.", least=0.001, most=1000, default=10.0),
        "limit": schema.Number(
            "If more: none is sent.", least=1, most=10_000, whole=True, default=1000
        ),
    },
    needed=("startTime",),
    name="Backfill",
)

_RULES = (
    *("args", "kwargs", "queue", "timezone", "misfire", "grace", "overlap", "jitter", "exclude"),
)


def shown(found: Schedule, masking: Any = None) -> dict[str, Any]:
    """A schedule, as in JSON.

    masking: what hides arguments; None: nothing is hidden
    """
    args: Any = found.args or []
    kwargs: Any = found.kwargs or {}
    # Of what is not decoded, as their sender wrote them.
    args = [args] if isinstance(args, str) else list(args)
    kwargs = {"kwargsrepr": kwargs} if isinstance(kwargs, str) else dict(kwargs)
    if masking is not None:
        # They stay what clients know them as: a list, and an object.
        args = masking.args(found.task, args)
        args = args if isinstance(args, list) else [args]
        kwargs = masking.members(kwargs)
    return {
        **schema.members(found, _SHOWN, queue="queue", schedule="text", **_TIMES),
        "args": args,
        "kwargs": kwargs,
        "grace": float(found.grace),
        "jitter": float(found.jitter),
        "exclude": list(map(str, found.exclude)),
    }


#: Members that a schedule has as attributes, and what its times are called there.
_TIMES = {"startTime": "start", "endTime": "end", "nextTime": "next", "lastTime": "last"}
_SHOWN = (
    *("name", "task", "schedule", "timezone", "queue", "misfire", "overlap", "maxRuns", "owner"),
    *("state", "runs", *_TIMES),
)


def when_of(fields: dict[str, Any]) -> Any:
    """What Celery knows as a schedule. Raises Problem."""
    if "every" in fields:
        return fields["every"]
    try:
        if "cron" in fields:
            return read_cron(fields["cron"])
        if "latitude" not in fields or "longitude" not in fields:
            raise ValueError("it needs latitude and longitude")
        return solar(fields["sun"], fields["latitude"], fields["longitude"])
    except (ValueError, ImportError) as exc:
        raise schema.invalid("cron" if "cron" in fields else "sun", str(exc)) from None


async def keep(
    schedules: Any,
    name: str,
    fields: dict[str, Any],
    when: Any,
    before: Schedule | None,
    **more: Any,
) -> Schedule:
    """Put a schedule. Raises Problem.

    schedules: of an app, awaited
    fields: as PUT reads them
    when: as Celery has it
    before: the schedule that is there
    more: options of the put that the fields do not have
    """
    rules = {rule: fields[rule] for rule in (*_RULES, "start", "end") if rule in fields}
    if "maxRuns" in fields:
        rules["max_runs"] = fields["maxRuns"]
    if before is not None and before.owner:
        raise http.Problem("conflict", f"the schedule {name!r} was put by {before.owner!r}")
    try:
        found: Schedule = await schedules.put(name, fields["task"], when, **{**more, **rules})
        return found
    except ScheduleError as exc:
        raise schema.invalid("", str(exc)) from None
    except QueueNotFound as exc:
        raise schema.invalid("queue", str(exc)) from None
    except (TypeError, KombuError) as exc:
        raise schema.invalid("args", str(exc)) from None


_SCHEDULE = schema.record(
    "name task schedule queue state nextTime",
    texts="name task schedule queue state",
    nextTime=schema.or_null(schema.TEXT),
)
_LISTED = schema.page_of("schedules", _SCHEDULE, schema.SPARSE)
_FIRING = schema.record(
    "id plannedTime outcome",
    texts="id plannedTime outcome reason",
    startTime=schema.or_null(schema.TEXT),
    byHand=schema.FLAG,
)
_EDIT = schema.record("time by what", texts="time by what")
_FIRINGS = schema.record("firings edits", firings=schema.array(_FIRING), edits=schema.array(_EDIT))


SCHEDULES = http.Operations("schedules", problems=("not-found",))


@SCHEDULES.add(
    "GET /v1/schedules",
    many_queues=True,
    query={"queue": schema.Text("Only those of this queue.", most=500), **schema.paging(1000)},
    returns=("A page.", _LISTED),
    problems=(),
)
async def list_all(api: Any, request: http.Request) -> http.Answer:
    """List schedules."""
    queue = request.asked.get("queue")
    if queue is not None and not request.token.sees(queue):
        detail = f"this needs a token with the role read of queue {queue!r}"
        raise http.Problem("forbidden", detail)
    page, more = await page_of_schedules(
        api.extras.allowed.recurring, request.token, **request.asked
    )
    hides = api.masking_for(request.token)
    return http.answer({"schedules": [shown(one, hides) for one in page], "nextPageToken": more})


def _signed(api: Any, request: http.Request) -> Any:
    return api.extras.allowed.recurring.signed(f"{request.token.name or 'this machine'} (HTTP)")


@SCHEDULES.add(
    "GET /v1/schedules/{schedule}",
    many_queues=True,
    returns=("The schedule.", _SCHEDULE),
)
async def get(api: Any, request: http.Request, name: str) -> http.Answer:
    """Read a schedule."""
    found = await _seen(api, request, name)
    return http.answer(shown(found, api.masking_for(request.token)))


async def _seen(api: Any, request: http.Request, name: str) -> Schedule:
    """The schedule that is meant. Raises Problem if there is none, or if the token may not see
    its queue."""
    found: Schedule | None = await api.extras.allowed.recurring.get(name)
    if found is None or not request.token.sees(found.queue):
        raise unknown(name)
    return found


@SCHEDULES.add(
    "GET /v1/schedules/{schedule}/history",
    many_queues=True,
    returns=("At most 20 firings and 10 changes, the latest first.", _FIRINGS),
)
async def history(api: Any, request: http.Request, name: str) -> http.Answer:
    """Show the latest firings and changes."""
    found = await _seen(api, request, name)
    with refusals(found.name):  # it may have been deleted just now
        firings = await api.extras.allowed.recurring.history(found.name)
    times = {"plannedTime": "planned", "startTime": "started"}
    shown = [schema.members(one, _FIRING["properties"], **times) for one in firings]
    edits = [schema.members(one, _EDIT["properties"], time="at") for one in found.edits]
    return http.answer({"firings": shown, "edits": edits})


@SCHEDULES.add(
    "PUT /v1/schedules/{schedule}",
    role="operate",
    act="put schedule",
    request=PUT,
    returns=("The schedule as it is then.", _SCHEDULE),
    problems=("conflict",),
)
async def put(api: Any, request: http.Request, name: str) -> http.Answer:
    """Put a schedule, or change one."""
    fields = request.asked
    api.extras.allowed.check(fields["task"])
    before = await api.extras.allowed.recurring.get(name)
    found = await keep(_signed(api, request), name, fields, when_of(fields), before)
    return http.answer(shown(found, api.masking_for(request.token)))


@SCHEDULES.add(
    "POST /v1/schedules/{schedule}:backfill",
    role="operate",
    act="backfill schedule",
    request=BACKFILL,
    returns=("The ids of the tasks.", schema.record("ids", ids=schema.array(schema.TEXT))),
    problems=("not-found", "conflict"),
)
async def backfill(api: Any, request: http.Request, name: str) -> http.Answer:
    """Send the task for each time of the past for which no firing has come."""
    asked = request.asked
    bounds = asked.pop("startTime"), asked.pop("endTime", None)
    with refusals(name):
        return http.answer({"ids": await _signed(api, request).backfill(name, *bounds, **asked)})


async def change(method: str, api: Any, request: http.Request, name: str) -> http.Answer:
    with refusals(name):
        await getattr(_signed(api, request), method)(name)
    after = await api.extras.allowed.recurring.get(name)
    if after is None:
        return http.answer({"deleted": True})
    return http.answer(shown(after, api.masking_for(request.token)))


SCHEDULES.add(
    "DELETE /v1/schedules/{schedule}",
    "Delete a schedule",
    role="operate",
    act="delete schedule",
    returns=("It is gone.", schema.record("deleted", deleted=schema.FLAG)),
)(partial(change, "delete"))
for _verb, _method, _summary in (
    ("pause", "pause", "Have a schedule fire no more until it is resumed"),
    ("resume", "resume", "Have a schedule fire again"),
    ("skip", "skip_next", "Leave out the next firing"),
    ("run", "run_now", "Send the task of a schedule now"),
):
    SCHEDULES.add(
        f"POST /v1/schedules/{{schedule}}:{_verb}",
        _summary,
        role="operate",
        act=f"{_verb} schedule",
        returns=("The schedule as it is then.", _SCHEDULE),
        problems=("not-found", "conflict"),
    )(partial(change, _method))


def unknown(name: str) -> http.Problem:
    return schema.not_found(f"there is no schedule {name!r}")


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Raises Problem for what a schedule refuses."""
    try:
        yield
    except UnknownScheduleError:
        raise unknown(name) from None
    except ScheduleError as exc:
        raise http.Problem("conflict", str(exc)) from None
