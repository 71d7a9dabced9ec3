"""One message in full; and failed tasks, the task library and the audit log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...model.failures import FailedTask
from ...model.library import STATUSES, Record
from ...model.results import IN_FLIGHT, Found
from ..fields import going_on, invalid, not_found
from ..library import MOST_FAILURES, between, read_attributes, shown_failures, shown_record
from ..request import Answer
from ..tokens import Masking
from .render import Ask, View, counted, link, noted, read_time, redirect
from .selection import ACTS, FAILED_ACTS, FAILED_TASK, FIRST, Act, Selection
from .tools import Tools, check_any, check_role

# -- what is kept beside Redis and of people

#: Records and failed tasks of a page, and entries of the log.
PAGE = 100

#: The name of an entry of the log.
_ENTRY = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")

#: Milliseconds after which the log is looked at again.
EVERY_RECORDS = 5_000


async def library(tools: Tools, ask: Ask) -> View:
    """Find tasks by business id, status, name and time; or all that is known of one."""
    check_role(ask, "read", None)
    if not tools.api.has_library:
        raise not_found("there is no task library: set toc_library in the broker's URL")
    now_us = await tools.now_us()
    query = ask.query
    shown: dict[str, Any] = {"statuses": STATUSES, "after": None, "silent": ""}
    if id := query.get("id", "").strip():
        found = await tools.api.ask_library("history", id)
        shown["nothing"] = f"The library knows no task {id!r}."
    else:
        status = query.get("status") or None
        if status is not None and status not in STATUSES:
            raise invalid("status", f"it must be one of {', '.join(STATUSES)}")
        times = {at: read_time(query.get(at, ""), at, now_us / 1e6) for at in ("since", "until")}
        with going_on(FIRST):
            page = await tools.api.ask_library(
                "find",
                biz_type=query.get("type") or None,
                biz_id=query.get("biz") or None,
                status=status,
                task=query.get("task") or None,
                attributes=read_attributes(query.get("attributes", "")),
                between=between(times),
                limit=PAGE,
                after=query.get("after") or None,
            )
        found, shown["after"], shown["silent"] = page.records, page.after, ", ".join(page.away)
        shown["nothing"] = "The library knows no such task."
    shown["records"] = _records(tools, found)
    return View(id or "Task library", "library", shown, "library", now_us=now_us)


def _records(tools: Tools, found: Sequence[Record]) -> list[tuple[Record, dict[str, Any]]]:
    """Records, and what may be shown of each."""
    return [(one, shown_record(one, tools.mask)) for one in found]


async def audit(tools: Tools, ask: Ask) -> View:
    """Who has done what."""
    check_role(ask, "read", None)
    now_us = await tools.now_us()
    before = ask.query.get("before", "")
    if before and not _ENTRY.fullmatch(before):
        raise invalid("before", f"no page goes on there; {FIRST}")
    entries, after = await tools.audit.read(PAGE, before)
    return View(
        "Audit log",
        "audit",
        {"entries": entries, "after": after},
        "audit",
        0 if before else EVERY_RECORDS,
        now_us=now_us,
    )


# -- one message in full

#: Milliseconds after which it is looked at again.
EVERY = 2_000

#: Messages of one id that are shown.
MOST = 20


async def message(tools: Tools, ask: Ask) -> View | Answer:
    """All of a message; and of others that share its id. Of an id that no message has, what is
    known: its task may run, acknowledged as it began."""
    name = await tools.queue_of(ask, "read", ask.query.get("queue", ""))
    id = ask.query.get("id", "")
    now_us = await tools.now_us()
    history, silent = await tools.recorded(ask, "history", id=id) if id else ((), "")
    found: list[Found] = await tools.center.get(id, topic=name)
    found.sort(key=lambda one: one.id != id)
    failed, missing = await tools.as_far(tools.center.failures.get(id, topic=name))
    usage = await tools.center.queues.usage(name) if found else None
    declared = await tools.center.registry.declared(name) if found else None
    retries = None if declared is None else declared.declaration.retries
    sources: list[tuple[str, str, str]] = []
    if not found and ask.visitor.may("read", None):
        sources = await tools.extras.sources(id)
    holders: list[str] | str | None = None
    if any(one.state == IN_FLIGHT for one in found):
        holders = await _holders(tools, [one.id for one in found])
    elif not found and ask.visitor.may("read", None):
        holders = await _holders(tools, [id])
    shown = [one async for one in tools.reader.read_all(found[:MOST], now_us)]
    tasks = [one.task for one in shown] + [one.task for one in (*failed, *history)]
    knows = found or failed or history or silent or any(said for _, said, _ in sources)
    is_recorded = tools.api.has_library and ask.visitor.may("read", None) and not silent
    return View(
        next(filter(None, tasks), id),
        "message",
        {
            "id": id,
            "queue": name,
            "sources": sources,
            "asked": [name, "failures", *(["the task library"] if is_recorded else [])],
            "silent": silent or missing,
            "messages": [
                {
                    "shown": one,
                    "acts": [
                        act
                        for act in ACTS.values()
                        if one.state in act.states and ask.visitor.may(act.role, name)
                    ],
                }
                for one in shown
            ],
            "left": len(found) - MOST,
            "retries": retries,
            "usage": usage,
            "holders": holders,
            "history": _records(tools, history),
            "failures": await failures_of(tools, failed),
            "acts": acts_of(ask, name),
        },
        every=EVERY,
        status=200 if knows or holders is not None else 404,
        now_us=now_us,
        typed=bool(found),
    )


async def _holders(tools: Tools, ids: Sequence[str]) -> list[str] | str | None:
    """Which workers say that they have one of these; "asked" while they are asked, and None if they
    cannot be."""
    if not tools.extras.has_workers:
        return None
    workers = await tools.extras.workers()
    if workers is None:
        return "asked"
    every = {id.rpartition("#")[0] or id for id in ids} | set(ids)
    held = []
    for one in workers:
        if any(id in every for id, _ in one.running):
            held.append(f"{one.name}, which runs it")
        elif any(id in every for id, _ in one.held):
            held.append(f"{one.name}, which has fetched it")
    return held


# -- failed tasks: by task and exception, and one by one; retry and delete


#: Milliseconds after which failed tasks are looked at again.
EVERY_FAILURES = 5_000

#: Groups that are shown.
GROUPS = 200


async def failures(tools: Tools, ask: Ask) -> View:
    """Failed tasks: their groups, or those of one group, the latest first."""
    check_any(ask, "read")
    queue, task = ask.query.get("queue", ""), ask.query.get("task", "")
    exception = ask.query.get("exception", "")
    now_us = await tools.now_us()
    shown: dict[str, Any] = {"queue": queue, "task": task, "exception": exception}
    if queue and (task or exception):
        await tools.queue_of(ask, "read", queue)
        asked = tools.center.failures.find(
            queue,
            task=task or None,
            exception=exception or None,
            limit=PAGE,
            messages=bool(tools.mask),
            after=ask.query.get("after") or None,
        )
        with going_on(FIRST):
            page, shown["silent"] = await tools.as_far(asked)
        shown["failures"] = await failures_of(tools, page.failures)
        shown["after"], shown["acts"] = page.after, acts_of(ask, queue)
    else:
        every, shown["silent"] = await tools.failure_groups()
        groups = [
            one for one in every if ask.visitor.may("read", one.topic) and queue in ("", one.topic)
        ]
        shown["groups"] = [(one, acts_of(ask, one.topic)) for one in groups[:GROUPS]]
        shown["left"] = len(groups) - GROUPS
    title = " of ".join(filter(None, (exception or "Failures", task or queue)))
    return View(title, "failures", shown, "failures", EVERY_FAILURES, now_us=now_us)


def acts_of(ask: Ask, queue: str) -> list[Act]:
    """What a visitor may do to failures of a queue."""
    return [act for act in FAILED_ACTS.values() if ask.visitor.may(act.role, queue)]


async def failures_of(
    tools: Tools, failures: Sequence[FailedTask]
) -> list[tuple[FailedTask, dict[str, Any]]]:
    """Failures, and what may be shown of each."""
    masking = Masking(tools.mask, tools.extras.parameters) if tools.mask else None
    shown = await shown_failures(failures, masking, tools.reader)
    return list(zip(failures, shown, strict=True))


async def change_failures(tools: Tools, ask: Ask) -> View | Answer:
    """Retry or delete those that were chosen, or a group."""
    act = FAILED_ACTS.get(ask.field("act"))
    if act is None:
        raise invalid("act", f"it must be one of {', '.join(FAILED_ACTS)}")
    name = await tools.queue_of(ask, act.role, ask.field("queue"))
    task, exception = ask.field("task"), ask.field("exception")
    ids = list(dict.fromkeys(ask.fields.get("id", [])))
    if not (task or ids) or len(ids) > MOST_FAILURES:
        raise invalid("id", f"choose 1 to {MOST_FAILURES:,} failed tasks")
    what = ", ".join(ids[:20]) or f"{exception} of {task}"
    if act.asks and not ask.field("sure"):
        return View(
            f"{act.title} failures?",
            "forget",
            {"queue": name, "task": task, "exception": exception, "ids": ids, "what": what},
        )
    if not ids:
        which = Selection(name, FAILED_TASK, task=task, error=exception)
        job = await tools.jobs.begin(act.name, which, ask.visitor.name, None)
        return redirect(ask, link("job", id=job.id))
    back = link("failures", queue=name, task=task, exception=exception)
    if ask.field("back") == "message" and len(ids) == 1:
        back = link("message", queue=name, id=ids[0])
    async with tools.audit.doing(ask.visitor.name, act.name, name, what) as doing:
        try:
            done = await tools.actions.run_failed(act.name, name, ids)
        finally:
            tools.forget(name)
        doing.number = done.number
    said = f"{counted(done.number, 'task')} {act.done}."
    if done.late:
        said += f" {done.late:,} retried or deleted before."
    return redirect(ask, back, said + noted(done.notes))
