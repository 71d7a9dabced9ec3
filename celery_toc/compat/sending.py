"""How a task's message is made and sent.

A message tells whether its time was given as a countdown (`countdowns`).

Touches: ``AMQP.create_task_message``, which is replaced on the class.

Why: Celery turns a countdown into an ``eta`` by the clock of the machine that sends. Nothing that
is handed to ``before_task_publish`` or to the transport tells the two apart.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: a countdown is an ``eta``. If the sender's clock is wrong, so is the time, as with every
other broker. Messages of protocol 1 have no id and no ``eta`` that the center can read, and wait
in the worker.

`async-results`: a result backend does not wait for its server when a task is sent from an event
loop.

Touches: ``RedisBackend.on_task_call``, which is replaced on the app's backend.

Why: when a task is sent, Celery's Redis backend subscribes to its result, and waits for the server.
That blocks the event loop. It is not needed: ``AsyncResult.get`` subscribes, too, and then looks
whether the result is there.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: with results in Redis, the first task that is sent, and one a second, blocks the event loop
for a round trip to the server that keeps the results.

A task that is not sent has the result of the one that is there (`uniqueness`).

Touches: ``Celery.send_task``, which is replaced on the class when uniqueness is first asked for in
a process; ``Celery._tasks``, which is read.

Why: with ``conflict="keep"`` and ``"replace"``, ``apply_async`` returns the result of a task that
was sent before. Celery makes the result of the id that it has chosen itself, and calls nothing in
between that could tell it another one. A signal could compute the key from the arguments, but is
not told the app.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: a task that should be unique is not.

A task's message is made quickly, for asyncio and for many schedules (`quick-messages`).

Touches: ``Task.__header__``, ``Task._dump_pydantic_arguments``, ``Task.apply_async``,
``Task.shadow_name``, ``Celery.send_task``, ``AMQP.argsrepr_maxsize`` and ``kwargsrepr_maxsize``,
which are read; and the conversion of arguments to text (``celery.utils.saferepr``).

Why: an event loop does nothing else while Celery makes a message, which takes some 200
microseconds, and ten thousand schedules are put at once. Messages of one task with the same options
differ only in their id, arguments and times. So Celery makes the first ones, and again one a
second. What these have in common is remembered, and filled with the next task's own.

It is used only if it has made the same bytes as Celery of a message that Celery made within the
last second, and of a task that Celery would treat as any other: no routers that are functions, no
signals that anybody listens to, no method of the task or the app that somebody has replaced.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: `celery_toc.aio.send` and `send_many` send about a quarter as many tasks a second, and
`schedules.put_many` takes longer.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial, wraps
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from celery import Celery, Task, signals
from celery.app.routes import MapRoute
from celery.utils import uuid
from celery.utils.saferepr import saferepr
from kombu.serialization import registry
from kombu.utils import json

import kombu_toc
from kombu_toc import COUNTDOWN, CompatPart

# -- countdowns

COUNTDOWNS = CompatPart(
    "countdowns",
    lost="a countdown begins by the clock of the machine that sends",
    check=lambda amqp: [
        *CompatPart.missing(amqp, "create_task_message"),
        *CompatPart.missing(
            vars(amqp).get("create_task_message"), "__get__", "__set__", "__delete__"
        ),
    ],
)


def install_countdowns() -> None:
    """Give the messages that are made of a countdown a mark."""
    from celery.app.amqp import AMQP

    if not COUNTDOWNS.usable(AMQP):
        return
    # On the class, and uncached: the app that is just sending its first message has its AMQP,
    # and looks this up when it has asked for its transport (from Celery 5.5 on).
    cached = AMQP.create_task_message
    AMQP.create_task_message = property(
        lambda amqp: partial(create_task_message, cached.__get__(amqp)),
        cached.__set__,
        cached.__delete__,
    )


def create_task_message(
    create: Callable[..., Any],
    /,
    task_id: str,
    name: str,
    args: Any = None,
    kwargs: Any = None,
    countdown: float | None = None,
    *rest: Any,
    **options: Any,
) -> Any:
    """Create the message of a task, and add what the transport reads.

    create: Celery's function, which is given all the other arguments

    What is added is the mark of a countdown, and with protocol 1, whose headers are empty, id and
    eta. Returns what `create` returns: headers, properties, body, event.
    """
    message = create(task_id, name, args, kwargs, countdown, *rest, **options)
    headers, properties, body, _ = message
    if countdown:
        # A property and not a header: a retry inherits headers, and may have another kind of time.
        properties[COUNTDOWN] = True
    if isinstance(body, dict):  # protocol 1
        headers.setdefault("id", task_id)
        if body.get("eta"):
            headers.setdefault("eta", body["eta"])
    return message


# -- async-results

ASYNC_RESULTS = CompatPart(
    "async-results",
    lost="sending from an event loop waits for the server that keeps the results",
    check=lambda backend: CompatPart.missing(backend, "on_task_call"),
)


def install_async_results(backend: Any) -> None:
    """Keep a result backend from blocking the loop that sends; if it has been done, do nothing."""
    if "on_task_call" in vars(backend) or not hasattr(backend, "result_consumer"):
        return
    if not ASYNC_RESULTS.usable(backend) or not any(
        cls.__module__ == "celery.backends.redis" for cls in type(backend).__mro__
    ):
        return
    subscribe = backend.on_task_call

    def on_task_call(producer: Any, task_id: str) -> Any:
        if isinstance(getattr(producer, "channel", None), kombu_toc.AsyncChannel):
            return None
        return subscribe(producer, task_id)

    backend.on_task_call = on_task_call


# -- uniqueness

UNIQUENESS = CompatPart(
    "uniqueness",
    lost="a task that should be unique is not",
    check=lambda app: CompatPart.missing(app, "send_task"),
    way_out="Take uniqueness away from the tasks, or install a release of Celery that has it.",
)


def install_uniqueness() -> None:
    """Let tasks be unique that are sent from now on; if it has been done, do nothing."""
    if hasattr(Celery.send_task, "toc_original") or not UNIQUENESS.usable(Celery):
        return
    original = Celery.send_task
    names = tuple(inspect.signature(original).parameters)[4:]

    @wraps(original)
    def send(
        app: Celery, name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        task = options.get("task_type") or app._tasks.get(name)
        unique = getattr(task, "toc_unique", None)
        headers = options.get("headers")
        if unique is None and "x-unique" not in options and not (headers and "x-unique" in headers):
            return original(app, name, args, kwargs, *rest, **options)
        options.update(zip(names, rest, strict=False))
        # A retry has the headers of what it repeats.
        if unique is not None and "x-unique" not in options and not options.get("retries"):
            options.update(unique.options_for(task, args, kwargs))
        return _send_unique(app, original, name, args, kwargs, options)

    send.toc_original = original  # type: ignore[attr-defined]
    Celery.send_task = send


def original_send_task(app_class: Any) -> Any:
    """The ``send_task`` that was there before :func:`install_uniqueness`."""
    return getattr(app_class.send_task, "toc_original", app_class.send_task)


def _send_unique(
    app: Celery,
    send: Callable[..., Any],
    name: str,
    args: Any,
    kwargs: Any,
    options: dict[str, Any],
) -> Any:
    """Send a task, or find the one that is there; return its result."""
    id = options["task_id"] = options.get("task_id") or uuid()
    try:
        with kombu_toc.unique_answer(id) as answer:
            result = send(app, name, args, kwargs, **options)
    except kombu_toc.KeptError as exc:
        made = options.get("result_cls") or app.AsyncResult
        ignored = options.get("ignore_result")
        if not ignored:
            made(id)  # Celery has begun to wait for it; it ends that when this is collected
        result = made(exc.id)
        result.ignored = ignored
        parent = app.current_worker_task
        if parent and options.get("add_to_parent", True):
            parent.add_trail(result)
        return result
    if answer.id != id:
        result.id = answer.id
    return result


# -- quick-messages

QUICK_MESSAGES = CompatPart(
    "quick-messages",
    lost="celery_toc.aio sends about a quarter as many tasks a second",
    check=lambda amqp: [
        *CompatPart.missing(Task, "apply_async", "shadow_name", "typing"),
        *CompatPart.missing(amqp, "argsrepr_maxsize", "kwargsrepr_maxsize", "router"),
    ],
)

#: Seconds for which what was learned of Celery's message holds.
FRESH = 1.0

#: How often a shape may turn out to be wrong before it is not tried again.
ATTEMPTS = 3

#: Shapes that are remembered.
MAX_SHAPES = 1000

#: Options that are the same in all messages of a shape, and their types.
_CONSTANT = {"queue": str, "priority": int, "ignore_result": bool, "retry": bool}

#: Options that differ.
_VARYING = frozenset(("task_id", "countdown", "eta"))

#: What a message may have so that others of its shape differ from it in nothing else.
_HEADERS = frozenset(
    (
        *("lang", "task", "id", "shadow", "eta", "expires", "group", "group_index", "retries"),
        *("timelimit", "root_id", "parent_id", "argsrepr", "kwargsrepr", "origin"),
        *("ignore_result", "replaced_task_nesting", "stamped_headers", "stamps", "x-key"),
        *(kombu_toc.SCHEDULE, "x-slot-basis"),
    )
)
_PROPERTIES = frozenset(
    (
        *("correlation_id", "reply_to", "delivery_mode", "delivery_info", "priority"),
        *("delivery_tag", "k", "body_encoding", "MessageGroupId", kombu_toc.COUNTDOWN),
    )
)

_NOTHING = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}

#: In a text that Celery's saferepr and Python's repr may show in different ways.
_SPECIAL = re.compile(r"[^ !#-&(-\[\]-~]")

_encode: Callable[[Any], str] = json.JSONEncoder().encode

_MARK = re.compile(r'"\\u0001(\w+)"')


def _json_encoder() -> Any:
    """The function that is registered for JSON."""
    codec = getattr(registry, "_encoders", {}).get("json")
    return getattr(codec, "encoder", None)


def _is_celerys(function: Any, file: str) -> bool:
    """Whether a function is written in this file of Celery's, and not wrapped by somebody."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.replace("\\", "/").endswith(file)


@dataclass(slots=True)
class Values:
    """The values in which a message differs from others of its shape."""

    id: str
    args: Any
    kwargs: Any
    eta: str
    counts: bool  #: whether the eta is a countdown
    key: str = ""  #: its header x-key, or nothing


class Shape:
    """The common part of messages of one task with certain options.

    message: one that Celery has made, after it was published
    eta: whether it has one
    """

    def __init__(self, app: Celery, channel: Any, message: dict[str, Any], eta: bool) -> None:
        self._amqp = app.amqp
        self._levels = getattr(app.conf, "task_repr_maxlevels", None) or 3
        headers, properties = dict(message["headers"]), dict(message["properties"])
        headers["id"] = headers["root_id"] = properties["correlation_id"] = "\1id"
        headers["argsrepr"], headers["kwargsrepr"] = "\1args", "\1kwargs"
        if eta:
            headers["eta"] = "\1eta"
        properties["k"] = "\1token"
        if "x-key" in headers:
            headers["x-key"] = "\1key"
        if kombu_toc.SCHEDULE in headers:
            headers[kombu_toc.SCHEDULE] = "\1schedule"
        if "MessageGroupId" in properties:
            properties["MessageGroupId"] = "\1key"
        line = channel.line_of({**message, "headers": headers, "properties": properties})
        self._line = _MARK.sub(r"%(\1)s", line.replace("%", "%%"))
        self.task: str = headers["task"]
        #: what it says of this process
        self.sender = (headers.get("origin"), properties.get("reply_to"))
        self.queue: str = properties["delivery_info"]["routing_key"]
        self.priority: int = channel.priority_of(message)
        self.ignored = headers["ignore_result"]
        self.attempts = 0  #: how many shapes were made for its key
        #: monotonic seconds until which it is used without asking Celery
        self.until = 0.0

    def plain(self, values: Values, token: str) -> bytes:
        """The message with these values, as the transport packs it."""
        args, kwargs, amqp = values.args, values.kwargs, self._amqp
        line = self._line % {
            "id": quoted(values.id),
            "args": quoted(self._repr_of(args, amqp.argsrepr_maxsize)) if args else '"()"',
            "kwargs": quoted(self._repr_of(kwargs, amqp.kwargsrepr_maxsize)) if kwargs else '"{}"',
            "eta": quoted(values.eta),
            "token": quoted(token),
            "key": quoted(values.key),
            "schedule": quoted(values.id.rpartition("@")[0]),
        }
        body = _encode((args, kwargs, _NOTHING))
        return f"{line}\n{body}".encode("utf-8", "surrogatepass")

    def _repr_of(self, value: Any, most: int) -> str:
        """As Celery's saferepr, which is slow, and for plain values the same as Python's repr."""
        each = (*value, *value.values()) if type(value) is dict else value
        for one in each:
            kind = type(one)
            if kind is str:
                if _SPECIAL.search(one) is not None:
                    break
            elif kind is not int and kind is not bool and one is not None:
                break
        else:
            found = repr(value)
            if len(found) < most // 2:
                return found
        text: str = saferepr(value, most, self._levels)
        return text

    def is_of(self, channel: Any, message: dict[str, Any], values: Values) -> bool:
        """Whether it makes this message of these values."""
        token = message["properties"]["k"]
        if self.plain(values, token) != channel.plain_of(message):
            return False
        return bool(
            message["properties"]["delivery_info"]["routing_key"] == self.queue
            and channel.priority_of(message) == self.priority
            and bool(message["properties"].get(kombu_toc.COUNTDOWN)) == values.counts
        )


class QuickMessages:
    """The shapes of an app's messages.

    app: the app that sends them
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._usable = QUICK_MESSAGES.usable(app.amqp)
        self._shapes: dict[Any, Shape | int] = {}
        self._checked = 0.0
        self._plain = False
        self._signals = (
            *(signals.before_task_publish, signals.after_task_publish),
            *([signals.task_sent] if hasattr(signals, "task_sent") else []),
        )

    def key_of(self, task: Any, options: Any) -> Any:
        """By which the shape of a message is remembered; None for one that Celery is to make."""
        if not self._usable or not self._is_plain():
            return None
        for signal in self._signals:
            if signal.receivers:
                return None
        key = [task.name]
        for name, value in options.items():
            if name in _VARYING:
                key.append(name)
            elif type(value) is _CONSTANT.get(name):
                key += (name, value)
            elif _names_key(name, value):
                key.append(name)
            else:
                return None
        if task.apply_async.__func__ is not Task.apply_async or task.shadow_name.__func__ is not (
            Task.shadow_name
        ):
            return None
        if getattr(task, "_dump_pydantic_arguments", None) is not None:
            return None
        if self._app.current_worker_task or getattr(task, "toc_unique", None) is not None:
            return None
        found = tuple(key)
        return None if self._shapes.get(found) == ATTEMPTS else found

    def _is_plain(self) -> bool:
        """Whether Celery would make the app's messages as it does by itself."""
        now = time.monotonic()
        if now < self._checked + FRESH:
            return self._plain
        app = self._app
        self._checked = now
        self._plain = (
            not app.conf.task_always_eager
            and not app.conf.task_send_sent_event
            and app.conf.task_protocol == 2
            and _json_encoder() is json.dumps
            and all(isinstance(route, MapRoute) for route in app.amqp.router.routes or ())
            and _is_celerys(Task.apply_async, "celery/app/task.py")
            and _is_celerys(Task.shadow_name, "celery/app/task.py")
            and _is_celerys(original_send_task(type(app)), "celery/app/base.py")
            and "send_task" not in vars(app)
            and _is_celerys(app.amqp.send_task_message, "celery/app/amqp.py")
        )
        return self._plain

    def values_of(self, task: Any, id: str, args: Any, kwargs: Any, options: Any) -> Values | None:
        """The values of a message; None if Celery is to make it.

        Raises TypeError for arguments that the task does not take.
        """
        if type(args) not in (tuple, list) or type(kwargs) is not dict or type(id) is not str:
            return None
        countdown, eta = options.get("countdown"), options.get("eta")
        text = ""
        if countdown is not None:
            if type(countdown) not in (int, float) or not 0 < countdown < 1e8 or eta is not None:
                return None
            if str(self._app.timezone) != "UTC":
                return None
            text = (datetime.now(timezone.utc) + timedelta(seconds=countdown)).isoformat()
        elif eta is not None:
            if type(eta) is not datetime:
                return None
            text = eta.isoformat()
        if task.typing and hasattr(task, "__header__"):
            task.__header__(*args, **kwargs)
        group = options.get("MessageGroupId")
        headers = options.get("headers")
        if headers is not None and group is not None:
            return None
        key = headers["x-key"] if headers is not None else group or ""
        return Values(id, args, kwargs, text, countdown is not None, key)

    def find(self, key: Any) -> Shape | None:
        """The shape to use; None if Celery is to make this message."""
        shape = self._shapes.get(key)
        if type(shape) is Shape and shape.until > time.monotonic():
            return shape
        return None

    def learn(self, key: Any, channel: Any, message: dict[str, Any] | None, values: Values) -> None:
        """Take note of a message that Celery has just made and the channel published."""
        known = self._shapes.get(key, 0)
        if known == ATTEMPTS or message is None:
            return
        if message["properties"]["delivery_info"]["exchange"] or not _is_simple(message, values):
            self._shapes[key] = ATTEMPTS
            return
        if values.eta:
            values.eta = message["headers"]["eta"]
        if type(known) is Shape and known.is_of(channel, message, values):
            known.until = time.monotonic() + FRESH
            return
        if len(self._shapes) > MAX_SHAPES:
            self._shapes.clear()
        attempts = known.attempts if isinstance(known, Shape) else known
        if attempts == ATTEMPTS:
            self._shapes[key] = ATTEMPTS
            return
        shape = self._shapes[key] = Shape(self._app, channel, message, bool(values.eta))
        shape.attempts = attempts + 1


def _names_key(option: str, value: Any) -> bool:
    """Whether an option says no more than what the key of the message is."""
    if option == "headers":
        return type(value) is dict and list(value) == ["x-key"] and _is_key(value["x-key"])
    return option == "MessageGroupId" and _is_key(value)


def _is_key(value: Any) -> bool:
    return type(value) is str and value != ""


def _is_simple(message: dict[str, Any], values: Values) -> bool:
    """Whether a message differs from others of its shape in its values alone."""
    headers, properties = message["headers"], message["properties"]
    return bool(
        headers.keys() <= _HEADERS
        and properties.keys() <= _PROPERTIES
        and headers.get("id") == headers.get("root_id") == properties.get("correlation_id")
        and headers["id"] == values.id
        and (headers.get("x-key") or "") == values.key
        and (properties.get("MessageGroupId") or values.key) == values.key
        and not headers.get("retries")
        and all(
            headers.get(name) is None
            for name in ("shadow", "expires", "group", "group_index", "parent_id")
        )
        and not headers.get("stamped_headers")
        and not headers.get("stamps")
        and bool(headers.get("eta")) == bool(values.eta)
        and abs(_seconds(headers.get("eta")) - _seconds(values.eta)) < 5
        and len(headers.get("eta") or "")
        in (len(values.eta), len(values.eta) - 7, len(values.eta) + 7)
        and message["content-type"] == "application/json"
        and message["content-encoding"] == "utf-8"
    )


def _seconds(eta: str | None) -> float:
    return datetime.fromisoformat(eta).timestamp() if eta else 0.0
