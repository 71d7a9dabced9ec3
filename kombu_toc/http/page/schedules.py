"""What starts tasks: schedules, with what can be done to them, and a task that is sent by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import date
from typing import Any
from uuid import uuid4

from ...model.timetext import read_span
from ..fields import Problem, invalid, not_found
from ..request import Answer
from ..tokens import Masking
from .presentation import Ask, View, iso, link, read_time, redirect
from .snapshots import Tools, check_any, check_role

#: Schedules of a page, and milliseconds after which it is looked at again.
PAGE = 100
EVERY = 2_000

#: act -> its button, what is said of it, and the states in which it has one in each list
ACTS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "pause": ("Pause", "is paused", ("active",)),
    "resume": ("Resume", "is resumed", ("paused",)),
    "skip": ("Skip next", "will leave out its next firing", ("active",)),
    "run": ("Run now", "was sent", ("active", "paused", "ended")),
    "delete": ("Delete", "is deleted", ()),
    "backfill": ("Back-fill", "has sent firings of the past", ()),
}


async def schedules(tools: Tools, ask: Ask) -> View:
    """The schedules of all queues that the visitor may look at, or one with its latest firings."""
    _check(tools)
    check_any(ask, "read")
    if {"new", "edit", "delete"} & ask.query.keys():
        return await _form_of(tools, ask)
    now_us = await tools.now_us()
    shown: dict[str, Any] = {"acts": ACTS if ask.visitor.may("operate", None) else {}}
    if name := ask.query.get("name", ""):
        row, firings = await tools.extras.schedule(name)
        if not ask.visitor.may("read", row.queue):
            raise not_found(f"there is no schedule {name!r}")
        shown.update(row=row, firings=firings)
        return View(name, "schedule", shown, "schedules", EVERY, now_us=now_us)
    after = ask.query.get("after", "")
    rows, more = await tools.extras.schedules(ask.visitor.token, PAGE, after)
    shown.update(rows=rows, after=more)
    return View("Schedules", "schedules", shown, "schedules", EVERY, now_us=now_us)


def _check(tools: Tools) -> None:
    if not tools.extras.has_schedules:
        raise not_found(
            "schedules and tasks are of an app of Celery, and this server has none: "
            "celery -A shop toc web shows and sends them"
        )


async def change(tools: Tools, ask: Ask) -> View | Answer:
    """Put, pause, resume, skip, run, back-fill or delete one."""
    _check(tools)
    check_role(ask, "operate", None)
    name, act, who = ask.field("name"), ask.field("act"), ask.visitor.name
    if act == "put":
        return await _put(tools, ask)
    if act not in ACTS:
        raise invalid("act", f"it must be one of {', '.join(ACTS)}")
    times: list[float | None] = []
    if act == "backfill":
        now = await tools.now_us() / 1e6
        times = [read_time(ask.field(field), field, now) for field in ("start", "end")]
        if times[0] is None:
            raise invalid("start", "it must be a time: 2026-01-31 09:30, or 2 days ago")
    async with tools.audit.doing(who, f"{act} schedule", what=name):
        done = await tools.extras.change_schedule(name, act, who, *times)
    told = f": {len(done)} firings of the past were sent." if times else f" {ACTS[act][1]}."
    stays = ask.field("back") and act != "delete"
    to = link("schedules", name=name) if stays else "schedules"
    return redirect(ask, to, f"{name}{told}")


# -- forms: what is typed becomes the body that the HTTP API takes


#: Reads what was typed, given the name of the field and Redis's clock: a part of the body.
Read = Callable[[str, str, float], Any]


def _text(said: str, field: str, now: float) -> str:
    return said


def _json(said: str, field: str, now: float) -> Any:
    try:
        return json.loads(said)
    except (ValueError, RecursionError) as exc:
        raise invalid(field, f"it is not JSON: {exc}") from None


def _time(said: str, field: str, now: float) -> str:
    return iso(round((read_time(said, field, now) or 0) * 1e6))


def _seconds(said: str, field: str, now: float) -> float:
    try:
        return read_span(said)
    except ValueError as exc:
        raise invalid(field, str(exc)) from None


def _whole(said: str, field: str, now: float) -> int:
    if not re.fullmatch(r"\d{1,15}", said, re.ASCII):
        raise invalid(field, "it must be a whole number")
    return int(said)


def _days(said: str, field: str, now: float) -> list[str]:
    try:
        return [date.fromisoformat(day).isoformat() for day in re.split(r"[\s,]+", said)]
    except ValueError:
        raise invalid(field, "it must be days such as 2026-12-25, 2027-01-01") from None


def _when(said: str, field: str, now: float) -> Mapping[str, Any]:
    """An interval, or a crontab."""
    if re.match(r"every\b|\d+(\.\d+)?\s*[a-z]", said):
        return {"every": _seconds(said.removeprefix("every").strip(), field, now)}
    return {"cron": said}


#: Fields of forms by their names in the HTTP API; the template has what is shown of each.
_ARGUMENTS: Mapping[str, Read] = {"args": _json, "kwargs": _json}
SEND: Mapping[str, Read] = {"task": _text, "eta": _time, "queue": _text, **_ARGUMENTS}
PUT: Mapping[str, Read] = {
    "name": _text,
    "task": _text,
    "when": _when,
    "queue": _text,
    **_ARGUMENTS,
}
RULES: Mapping[str, Read] = {
    "timezone": _text,
    "misfire": _text,
    "grace": _seconds,
    "overlap": _text,
    "jitter": _seconds,
    "start": _time,
    "end": _time,
    "maxRuns": _whole,
    "exclude": _days,
}
NEEDED = ("name", "task", "when")


def _typed(fields: Iterable[str], ask: Ask) -> dict[str, str]:
    return {name: ask.field(name) for name in fields}


def _body(fields: Mapping[str, Read], typed: Mapping[str, str], now: float) -> dict[str, Any]:
    """What was typed, as the HTTP API takes it; what is empty is left out. Raises Problem."""
    body: dict[str, Any] = {}
    for name, read in fields.items():
        said = typed[name].strip()
        if name in NEEDED and not said:
            raise invalid(name, "it is missing")
        if said:
            value = read(said, name, now)
            body.update(value if read is _when else {name: value})
    return body


def _may_any(tools: Tools, ask: Ask) -> bool:
    """Whether a visitor may start every task: who operates all queues without a token, at this
    machine or within Django. Others may start those that the server was told to allow."""
    without_token = not tools.api.tokens or ask.visitor.is_trusted
    return without_token and ask.visitor.may("operate", None)


async def _form(
    tools: Tools,
    ask: Ask,
    title: str,
    fields: Collection[str],
    typed: Mapping[str, str],
    problem: Problem | None = None,
    rules: Collection[str] = (),
    **more: Any,
) -> View:
    """A form, with what was typed, and what is wrong with it.

    more: what it does (`act`), what it sends beside what is typed (`kept`), and the way `back`
    """
    tasks, about = await tools.extras.tasks(_may_any(tools, ask)) if fields else ([], "")
    wrong = detail = ""
    if problem is not None:
        wrong = {"every": "when", "cron": "when"}.get(problem.field, problem.field)
        wrong = wrong if wrong in (*fields, *rules) else ""
        detail = problem.detail.removeprefix(f"{problem.field}: ")
    names = [one for one in await tools.center.queues.names() if ask.visitor.may("write", one)]
    values = {
        **{"fields": fields, "rules": rules, "needed": NEEDED, "typed": typed, "tasks": tasks},
        **{"queues": sorted(names)[:500], "about": about, "wrong": wrong, "detail": detail, **more},
    }
    status = 200 if problem is None else problem.status
    return View(title, "form", values, typed=True, status=status)


async def send(tools: Tools, ask: Ask) -> View:
    """The form that sends a task."""
    _check(tools)
    check_any(ask, "write")
    typed = {**dict.fromkeys(SEND, ""), **ask.query}
    return await _send_form(tools, ask, typed, str(uuid4()))


async def _send_form(
    tools: Tools, ask: Ask, typed: Mapping[str, str], id: str, problem: Problem | None = None
) -> View:
    back = link("queue", queue=typed["queue"]) if typed["queue"] else "./"
    kept = {"id": id}  # a form that is sent twice sends one task while that waits
    how: dict[str, Any] = {"act": "send", "kept": kept, "back": back}
    return await _form(tools, ask, "Send a task", SEND, typed, problem, **how)


async def send_task(tools: Tools, ask: Ask) -> View | Answer:
    """Send a task."""
    _check(tools)
    check_any(ask, "write")
    typed, id = _typed(SEND, ask), ask.field("id") or str(uuid4())
    what = f"{typed['task'].strip()} {id}"
    try:
        body = {**_body(SEND, typed, await tools.now_us() / 1e6), "id": id}
        there = await tools.center.get(id)
        if there:
            return redirect(
                ask, link("message", queue=there[0].topic, id=id), "It was sent before."
            )
        async with tools.audit.doing(ask.visitor.name, "send", what=what) as doing:
            doing.queue = body.get("queue", "")
            doing.queue = await tools.extras.send(
                body, ask.visitor.token, ask.request, _may_any(tools, ask)
            )
    except Problem as problem:
        if problem.kind in ("forbidden", "broker"):
            raise
        return await _send_form(tools, ask, typed, id, problem)
    return redirect(ask, link("message", queue=doing.queue, id=id), f"{body['task']} was sent.")


async def _form_of(tools: Tools, ask: Ask) -> View:
    """The form that puts, edits or deletes a schedule."""
    check_role(ask, "operate", None)
    name = ask.query.get("name", "")
    if "new" in ask.query:
        return await _put_form(tools, ask, dict.fromkeys((*PUT, *RULES), ""))
    row, _ = await tools.extras.schedule(name)
    back = link("schedules", name=name)
    if "delete" in ask.query:
        about = "Its next firing goes with it. What has fired already goes on."
        if row.owner:
            about += f" It was put by {row.owner}, and may come back from there."
        how: dict[str, Any] = {"act": "delete", "kept": {"name": name}, "about": about}
        return await _form(tools, ask, f"Delete {name}", (), {}, back=back, **how)
    return await _put_form(tools, ask, await _shown(tools, name), name)


async def _shown(tools: Tools, name: str) -> dict[str, str]:
    """A schedule as it would be typed. Arguments of which something is hidden are left out."""
    said = await tools.extras.schedule_fields(name)
    masking = Masking(tools.mask, tools.extras.parameters)
    masked = {
        "args": masking.args(said["task"], said["args"]),
        "kwargs": masking.kwargs(said["kwargs"]),
    }
    for part, shown in masked.items():
        try:
            is_whole = shown == said[part] and not isinstance(shown, str)
            said[part] = json.dumps(shown, ensure_ascii=False) if shown and is_whole else ""
        except (TypeError, ValueError):
            said[part] = ""
    return {one: str(value) for one, value in said.items()}


async def _put_form(
    tools: Tools, ask: Ask, typed: Mapping[str, str], name: str = "", problem: Problem | None = None
) -> View:
    """name: of the schedule that is edited; empty: it is a new one"""
    kept = {"name": name, "edit": "1"} if name else {}
    title = f"Change {name}" if name else "New schedule"
    fields = [one for one in PUT if not (name and one == "name")]
    how: dict[str, Any] = {"act": "put", "kept": kept, "back": link("schedules", name=name)}
    return await _form(tools, ask, title, fields, typed, problem, RULES, **how)


async def _put(tools: Tools, ask: Ask) -> View | Answer:
    fields = {**PUT, **RULES}
    typed, is_new = _typed(fields, ask), not ask.field("edit")
    name = ask.field("name").strip() if is_new else ask.field("name")
    try:
        if not is_new and typed["when"] == (await tools.extras.schedule(name))[0].text:
            del fields["when"]
        body = _body(fields, typed, await tools.now_us() / 1e6)
        body.pop("name")
        who = ask.visitor.name
        async with tools.audit.doing(who, "put schedule", what=name):
            await tools.extras.put_schedule(
                name, body, who, is_new=is_new, may_any=_may_any(tools, ask)
            )
    except Problem as problem:
        if problem.kind in ("forbidden", "broker", "not-found"):
            raise
        return await _put_form(tools, ask, typed, "" if is_new else name, problem)
    return redirect(
        ask, link("schedules", name=name), f"{name} is {'put' if is_new else 'changed'}."
    )
