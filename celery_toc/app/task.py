"""A message of a timeout center, read as a task of Celery's; what became of one that is gone."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime, timezone
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from celery import Celery
from celery.app.backends import by_url
from celery.backends.base import DisabledBackend
from celery.exceptions import ImproperlyConfigured
from celery.utils.time import maybe_make_aware
from kombu.message import Message
from kombu.serialization import prepare_accept_content

import kombu_toc
from kombu_toc import TimeoutCenter

if TYPE_CHECKING:
    from celery import Signature

    from ..schedules.schedules import Schedules

R = TypeVar("R")


class Task:
    """A message of a timeout center, read as a task.

    found: where it is, and in what state; or how it was delivered
    headers, properties: as they were sent; empty if the message cannot be read
    problem: why it, or its arguments, cannot be read; otherwise empty
    decode: ``"app"``: as a worker of this app decodes it, whatever it runs and however large it
        grows; only for messages that nobody else can write

    The body is decoded when it is first asked for: JSON, msgpack if it is installed, and text, up
    to a mebibyte.
    """

    def __init__(
        self,
        app: Celery,
        found: kombu_toc.Found | kombu_toc.Cancelled | kombu_toc.Delivery,
        *,
        decode: Literal["safe", "app"] = "safe",
    ) -> None:
        if decode not in ("safe", "app"):
            raise ValueError(f"decode is 'safe' or 'app', not {decode!r}")
        self.app = app
        self.found = found
        self.problem = ""
        self._as_app = decode == "app"
        try:
            if self._as_app:
                content = kombu_toc.unpack(found.body, found.id)
            else:
                content, self.problem = kombu_toc.look(found.body, found.id)
        except kombu_toc.EnvelopeError as exc:
            self.problem = str(exc)
            content = {"headers": {}, "properties": {}, "body": b""}
        self._content = content
        self.headers: dict[str, Any] = content["headers"]
        self.properties: dict[str, Any] = content["properties"]
        #: as it was sent, before any decoding; empty if it is too large to be shown
        self.body: bytes = content["body"]
        self.content_type: str | None = content.get("content-type")
        self.content_encoding: str | None = content.get("content-encoding")

    def __repr__(self) -> str:
        found = self.found
        state = kombu_toc.IN_FLIGHT if isinstance(found, kombu_toc.Delivery) else found.state
        return f"<Task: {self.name}[{self.id}] {state} in {found.topic}>"

    @property
    def fields(self) -> dict[str, Any]:
        """What protocol 1 has in the body, and protocol 2 in the headers."""
        if "task" in self.headers:
            return self.headers
        return self.payload if isinstance(self.payload, dict) else {}

    @property
    def id(self) -> str:
        """The task's; a message that shares it with another is found under a longer one."""
        return self.fields.get("id") or self.headers.get("id") or self.found.id

    @property
    def name(self) -> str | None:
        return self.fields.get("task")

    @property
    def retries(self) -> int:
        """How often the task has been retried: as Celery counts, not the broker."""
        return self.fields.get("retries") or 0

    @property
    def eta(self) -> datetime | None:
        """When it is due by the broker, which may have been told another time since it was sent;
        None of what is not waiting, or is due at once."""
        found = self.found
        if not isinstance(found, kombu_toc.Found) or found.state != kombu_toc.WAITING:
            return None
        if not found.time_us:
            return None
        return datetime.fromtimestamp(found.time_us / 1e6, timezone.utc)

    @cached_property
    def payload(self) -> Any:
        """The decoded body; None if it cannot be, or is not, decoded."""
        if self.problem or (self.content_type is None and not self.body):
            return None
        if not self._as_app:
            read = kombu_toc.read_content(self._content)
            self.problem = read.problem
            return read.value
        try:
            message = Message(
                body=self.body,
                headers=self.headers,
                properties=self.properties,
                content_type=self.content_type,
                content_encoding=self.content_encoding,
                accept=prepare_accept_content(self.app.conf.accept_content),
            )
            if message.errors:
                error: Any = message.errors[0][1]
                raise error
            return message.decode()
        except Exception as exc:  # whatever a decoder raises
            self.problem = f"{type(exc).__name__}: {exc}"
            return None

    @property
    def _sent(self) -> tuple[Any, Any, dict[str, Any]]:
        """The two kinds of arguments, and what else Celery sends along."""
        payload = self.payload
        if isinstance(payload, dict):
            return payload.get("args", []), payload.get("kwargs", {}), payload
        if isinstance(payload, (list, tuple)) and len(payload) == 3:
            return payload[0], payload[1], payload[2] or {}
        return self.headers.get("argsrepr"), self.headers.get("kwargsrepr"), {}

    @property
    def args(self) -> Any:
        """The positional arguments; if they cannot be decoded, how the sender wrote them."""
        return self._sent[0]

    @property
    def kwargs(self) -> Any:
        """The keyword arguments; if they cannot be decoded, how the sender wrote them."""
        return self._sent[1]

    @property
    def embedded(self) -> dict[str, Any]:
        """What else Celery sends along: ``callbacks``, ``errbacks``, ``chain``, ``chord``."""
        return self._sent[2]

    @property
    def stamps(self) -> dict[str, Any]:
        """The stamps it was sent with, by header."""
        stamps = self.headers.get("stamps") or {}
        return {
            name: stamps[name]
            for name in self.headers.get("stamped_headers") or ()
            if name in stamps
        }


# -- the timeout center of an app


def _of_tasks(method: Callable[..., R]) -> Callable[..., R]:
    """A method of the center, whose predicate is given a :class:`Task`."""

    @wraps(method)
    def call(center: TaskCenter, *args: Any, where: Any = None, **options: Any) -> R:
        call: Callable[..., R] = getattr(center.center, method.__name__)
        return call(*args, where=center._on_tasks(where), **options)

    return call


class TaskCenter(TimeoutCenter):
    """The timeout center of an app's broker. :func:`celery_toc.timeout_center` returns it.

    It has the parts of a :class:`kombu_toc.TimeoutCenter`. Three things differ: a predicate
    (``where=``) is given a :class:`Task`, :meth:`reschedule` accepts times as Celery has them, and
    there are methods that deal with tasks.

    app: the app whose messages these are
    center: the center whose parts these are; they are shared, not copied
    """

    def __init__(self, app: Celery, center: TimeoutCenter) -> None:
        #: the center whose parts these are
        self.center: TimeoutCenter = center.center if isinstance(center, TaskCenter) else center
        self.__dict__.update(vars(self.center))
        self.app = app
        self.dead = DeadTasks(self.center.dead, self._on_tasks)  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<TaskCenter of {self.app.main!r}: {self.center!r}>"

    @cached_property
    def schedules(self) -> Schedules:
        """Tasks that run again and again: see :class:`.Schedules`."""
        from ..schedules.schedules import Schedules

        return Schedules(self.app, self.center, self.task)

    # -- messages as tasks

    def task(
        self,
        found: kombu_toc.Found | kombu_toc.Cancelled | kombu_toc.Delivery,
        *,
        decode: Literal["safe", "app"] = "safe",
    ) -> Task:
        """Read one message as a task.

        decode: ``"app"``: its body as a worker of this app decodes it. Whoever may write to the
            broker then decides what is run, if the app accepts pickle, and how large it grows.
        """
        return Task(self.app, found, decode=decode)

    def tasks(self, found: Iterable[kombu_toc.Found]) -> list[Task]:
        """Read messages as tasks."""
        return [self.task(one) for one in found]

    def scheduled(self, topics: Iterable[str], limit: int, *, far: bool = True) -> Iterator[Task]:
        """Yield the tasks of these topics that wait for their time, the soonest first. At the end
        it raises PartialError if nodes of a Cluster are away.

        limit: the maximum number of tasks
        far: also those that are too far ahead to be in Redis; then databases are asked
        """
        seconds, rest = self.client.time()
        since = seconds + rest / 1e6

        away = self.center.messages.away()

        def waiting(topic: str) -> Iterator[kombu_toc.Found]:
            found = self.center.messages.read(
                topic, kombu_toc.WAITING, since=since, far=far, away=away
            )
            return (one for one, _ in found if self.task(one).name is not None)

        soonest = heapq.merge(*map(waiting, topics), key=lambda found: found.time_us)
        yield from map(self.task, itertools.islice(soonest, limit))
        away.checked(None)

    def ensure_task(self, task: Signature, *, task_id: str, **options: Any) -> bool:
        """Send a task unless a message with this id is waiting, in flight or dead.

        task: its signature
        options: those of ``apply_async``: ``countdown``, ``eta``, ``queue``, ...

        Returns whether it was sent. If several processes try at the same time, with the same
        queue and the same slot basis or none, exactly one sends it. A task that has been
        acknowledged does not count: Celery acknowledges a task when it starts, unless
        ``acks_late`` is set.
        """
        if self.get(task_id):
            return False
        try:
            sent = task.apply_async(task_id=task_id, **{kombu_toc.ENSURE: True}, **options)
        except kombu_toc.AlreadyThereError:
            return False
        return bool(sent.id == task_id)  # else another one has its unique key

    def reschedule(
        self,
        task_id: str | kombu_toc.Found | Iterable[str | kombu_toc.Found],
        *,
        eta: datetime | float | None = None,
        countdown: float | None = None,
        at: float | None = None,
        delay: float | None = None,
        topic: str | None = None,
        basis: str | None = None,
    ) -> list[kombu_toc.Rescheduled]:
        """Give a waiting task another time; without a time it is due now.

        eta: a datetime (without a time zone it is read as Celery does), or seconds since the epoch
        countdown: seconds from now by Redis's clock

        Otherwise as :meth:`kombu_toc.TimeoutCenter.reschedule`, whose `at` and `delay` can be
        used instead.
        """
        if isinstance(eta, datetime):
            eta = cast(float, maybe_make_aware(eta, self.app.timezone).timestamp())
        when = {"at": at if eta is None else eta}
        when["delay"] = delay if countdown is None else countdown
        return self.center.reschedule(task_id, **when, topic=topic, basis=basis)

    # -- what a predicate selects: it is given a Task

    def _on_tasks(self, where: Callable[[Task], Any] | None) -> Callable[[Any], Any] | None:
        return None if where is None else lambda found: where(self.task(found))

    if TYPE_CHECKING:  # a checker does not see what becomes of `where`

        def scan(  # type: ignore[override]
            self,
            topic: str | None = None,
            *,
            state: str | Collection[str] | None = None,
            since: float | None = None,
            until: float | None = None,
            where: Callable[[Task], Any] | None = None,
            limit: int = 100,
            after: str | None = None,
            size: int | None = None,
        ) -> kombu_toc.Page: ...

        def count(  # type: ignore[override]
            self,
            topic: str | None = None,
            *,
            state: str | Collection[str] | None = None,
            since: float | None = None,
            until: float | None = None,
            where: Callable[[Task], Any] | None = None,
        ) -> int: ...

        def pop(  # type: ignore[override]
            self,
            topic: str | Iterable[str],
            limit: int | None = None,
            *,
            wait: float | None = 0.0,
            ids: str | Iterable[str] | None = None,
            where: Callable[[Task], Any] | None = None,
            early: bool = False,
            look: int = 1000,
            visibility: float | None = None,
            slots: Iterable[int] | None = None,
            recover: int = 100,
            ahead: float = 0.0,
        ) -> kombu_toc.Popped: ...
    else:
        scan = _of_tasks(TimeoutCenter.scan)
        count = _of_tasks(TimeoutCenter.count)
        pop = _of_tasks(TimeoutCenter.pop)


class DeadTasks:
    """The part `dead` of a :class:`TaskCenter`."""

    def __init__(self, dead: Any, on_tasks: Callable[[Any], Any]) -> None:
        self._dead = dead
        self._on_tasks = on_tasks

    def requeue(
        self, topic: str | None = None, *, where: Callable[[Task], Any] | None = None, **how: Any
    ) -> int:
        """Deliver dead messages again: ``dead.requeue`` of :class:`kombu_toc.TimeoutCenter`.

        where: only the messages for whose :class:`Task` this is true
        """
        return int(self._dead.requeue(topic, where=self._on_tasks(where), **how))

    def purge(
        self, topic: str | None = None, *, where: Callable[[Task], Any] | None = None, **how: Any
    ) -> int:
        """Delete dead messages; return how many. Otherwise as :meth:`requeue`."""
        return int(self._dead.purge(topic, where=self._on_tasks(where), **how))


# -- what became of a task whose message is gone: the sources that know it, and what each says


#: Seconds for which a source is waited for.
WITHIN = 5.0

#: What sources are called.
CANCELLATIONS, RESULTS = "the cancellations", "the result backend"


class Source(NamedTuple):
    """A source that was asked about an id.

    said: what it says; empty if it does not know the id
    error: why it has not answered; empty if it has
    """

    name: str
    said: str = ""
    error: str = ""


def sources_of(app: Celery, center: Any, id: str) -> list[Source]:
    """What the cancellations and the result backend say of a task. Raises nothing."""
    asked: dict[str, Callable[[], str]] = {CANCELLATIONS: lambda: _cancelled(center, id)}
    if not isinstance(app.backend, DisabledBackend):
        asked[RESULTS] = lambda: _result(app, id)
    return [_asked(name, ask) for name, ask in asked.items()]


def _asked(name: str, ask: Callable[[], str]) -> Source:
    """What a source says, if it does within moments: Celery tries a backend that is away again."""
    found: list[Source] = []

    def run() -> None:
        try:
            found.append(Source(name, ask()))
        except Exception as exc:  # whatever a result backend raises
            found.append(Source(name, error=f"{type(exc).__name__}: {exc}"[:200]))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WITHIN)
    return found[0] if found else Source(name, error=f"it has not answered for {WITHIN:g} seconds")


def _cancelled(center: kombu_toc.TimeoutCenter, id: str) -> str:
    at = center.notes.cancelled_at(id)
    return "" if at is None else f"cancelled or revoked, {_moment(at)}"


def _result(app: Celery, id: str) -> str:
    if app.conf.result_serializer == "pickle":
        return "not read: results are pickled"
    found = app.backend.get_task_meta(id, cache=False)
    state, done = found.get("status"), found.get("date_done")
    if state == "PENDING":
        return ""
    return f"{state}, {done}" if done else str(state)


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="seconds")


# -- where the broker of an app is


class Broker(NamedTuple):
    """The URL, TLS and options that a center of an app's broker is made of."""

    url: str
    ssl: Any
    options: dict[str, Any]


#: Seconds of a visibility timeout that is most likely left from ``redis://``, where it had to be
#: longer than the longest countdown; Kombu's default there, and so what nobody raised it to.
_LEFT_OVER = 3600.0


def visibility_warnings(limits: kombu_toc.Limits) -> list[str]:
    """That the visibility timeout of an app is far longer than it need be."""
    seconds = limits.visibility
    if seconds < _LEFT_OVER:
        return []
    return [
        f"visibility_timeout is {seconds:g} seconds ({seconds / 3600:.3g} hours), and so long do "
        "the messages of a killed worker stay in flight; remove it if it is left from redis://: "
        "here a worker renews its leases, however long a task runs or waits"
    ]


def broker_of(app: Celery) -> Broker:
    """The broker that an app sends to. Raises ConfigurationError if it is no timeout center."""
    with app.connection_for_write() as connection:
        url = connection.as_uri(include_password=True)
        if not isinstance(connection.transport, kombu_toc.Transport):
            raise kombu_toc.ConfigurationError(
                f"the broker of app {app.main!r} is {kombu_toc.mask_password(url)}, which is not a "
                "timeout center: such a URL begins with toc+, as in toc+redis://localhost:6379/0"
            )
        options = kombu_toc.known_options(connection.transport_options)
        return Broker(url, connection.ssl, options)


# -- the result backend of a URL toc+redis://...
#
# Celery finds it by the entry point ``toc`` of its group ``celery.result_backends``.


def result_backend(app: Any, url: str) -> Any:
    """Make the backend for ``result_backend="toc+redis://..."``.

    url: with or without ``toc+``, which Celery removes

    Raises ImproperlyConfigured, which names an alternative, if Celery has no backend for such a
    server, or needs more than the URL says.
    """
    scheme = url.partition("://")[0].removeprefix("toc+")
    if scheme == "cluster":
        raise ImproperlyConfigured(
            "Celery keeps no results in a Redis Cluster: result_backend cannot be "
            "toc+cluster://...; name one server, redis://host:6379/0, or another backend"
        )
    if scheme == "sentinel":
        raise ImproperlyConfigured(
            "result_backend cannot be toc+sentinel://...: use Celery's own, "
            "sentinel://h1:26379/0;sentinel://h2:26379/0, and name the master in "
            "result_backend_transport_options = {'master_name': ...}"
        )
    try:
        cls, plain = by_url(kombu_toc.server_url(url), app.loader)
    except kombu_toc.ConfigurationError as exc:
        raise ImproperlyConfigured(f"result_backend: {exc}") from exc
    return cls(app=app, url=plain)
