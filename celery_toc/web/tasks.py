"""Tasks of Celery over HTTP: they are sent as Celery sends them, and their results are read."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from celery import VERSION as celery_version
from celery.backends.base import DisabledBackend
from celery.exceptions import QueueNotFound
from kombu import serialization
from kombu.exceptions import EncodeError, OperationalError
from kombu.utils import json as kombu_json

from kombu_toc import ActionTimeError, EnvelopeError, http, unpack

from .. import aio

if TYPE_CHECKING:
    from celery import Celery

NEW_TASK = http.Object(
    {
        "task": http.Text("The name of a task that may be sent.", most=500),
        "args": http.Anything("Its arguments.", of=("array",)),
        "kwargs": http.Anything("Its arguments by name.", of=("object",)),
        "id": http.Text("Its id; one is made unless given.", most=500),
        "eta": http.Time("When it is to run."),
        "countdown": http.Number("Instead of eta: seconds from now.", most=7e9),
        "queue": http.Text("Its queue, unless its routes say it.", most=500),
        "priority": http.Number("0 goes first.", most=255, whole=True),
        "expires": http.Number("Seconds after which no worker starts it.", least=0.001, most=7e9),
        "headers": http.Headers("Headers of its message; their names begin with x-."),
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
        self._asks = ThreadPoolExecutor(1, "toc-web-results")

    def check_app(self, name: str) -> None:
        """Raises Problem for the name of another app."""
        if name != self.name:
            raise http.not_found(f"the app is {self.name!r}, not {name!r}")

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
            raise http.not_found("the app has no result backend")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._asks, self._ask, id, masking)

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
    if not newline or not _may_be_json(line):
        return False  # no envelope to any worker
    try:
        message = unpack(raw, id)
    except EnvelopeError:
        return _may_be_envelope(line)
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
        return _may_be_json(message["body"])
    return isinstance(body, Mapping) and isinstance(body.get("task"), str)


def _may_be_json(text: bytes) -> bool:
    """Whether some Python may read a text as JSON. How deep it may be nested, and how long an
    integer may be, differs; what is no JSON to one is none to all."""
    try:
        json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    except (ValueError, RecursionError):
        pass
    return True


def _may_be_envelope(line: bytes) -> bool:
    """Whether what no envelope can be read of here may be one to a worker: it parses more, or
    knows a type that is registered there."""
    if b'"__type__"' in line:
        return True
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return True
    return False


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
        raise http.invalid("args", str(exc)) from None
    except ActionTimeError as exc:
        raise http.invalid("countdown" if "countdown" in fields else "eta", str(exc)) from None
    except OperationalError as exc:
        detail = "the broker cannot be reached or refuses this for now; try again later"
        raise http.Problem("broker", detail, headers=http.retry_after(1)) from exc
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
            raise http.invalid("eta", "it is beyond the year 9999; choose an earlier eta") from None
    headers = fields.get("headers", {})
    for name in headers:
        # What Celery writes there says which task it is: nobody else shall.
        if not name.startswith("x-") or name == "x-schedule":
            raise http.invalid(f"headers.{name[:100]}", "names of headers begin with x-")
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
        raise http.invalid("queue", str(exc)) from None
    queue, key, exchange = (routed.get(part) for part in ("queue", "routing_key", "exchange"))
    # As Celery does: with an exchange of type direct, what lacks one of them goes to the queue.
    if queue is None and exchange is not None:
        return str(key or exchange), False
    queue = queue or app.amqp.queues[app.conf.task_default_queue]
    if (routed.get("exchange_type") or queue.exchange.type) == "direct" and not (key and exchange):
        return queue.name, True
    return str(key or queue.routing_key), False


_SENT = http.record("name id task queue", texts="name id task queue")
_RESULT = http.record("id state", texts="id state error doneTime", result=http.ANYTHING)


def operations(allowed: Allowed) -> http.Operations:
    """The operations of an app."""
    table = http.Operations("tasks")

    @table.add(
        "POST /v1/apps/{app}/tasks",
        "Send a task of Celery",
        role="write",
        many_queues=True,
        request=NEW_TASK,
        returns=("It is sent.", _SENT),
        status=201,
        problems=("not-found",),
        about="The message is what apply_async sends, in JSON. Only tasks that were allowed are "
        "sent.",
    )
    async def run_send(api: Any, request: http.Request, app: str) -> http.Answer:
        allowed.check_app(app)
        fields = request.fields()
        name = fields["task"]
        allowed.check(name)
        id, queue = await send(allowed.app, fields, request.token, request)
        path = f"apps/{quote(allowed.name, safe='')}/tasks/{quote(id, safe='')}"
        return http.answer({"name": path, "id": id, "task": name, "queue": queue}, 201)

    @table.add(
        "GET /v1/apps/{app}/tasks/{id}",
        "Read the result of a task",
        returns=("What the result backend knows.", _RESULT),
        problems=("not-found",),
        about="A task that the backend does not know is PENDING.",
    )
    async def run_result(api: Any, request: http.Request, app: str, id: str) -> http.Answer:
        allowed.check_app(app)
        masking = api.masking_for(request.token)
        return http.answer(await allowed.result(id, masking))

    return table
