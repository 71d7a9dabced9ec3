"""The HTTP API of an app's broker, with what knows Celery: tasks, results, schedules, metrics; and
what the page shows of an app.

``celery -A shop toc web`` serves it; docs/http.md explains it. It needs the extra ``[http]``.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from celery.backends.base import DisabledBackend

import kombu_toc
from kombu_toc import http

from .. import aio, timeout_center
from ..app.revoke import mark_revoked, remember_revoked
from ..app.task import Task, broker_of, sources_of
from ..schedules.rules import ScheduleError, check_name, zone_of
from . import operations as over_http

if TYPE_CHECKING:
    from celery import Celery

    from ..schedules.state import Firing, Schedule


__all__ = ("api_for_app",)

logger = logging.getLogger(__name__)

#: Seconds between two questions to the workers, and for which their answers are waited for.
ASK_EVERY = 5.0
ANSWER_WITHIN = 1.0

#: Seconds for which it is believed which tasks the workers have registered.
TASKS_LAST = 60.0

#: act of the page -> method of the schedules, if its name is another one
_CHANGES = {"skip": "skip_next", "run": "run_now"}


#: options of a put that a schedule has by the same names
_RULES = (
    *("options", "misfire", "grace", "overlap", "jitter", "start", "end", "max_runs"),
    *("timezone", "exclude"),
)


def mask_of(app: Celery, more: Sequence[str] = ()) -> http.Mask:
    """What is not shown: the app's setting ``toc_web_mask``, and more.

    Raises ConfigurationError.
    """
    mask = http.Mask.of(app.conf.get("toc_web_mask"))
    return http.Mask((*mask.patterns, *more)) if more else mask


def load_tasks(app: Celery) -> None:
    """Import the modules of an app's tasks, as a worker does: of a task that is known here, options
    hold when it is sent, and a mask finds arguments by place. What cannot be imported is left out,
    for its tasks run elsewhere."""
    try:
        app.loader.import_default_modules()
    except Exception as exc:
        logger.warning("modules of tasks are left out, whose tasks are unknown here: %r", exc)


class AppExtras(http.PageExtras):
    """What the page of an app shows."""

    has_schedules = True
    has_workers = True

    def __init__(self, allowed: over_http.Allowed) -> None:
        self._app, self.allowed = allowed.app, allowed
        #: tasks that workers have registered, and until when that is not asked again
        self._registered: set[str] = set()
        self._registered_until = 0.0
        self._registering = asyncio.Lock()
        self._names = cache(self._names_of)
        #: asks the workers, whose replies go to a queue for each thread
        self._asks = ThreadPoolExecutor(1, "toc-page-workers")
        self._workers = _Workers(self._app, self._asks)

    # -- messages

    def parts(self, found: kombu_toc.Found, budget: Any) -> http.Parts:
        """As every page tells them, and a task of protocol 1, which has its name in its body."""
        parts = super().parts(found, budget)
        if parts.problem or parts.task is not None or parts.content_type is None:
            return parts
        task = Task(self._app, found)
        if task.name is None:
            return parts
        return parts._replace(
            task=str(task.name),
            args=task.args,
            kwargs=task.kwargs,
            rest=task.embedded,
            problem=task.problem,
        )

    def parameters(self, task: str) -> Sequence[str] | None:
        """Names of the parameters of a task that is registered here."""
        return self._names(task) if task in self._app.tasks else None

    def _names_of(self, name: str) -> Sequence[str] | None:
        try:
            signature = inspect.signature(self._app.tasks[name].run)
        except (KeyError, TypeError, ValueError):
            return None
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [one.name for one in signature.parameters.values() if one.kind in kinds]

    async def cancelled(self, cancelled: Sequence[kombu_toc.Cancelled]) -> None:
        """Results of tasks that never run are marked REVOKED, as a revoke marks them."""
        if isinstance(self._app.backend, DisabledBackend):
            return
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self.allowed.results, self._mark, cancelled)
        except Exception as exc:  # whatever a result backend raises
            logger.warning("results of cancelled tasks are not marked REVOKED: %s", exc)

    def _mark(self, cancelled: Sequence[kombu_toc.Cancelled]) -> None:
        tasks = [Task(self._app, one) for one in cancelled]
        revoked = [task.id for task in tasks if mark_revoked(self._app, task)]
        if revoked:
            remember_revoked(timeout_center(self._app), revoked)

    # -- workers

    async def sources(self, id: str) -> list[tuple[str, str, str]]:
        """What the cancellations and the result backend say of a task."""
        center = timeout_center(self._app)
        return [*(await asyncio.to_thread(sources_of, self._app, center, id))]

    async def workers(self) -> list[http.WorkerRow] | None:
        """What workers have said lately; None until the first have answered. They are asked while
        somebody wants to know, for all viewers together."""
        return await self._workers.read()

    async def aclose(self) -> None:
        await self._workers.aclose()
        self._asks.shutdown(wait=False)
        self.allowed.results.shutdown(wait=False)

    # -- tasks that are sent

    async def tasks(self, may_any: bool) -> tuple[list[str], str]:
        async with self._registering:
            if time.monotonic() >= self._registered_until:
                loop = asyncio.get_running_loop()
                self._registered = await loop.run_in_executor(self._asks, self._ask_tasks)
                lasts = TASKS_LAST if self._registered else ASK_EVERY
                self._registered_until = time.monotonic() + lasts
        about = ""
        names = self._registered
        if not names:
            names = {name for name in self._app.tasks if not name.startswith("celery.")}
            about = "No worker has answered: these are the tasks that this process has loaded."
        if not may_any:
            names = {name for name in names if self.allowed.allows(name)}
            about += " The server allows some tasks only: celery toc web --allow NAME allows more."
        return sorted(names), about.strip()

    def _ask_tasks(self) -> set[str]:
        try:
            answers = _told(self._app, "registered").values()
        except Exception as exc:  # the broker is away
            logger.info("the workers cannot be asked what they have registered: %s", exc)
            return set()
        # Each is followed by its rate limit in brackets, if it has one.
        lists = [said for said in answers if isinstance(said, list)]
        return {str(one).split(" [")[0] for said in lists for one in said}

    async def _check_task(self, name: str, may_any: bool) -> None:
        if not may_any:
            self.allowed.check(name)
        names, _ = await self.tasks(may_any)
        if name not in names:
            raise http.fields.invalid(
                "task", f"no worker has registered {name[:100]!r}: choose from the list"
            )

    async def send(
        self, body: dict[str, Any], token: http.Token, request: http.Request, may_any: bool
    ) -> str:
        """Send a task; return its queue. Raises Problem.

        body: as the HTTP API takes it
        """
        fields = over_http.NEW_TASK.read(body, "")
        await self._check_task(fields["task"], may_any)
        _, queue = await over_http.send(self._app, fields, token, request)
        return queue

    # -- schedules

    async def schedules(
        self, token: http.Token, limit: int, after: str
    ) -> tuple[list[Schedule], str | None]:
        """A page of the schedules that a token may see, and where the next one begins. Raises
        Problem.

        after: where this one begins; empty: at the first one
        """
        return await over_http.page_of_schedules(self.allowed.recurring, token, limit, after)

    async def schedule(self, name: str) -> tuple[Schedule, list[Firing]]:
        """A schedule and its latest firings. Raises Problem if there is none."""
        found = await self.allowed.recurring.get(name)
        if found is None:
            raise over_http.unknown(name)
        return found, await self.allowed.recurring.history(name)

    async def schedule_fields(self, name: str) -> dict[str, Any]:
        """A schedule by the names of the fields of its form: text, but for `args` and `kwargs`.
        Raises Problem if there is none, or if no form can have it."""
        found, _ = await self.schedule(name)
        await self._kept(found)
        return {
            "task": found.task,
            "when": found.text,
            "args": list(found.args or ()),
            "kwargs": dict(found.kwargs or {}),
            "queue": found.queue,
            "timezone": found.timezone,
            "misfire": found.misfire,
            "grace": _span(found.grace),
            "overlap": found.overlap,
            "jitter": _span(found.jitter) if found.jitter else "",
            "start": found.start or "",
            "end": found.end or "",
            "maxRuns": found.max_runs or "",
            "exclude": ", ".join(map(str, found.exclude)),
        }

    async def _kept(self, found: Schedule) -> dict[str, Any]:
        """The options of a put that changes nothing. Raises Problem for a schedule that another
        program puts, and for one that a put by its task's name would take something from."""
        said = ""
        if found.owner:
            said = f"was put by {found.owner!r}: change it there"
        elif isinstance(found.args, str) or isinstance(found.kwargs, str):
            said = "has arguments that cannot be read here"
        elif any(found.message.embedded.values()):
            said = "has callbacks or a chain, which no form has: change it where it was put"
        if said:
            raise http.Problem("conflict", f"the schedule {found.name!r} {said}")
        kept = {rule: getattr(found, rule) for rule in _RULES}
        kept.update(args=found.args or (), kwargs=found.kwargs or {})
        kept["either_day"] = getattr(found.timing, "either_day", False)
        plan = await self.allowed.recurring.plan(found.name, found.task, found.schedule, **kept)
        # Its queue was named, unless its route leads to just that message.
        is_routed = plan.record.fingerprint == found.fingerprint
        return {**kept, "queue": None if is_routed else found.queue}

    async def put_schedule(
        self, name: str, body: dict[str, Any], by: str, *, is_new: bool, may_any: bool
    ) -> None:
        """Put a schedule. Raises Problem.

        body: as the HTTP API takes it. Of one that is not new, what it lacks of ``every`` and
            ``cron``, ``args`` and ``kwargs`` stays
        by: who does it
        may_any: whether the task may be any that a worker has registered
        """
        schedules = self._signed(by)
        found = await schedules.get(name)
        if not is_new and found is None:
            raise over_http.unknown(name)
        if is_new and found is not None:
            raise http.fields.invalid("name", "there is a schedule of this name")
        more: dict[str, Any] = {}
        when = None
        if found is not None:
            kept = await self._kept(found)
            more = {option: kept[option] for option in ("args", "kwargs", "options")}
            if (body.get("queue"), body.get("task")) == (found.queue, found.task):
                more["queue"] = kept["queue"]
                del body["queue"]
            if not {"every", "cron"} & body.keys():
                when, more["either_day"], body["every"] = found.schedule, kept["either_day"], 1
        fields = over_http.PUT.read(body, "")
        await self._check_task(fields["task"], may_any)
        for field, check, said in (
            ("name", check_name, name),
            ("timezone", zone_of, fields.get("timezone", "UTC")),
        ):
            try:
                check(said)
            except ScheduleError as exc:
                raise http.fields.invalid(field, str(exc)) from None
        await over_http.keep(
            schedules, name, fields, when or over_http.when_of(fields), found, **more
        )

    def _signed(self, by: str) -> Any:
        return self.allowed.recurring.signed(f"{by or 'this machine'} (page)")

    async def change_schedule(self, name: str, act: str, by: str, *given: float | None) -> Any:
        """Pause, resume, skip, run, delete or back-fill a schedule. Raises Problem.

        by: who does it
        given: of a back-fill, the first and the last moment, in seconds since the epoch; None: now
        """
        schedules = self._signed(by)
        with over_http.refusals(name):
            return await getattr(schedules, _CHANGES.get(act, act))(name, *given)


class _Workers(http.Background[list[http.WorkerRow] | None]):
    """What the workers of an app hold."""

    NAME, EVERY = "the workers", ASK_EVERY
    latest = None

    def __init__(self, app: Celery, asks: ThreadPoolExecutor) -> None:
        self._app, self._asks = app, asks

    async def ask(self) -> list[http.WorkerRow] | None:
        return await asyncio.get_running_loop().run_in_executor(self._asks, self._answers)

    def _answers(self) -> list[http.WorkerRow]:
        running = _told(self._app, "active")
        reports = _told(self._app, "toc") if running else {}
        return [_worker(name, said, reports.get(name)) for name, said in sorted(running.items())]


def _told(app: Celery, command: str) -> dict[str, Any]:
    """What workers answer, by their names."""
    replies = app.control.broadcast(command, reply=True, timeout=ANSWER_WITHIN)
    return {name: said for reply in replies or () for name, said in reply.items()}


def _worker(name: str, running: Sequence[Any], report: Any) -> http.WorkerRow:
    """What a worker has said.

    report: of ``inspect toc``; None of a worker whose broker is another one
    """
    active = [(one["id"], one["name"]) for one in running if isinstance(one, dict)]
    ids = {id for id, _ in active}
    if not isinstance(report, dict) or "leases" not in report:
        return http.WorkerRow(name, [], active, [], None)
    messages = [*report["leases"]["messages"], *report["held"]]
    named = {one["id"]: one.get("task") or "" for one in messages}
    held = [(id, task) for id, task in named.items() if id not in ids]
    free, is_paused = report["capacity"]["free"], bool(report["paused"])
    return http.WorkerRow(name, sorted(report["topics"]), active, held, free, is_paused)


def _span(seconds: float) -> str:
    return f"{seconds:.6f}".rstrip("0").rstrip(".") + "s"


# -- the application of an app


def api_for_app(
    app: Celery,
    *,
    tokens: http.Tokens | None = None,
    allow: Iterable[str] = (),
    names: Iterable[str] = (),
    keep_answers: float = 3600.0,
    beside: Iterable[Any] = (),
    mask: Iterable[str] = (),
) -> http.HttpApi:
    """The HTTP API of an app's broker, and its page: an ASGI application, to be served or mounted.

    tokens: who may do what; without any, only requests from this machine are answered
    allow: names of tasks that may be sent, or patterns with ``*``; none unless given
    names: names of this server, by which who has no token may read, where that is allowed
    keep_answers: seconds for which answers are kept under an Idempotency-Key
    beside: what runs while the application does, such as :func:`kombu_toc.notify.beside`
    mask: names of arguments that are hidden on the page, and from tokens that may not write; or
        patterns; beside ``toc_web_mask``

    Raises ConfigurationError if the app's broker is no timeout center.
    """
    url, ssl, options = broker_of(app)
    allowed = over_http.Allowed(app, allow)

    return http.api_for(
        url,
        tokens=tokens,
        operations=(*over_http.TASKS, *over_http.SCHEDULES),
        on_close=(partial(aio.aclose, app),),
        check_message=allowed.check_message,
        names=names,
        keep_answers=keep_answers,
        beside=beside,
        extras=AppExtras(allowed),
        mask=mask_of(app, tuple(mask)),
        ssl=ssl,
        **options,
    )
