"""Schedules over HTTP: read, put, paused, resumed, skipped, run, deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from celery.exceptions import QueueNotFound
from celery.schedules import solar
from kombu.exceptions import KombuError

from kombu_toc import http

from .. import aio
from ..schedules import state
from ..schedules.rules import ScheduleError, UnknownScheduleError, read_cron
from .tasks import Allowed

if TYPE_CHECKING:
    from celery import Celery

    from ..schedules.state import Firing, Schedule


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


def _written(queue: str, name: str = "") -> str:
    return f"{_quoted(queue)}:{_quoted(name)}" if name else _quoted(queue)


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _read(after: str) -> tuple[str, str]:
    """The queue and the name behind which a page begins; without a name, behind all of that
    queue."""
    queue, *names = map(unquote, after.split(":"))
    if len(names) > 1 or (after and not queue) or names == [""]:
        raise _invalid(after)
    return queue, names[0] if names else ""


def _invalid(after: str) -> Exception:
    return http.invalid("after", f"{after[:80]!r} is not what a page of these schedules has given")


# -- schedules over HTTP: read, put, paused, resumed, skipped, run, deleted

PUT = http.Object(
    {
        "task": http.Text("The name of a task that may be sent.", most=500),
        "every": http.Number("Seconds between two firings.", least=0.001, most=3e8),
        "cron": http.Text(
            "Minute, hour, day, month, day of the week: 0 3 * * *; a day must be among both kinds "
            "of days. Or @daily and the like.",
            most=500,
        ),
        "sun": http.Text("An event of the sun, such as sunrise; with latitude and longitude."),
        "latitude": http.Number(least=-90, most=90),
        "longitude": http.Number(least=-180, most=180),
        "args": http.Anything("Its arguments.", of=("array",)),
        "kwargs": http.Anything("Its arguments by name.", of=("object",)),
        "queue": http.Text("Its queue, unless its routes say it.", most=500),
        "timezone": http.Text("Of a crontab; the app's unless given."),
        "misfire": http.Text("What was missed by the grace.", choices=("skip", "once", "all")),
        "grace": http.Number("Seconds that a firing may be late.", most=3e8),
        "overlap": http.Text("While the firing before still runs.", choices=state.OVERLAPS),
        "jitter": http.Number(
            "Each firing is due up to so many seconds later; the delay of one is always the same.",
            most=3e8,
        ),
        "start": http.Time("Not before."),
        "end": http.Time("Not after."),
        "maxRuns": http.Number("So often, then it ends.", least=1, most=1e9, whole=True),
        "exclude": http.Anything("Days on which it does not fire: 2026-12-25.", of=("array",)),
    },
    needed=("task",),
    one_of=("every", "cron", "sun"),
    name="NewSchedule",
)

BACKFILL = http.Object(
    {
        "startTime": http.Time("The first moment."),
        "endTime": http.Time("The last one; now unless given."),
        "rate": http.Number("Tasks a second.", least=0.001, most=1000, default=10.0),
        "limit": http.Number(
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
        **http.members(found, _SHOWN, queue="queue", schedule="text", **_TIMES),
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


def shown_firing(firing: Firing) -> dict[str, Any]:
    return http.members(firing, _FIRING["properties"], plannedTime="planned", startTime="started")


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
        raise http.invalid("cron" if "cron" in fields else "sun", str(exc)) from None


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
        raise http.invalid("", str(exc)) from None
    except QueueNotFound as exc:
        raise http.invalid("queue", str(exc)) from None
    except (TypeError, KombuError) as exc:
        raise http.invalid("args", str(exc)) from None


_SCHEDULE = http.record(
    "name task schedule queue state nextTime",
    texts="name task schedule queue state",
    nextTime=http.or_null(http.TEXT),
)
_LISTED = http.page_of("schedules", _SCHEDULE, http.SPARSE)
_FIRING = http.record(
    "id plannedTime outcome",
    texts="id plannedTime outcome reason",
    startTime=http.or_null(http.TEXT),
    byHand=http.FLAG,
)
_EDIT = http.record("time by what", texts="time by what")
_FIRINGS = http.record("firings edits", firings=http.array(_FIRING), edits=http.array(_EDIT))


def operations(app: Celery, allowed: Allowed) -> http.Operations:
    """The operations of an app's schedules."""
    table = http.Operations("schedules")

    @table.add(
        "GET /v1/schedules",
        "List schedules",
        many_queues=True,
        query={
            "queue": http.Text("Only those of this queue.", most=500),
            **http.paging(1000),
        },
        returns=("A page.", _LISTED),
    )
    async def list_all(api: Any, request: http.Request) -> http.Answer:
        asked = request.asked
        queue = asked.get("queue")
        if queue is not None and not request.token.sees(queue):
            detail = f"this needs a token with the role read of queue {queue!r}"
            raise http.Problem("forbidden", detail)
        limit, after = asked.get("limit", 100), asked.get("after", "")
        page, more = await page_of_schedules(_schedules(), request.token, limit, after, queue)
        hides = api.masking_for(request.token)
        return http.answer(
            {"schedules": [shown(one, hides) for one in page], "nextPageToken": more}
        )

    def _schedules() -> Any:
        return aio.timeout_center(app).schedules

    def signed(request: http.Request) -> Any:
        return _schedules().signed(f"{request.token.name or 'this machine'} (HTTP)")

    @table.add(
        "GET /v1/schedules/{schedule}",
        "Read a schedule",
        many_queues=True,
        returns=("The schedule.", _SCHEDULE),
        problems=("not-found",),
    )
    async def get(api: Any, request: http.Request, name: str) -> http.Answer:
        found = await seen(request, name)
        return http.answer(shown(found, api.masking_for(request.token)))

    async def seen(request: http.Request, name: str) -> Schedule:
        """The schedule that is meant. Raises Problem if there is none, or if the token may not see
        its queue."""
        found: Schedule | None = await _schedules().get(name)
        if found is None or not request.token.sees(found.queue):
            raise unknown(name)
        return found

    @table.add(
        "GET /v1/schedules/{schedule}/history",
        "Show the latest firings and changes",
        many_queues=True,
        returns=("At most 20 firings and 10 changes, the latest first.", _FIRINGS),
        problems=("not-found",),
    )
    async def history(api: Any, request: http.Request, name: str) -> http.Answer:
        found = await seen(request, name)
        with refusals(found.name):  # it may have been deleted just now
            firings = await _schedules().history(found.name)
        edits = [http.members(one, _EDIT["properties"], time="at") for one in found.edits]
        return http.answer({"firings": [shown_firing(one) for one in firings], "edits": edits})

    @table.add(
        "PUT /v1/schedules/{schedule}",
        "Put a schedule, or change one",
        role="operate",
        act="put schedule",
        request=PUT,
        returns=("The schedule as it is then.", _SCHEDULE),
        problems=("conflict",),
    )
    async def put(api: Any, request: http.Request, name: str) -> http.Answer:
        fields = request.fields()
        allowed.check(fields["task"])
        before = await _schedules().get(name)
        found = await keep(signed(request), name, fields, when_of(fields), before)
        return http.answer(shown(found, api.masking_for(request.token)))

    @table.add(
        "POST /v1/schedules/{schedule}:backfill",
        "Send the task for each time of the past for which no firing has come",
        role="operate",
        act="backfill schedule",
        request=BACKFILL,
        returns=("The ids of the tasks.", http.record("ids", ids=http.array(http.TEXT))),
        problems=("not-found", "conflict"),
    )
    async def backfill(api: Any, request: http.Request, name: str) -> http.Answer:
        fields = request.fields()
        bounds = fields["startTime"], fields.get("endTime")
        rates = {option: fields[option] for option in ("rate", "limit") if option in fields}
        with refusals(name):
            return http.answer({"ids": await signed(request).backfill(name, *bounds, **rates)})

    def change(method: str) -> Any:
        async def run(api: Any, request: http.Request, name: str) -> http.Answer:
            with refusals(name):
                await getattr(signed(request), method)(name)
            after = await _schedules().get(name)
            if after is None:
                return http.answer({"deleted": True})
            return http.answer(shown(after, api.masking_for(request.token)))

        return run

    table.add(
        "DELETE /v1/schedules/{schedule}",
        "Delete a schedule",
        role="operate",
        act="delete schedule",
        returns=("It is gone.", http.record("deleted", deleted=http.FLAG)),
        problems=("not-found",),
    )(change("delete"))
    for verb, method, summary in (
        ("pause", "pause", "Have a schedule fire no more until it is resumed"),
        ("resume", "resume", "Have a schedule fire again"),
        ("skip", "skip_next", "Leave out the next firing"),
        ("run", "run_now", "Send the task of a schedule now"),
    ):
        table.add(
            f"POST /v1/schedules/{{schedule}}:{verb}",
            summary,
            role="operate",
            act=f"{verb} schedule",
            returns=("The schedule as it is then.", _SCHEDULE),
            problems=("not-found", "conflict"),
        )(change(method))
    return table


def unknown(name: str) -> http.Problem:
    return http.not_found(f"there is no schedule {name!r}")


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Raises Problem for what a schedule refuses."""
    try:
        yield
    except UnknownScheduleError:
        raise unknown(name) from None
    except ScheduleError as exc:
        raise http.Problem("conflict", str(exc)) from None
