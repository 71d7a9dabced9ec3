"""The search box of every page: an id, a business id, a task's name, or a queue."""

from __future__ import annotations

from typing import NamedTuple

from ..request import Answer
from .render import Ask, View, redirect
from .tools import Tools, check_any
from .words import link

#: Hits of each kind that are shown.
MOST = 50


class Hit(NamedTuple):
    """Something that was found.

    to: the address of its view
    """

    what: str
    name: str
    queue: str
    to: str


async def search(tools: Tools, ask: Ask) -> View | Answer:
    """What has a text as its id, business id, task or queue; the only one at once."""
    check_any(ask, "read")
    text = ask.query.get("q", "").strip()
    hits = dict.fromkeys(await _hits(tools, ask, text)) if text else {}
    if len(hits) == 1:
        return redirect(ask, next(iter(hits)).to)
    shown = {"hits": list(hits), "has_library": tools.api.has_library}
    return View(text or "Search", "search", shown)


async def _hits(tools: Tools, ask: Ask, text: str) -> list[Hit]:
    may = ask.visitor.may
    ids = [(one.topic, one.id) for one in await tools.center.get(text)]
    ids += [(one.topic, one.id) for one in await tools.center.failures.get(text)]
    hits: list[Hit] = []
    if tools.api.has_library and may("read", None):
        ids += [(one.topic, one.id) for one in await tools.api.ask_library("history", text)]
        page = await tools.api.ask_library("find", biz_id=text, limit=MOST)
        if page.records:
            hits.append(Hit("Business id", text, "", link("library", biz=text)))
    hits += [
        Hit("Message", id, queue, link("message", queue=queue, id=id))
        for queue, id in dict.fromkeys(ids)
        if may("read", queue)
    ][:MOST]
    queues = await tools.center.queues.names(prefix=text, limit=MOST)
    queues = [name for name in queues if may("read", name)]
    hits += [Hit("Queue", name, name, link("queue", queue=name)) for name in queues]
    hits += [
        Hit(
            f"{one.number:,} failed, {one.exception}",
            one.task,
            one.topic,
            link("failures", queue=one.topic, task=one.task, exception=one.exception),
        )
        for one in await tools.failure_groups.read()
        if text.lower() in one.task.lower() and may("read", one.topic)
    ][:MOST]
    if "." in text or tools.extras.parameters(text) is not None:
        rows = (await tools.snapshots.read("hour")).rows
        hits += [
            Hit("Waiting, of this task", text, row.queue, link("queue", queue=row.queue, task=text))
            for row in rows
            if row.counts.ready + row.counts.scheduled and may("read", row.queue)
        ][:MOST]
    return hits
