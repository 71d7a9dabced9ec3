"""Failed tasks on the page: by task and exception, and one by one; retry and delete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...model.failures import FailedTask
from ..failures import MOST, shown_failures
from ..problems import invalid
from ..request import Answer
from ..tokens import Masking
from . import words
from .render import Ask, View, redirect
from .selection import Act
from .tools import Tools, check_any
from .words import link

#: Failed tasks of a page, and milliseconds after which it is looked at again.
PAGE = 100
EVERY = 5_000

#: Groups that are shown.
GROUPS = 200

ACTS = {
    one.name: one
    for one in (
        Act("retry", "Retry", "operate", (), "retried", False),
        Act("forget", "Delete", "operate", (), "deleted", True),
    )
}


async def failures(tools: Tools, ask: Ask) -> View:
    """Failed tasks: their groups, or those of one group, the latest first."""
    check_any(ask, "read")
    queue, task = ask.query.get("queue", ""), ask.query.get("task", "")
    exception = ask.query.get("exception", "")
    now_us = await tools.now_us()
    shown: dict[str, Any] = {"queue": queue, "task": task, "exception": exception}
    if queue and (task or exception):
        await tools.queue_of(ask, "read", queue)
        try:
            page = await tools.center.failures.find(
                queue,
                task=task or None,
                exception=exception or None,
                limit=PAGE,
                messages=bool(tools.mask),
                after=ask.query.get("after") or None,
            )
        except ValueError:
            raise invalid("after", "no page goes on there; begin with the first one") from None
        shown["failures"] = await failures_of(tools, page.failures)
        shown["after"], shown["acts"] = page.after, acts_of(ask, queue)
    else:
        groups = [
            one
            for one in await tools.failure_groups.read()
            if ask.visitor.may("read", one.topic) and queue in ("", one.topic)
        ]
        shown["groups"] = [(one, acts_of(ask, one.topic)) for one in groups[:GROUPS]]
        shown["left"] = len(groups) - GROUPS
    title = " of ".join(filter(None, (exception or "Failures", task or queue)))
    return View(title, "failures", shown, "failures", EVERY, now_us=now_us)


def acts_of(ask: Ask, queue: str) -> list[Act]:
    """What a visitor may do to failures of a queue."""
    return [act for act in ACTS.values() if ask.visitor.may(act.role, queue)]


async def failures_of(
    tools: Tools, failures: Sequence[FailedTask]
) -> list[tuple[FailedTask, dict[str, Any]]]:
    """Failures, and what may be shown of each."""
    masking = Masking(tools.mask, tools.extras.parameters) if tools.mask else None
    shown = await shown_failures(failures, masking, tools.reader)
    return list(zip(failures, shown, strict=True))


async def change(tools: Tools, ask: Ask) -> View | Answer:
    """Retry or delete those that were chosen, or a group."""
    act = ACTS.get(ask.field("act"))
    if act is None:
        raise invalid("act", f"it must be one of {', '.join(ACTS)}")
    name = await tools.queue_of(ask, act.role, ask.field("queue"))
    task, exception = ask.field("task"), ask.field("exception")
    ids = list(dict.fromkeys(ask.fields.get("id", [])))
    if not (task or ids) or len(ids) > MOST:
        raise invalid("id", f"choose 1 to {MOST:,} failed tasks")
    which = {"ids": ids} if ids else {"task": task, "exception": exception}
    what = ", ".join(ids[:20]) or f"{exception} of {task}"
    if act.asks and not ask.field("sure"):
        return View(
            f"{act.title} failures?",
            "forget",
            {"queue": name, "task": task, "exception": exception, "ids": ids, "what": what},
        )
    back = link("failures", queue=name, task=task, exception=exception)
    if ask.field("back") == "message" and len(ids) == 1:
        back = link("message", queue=name, id=ids[0])
    async with tools.audit.doing(ask.visitor.name, act.name, name, what) as doing:
        try:
            if act.name == "forget":
                doing.number = await tools.center.failures.delete(name, limit=MOST, **which)
                said = f"{words.counted(doing.number, 'failure')} deleted."
            else:
                done = await tools.api.acting.failures.retry(name, limit=MOST, **which)
                doing.number = done.number
                said = f"{words.counted(done.number, 'task')} retried."
                for number, why in (
                    (done.not_kept, "without a message: cannot be retried"),
                    (done.gone, "retried before"),
                    (done.expires, "without its expiry, which had passed"),
                    (done.unique, "without holding its unique key"),
                    (done.chords, "of a group or chord, which stays as it is"),
                ):
                    said += f" {number:,} {why}." if number else ""
        finally:
            tools.forget(name)
            tools.failure_groups.forget()
    if doing.number == MOST and not ids:
        said += " There may be more: press again."
    return redirect(ask, back, said)
