"""One message in full."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ...model.library import STATUSES, Record
from ...model.results import IN_FLIGHT, Found, Usage
from ..library import read_attributes, shown_record
from ..mask import Mask
from ..problems import invalid, not_found
from ..request import Answer
from . import html
from .actions import ACTS, fits
from .html import Markup, h, link, markup, read_time
from .layout import Ask, Column, View, badge, details, filters, form, hidden, labelled, live, table
from .reading import DIED, FLYING, READY, SCHEDULED, WHOLE, Shown
from .tools import Tools, check_role

# -- what is kept beside Redis and of people

#: Records of a page, and entries of the log.
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
    if id := query.get("id", "").strip():
        found = await tools.api.ask_library("history", id)
        told = [told_of(one, tools.mask, now_us) for one in found]
        content = _table_of_records(told, f"The library knows no task {id!r}.")
        shown = markup(_filters(query), live("records", content))
        return View(id, shown, "library", now_us=now_us)
    status = query.get("status") or None
    if status is not None and status not in STATUSES:
        raise invalid("status", f"it must be one of {', '.join(STATUSES)}")
    since = read_time(query.get("since", ""), "since", now_us / 1e6)
    until = read_time(query.get("until", ""), "until", now_us / 1e6)
    try:
        page = await tools.api.ask_library(
            "find",
            biz_type=query.get("type") or None,
            biz_id=query.get("biz") or None,
            status=status,
            task=query.get("task") or None,
            attributes=read_attributes(query.get("attributes", "")),
            between=None if since is until is None else (since, until),
            limit=PAGE,
            after=query.get("after") or None,
        )
    except ValueError:
        raise invalid("after", "no page goes on there; begin with the first one") from None
    more = None
    if page.after is not None:
        to = link("library", **{**query, "after": page.after})
        more = h.p(h.a("Next page", href=to, class_="button", rel="next"))
    return View(
        "Task library",
        markup(
            _filters(query),
            live(
                "records",
                _table_of_records(
                    [told_of(one, tools.mask, now_us) for one in page.records],
                    "The library knows no such task.",
                ),
                more,
            ),
        ),
        "library",
        now_us=now_us,
    )


def told_of(record: Record, mask: Mask, now_us: int) -> dict[str, Any]:
    """A record, with its times as they are shown: ``due``; ``changed``, and ``since`` then."""
    return {
        **shown_record(record, mask),
        "due": html.when(record.action_us, now_us) if record.action_us else "",
        "changed": html.when(record.modified_us, now_us),
        "since": html.ago(record.modified_us, now_us),
    }


def _filters(query: Any) -> Markup:
    def text(field: str, title: str, hint: str) -> Markup:
        return labelled(
            title, h.input(name=field, value=query.get(field, ""), placeholder=hint, size=16)
        )

    chosen = query.get("status", "")
    return filters(
        text("biz", "Business id", "42"),
        text("type", "Business type", "order"),
        labelled(
            "Status",
            h.select(
                h.option("any", value=""),
                (h.option(one, value=one, selected=one == chosen) for one in STATUSES),
                name="status",
            ),
        ),
        text("task", "Task", "shop.remind"),
        text("attributes", "Attributes", "shop=berlin"),
        text("since", "Due not before", "-1d"),
        text("until", "Due before", "1h30m"),
        text("id", "Id", "the whole id"),
        h.button("Find", class_="main"),
        view="library",
    )


def _table_of_records(found: list[dict[str, Any]], nothing: str) -> Markup:
    return table(
        (
            Column("Id", "id"),
            Column("Task", "wide"),
            Column("Queue"),
            Column("Business"),
            Column("Status"),
            Column("Due"),
            Column("Deliveries", "number"),
            Column("Worker", "wide"),
            Column("Changed"),
            Column("Error", "wide"),
        ),
        (
            (
                h.a(
                    one["id"],
                    href=link("message", queue=one["queue"], id=one["id"]),
                    class_="open",
                ),
                one.get("task", ""),
                one["queue"],
                " ".join(filter(None, (one.get("bizType"), one.get("bizId")))),
                badge(one["status"]),
                one["due"],
                one.get("attempts", 0),
                one.get("worker", ""),
                one["since"],
                _error(one.get("error", "")),
            )
            for one in found
        ),
        nothing=nothing,
    )


def _error(text: str) -> Any:
    """An error in one line; the end of its traceback, if it has one, behind it."""
    first, _, rest = text.partition("\n")
    return h.details(h.summary(first), h.pre(rest)) if rest else first


async def audit(tools: Tools, ask: Ask) -> View:
    """Who has done what."""
    check_role(ask, "read", None)
    now_us = await tools.now_us()
    before = ask.query.get("before", "")
    if before and not _ENTRY.fullmatch(before):
        raise invalid("before", "no page goes on there; begin with the first one")
    entries, after = await tools.audit.read(PAGE, before)
    more = None
    if after:
        more = h.p(h.a("Earlier", href=link("audit", before=after), class_="button", rel="next"))
    return View(
        "Audit log",
        markup(
            live(
                "audit",
                table(
                    (
                        Column("When"),
                        Column("Who"),
                        Column("What"),
                        Column("Queue", "wide"),
                        Column("Messages", "number"),
                        Column("Which", "wide mono"),
                    ),
                    (
                        (
                            html.when(one.us, now_us),
                            one.who,
                            one.act,
                            one.queue,
                            html.number(one.number) if one.number >= 0 else "-",
                            one.what,
                        )
                        for one in entries
                    ),
                    nothing="Nobody has done anything here.",
                ),
                more,
            )
        ),
        "audit",
        0 if before else EVERY_RECORDS,
        now_us=now_us,
    )


# -- one message in full

#: Milliseconds after which it is looked at again.
EVERY = 2_000

#: Messages of one id that are shown.
MOST = 20

#: What the time of a message is, by its state.
_TIMES = {SCHEDULED: "due", READY: "due", FLYING: "lease ends", DIED: "died"}


async def message(tools: Tools, ask: Ask) -> View | Answer:
    """All of a message; and of others that share its id."""
    name = await tools.queue_of(ask, "read", ask.query.get("queue", ""))
    id = ask.query.get("id", "")
    now_us = await tools.now_us()
    history = await _history(tools, ask, id)
    found: list[Found] = await tools.center.get(id, topic=name)
    if not found:
        return await _gone(tools, ask, name, id, history, now_us)
    found.sort(key=lambda one: one.id != id)
    usage = await tools.center.usage(name)
    retries = await _retries(tools, name)
    parts: list[Markup] = []
    async for shown in tools.reader.read_all(found[:MOST], now_us):
        place = len(parts)
        parts.append(
            markup(
                h.h2(f"Another message of this id: {shown.found.id}") if place else None,
                live(f"message-{place}", _facts(shown, now_us, usage, retries)),
                _acts(ask, shown),
                _content(shown, place),
            )
        )
    holders = None
    if any(one.state == IN_FLIGHT for one in found):
        holders = await _holders(tools, ask, [one.id for one in found])
    return View(
        id,
        markup(
            h.p(h.a(f"Queue {name}", href=link("queue", queue=name)), class_="about"),
            live("holders", holders),
            parts,
            h.p(f"... and {len(found) - MOST:,} more of this id") if len(found) > MOST else None,
            _table_of([told_of(one, tools.mask, now_us) for one in history]) if history else None,
        ),
        every=EVERY,
        now_us=now_us,
        typed=True,
    )


def _facts(shown: Shown, now_us: int, usage: Usage, retries: int | None) -> Markup:
    found = shown.found
    when: Any = "now: it was rolled back"
    if found.time_us:
        when = html.when(found.time_us, now_us)
    left = found.retries_left
    failed = None
    if retries is not None and left is not None and retries > left:
        failed = f"{retries - left} times, {left} of {retries} retries left"
    elif left is not None:
        failed = f"{'never, ' if left == retries else ''}{left} retries left"
    biz = shown.biz
    expires = found.expires_us
    return details(
        (
            ("Id", h.code(found.id)),
            ("Task", shown.task),
            ("State", badge(shown.state)),
            (_TIMES[shown.state].capitalize(), when),
            ("Queue", f"{found.topic}, slot {found.slot}" if found.slot >= 0 else found.topic),
            ("Place", "the task library, until its time comes" if found.far else None),
            ("Business id", " ".join(filter(None, biz)) if biz else None),
            ("Came back", failed),
            ("Retried by its task", shown.retries or None),
            ("Key", shown.key),
            ("Waits for", _waits(shown, usage)),
            ("Unique key", shown.unique),
            ("Lease lasts", html.span(found.visibility) if found.visibility else None),
            ("Lease at most", html.span(found.max_lease) if found.max_lease else None),
            ("Expires", html.when(expires, now_us) if expires else None),
            ("Why it is dead", shown.reason or None),
            ("Cannot be read", shown.problem or None),
        )
    )


def _waits(shown: Shown, usage: Usage) -> Markup | None:
    """Which limits a message that is due may wait for."""
    if shown.state != READY or not usage.limits:
        return None
    said = []
    for one in usage.limits:
        if one.name in ("put_rate", "key_put_rate"):
            continue
        if one.name.startswith("key_") and shown.found.key is None:
            continue
        used = f"{one.used} of {one.of}" if one.of is not None else f"{one.used} keys"
        opens = f", opens in {html.span(one.opens_us / 1e6)}" if one.opens_us else ""
        said.append(h.li(f"{one.name} {one.value}: {used}{opens}"))
    return h.ul(said) if said else None


def _content(shown: Shown, place: int) -> Markup:
    def block(title: str, text: str) -> Markup | None:
        if not text:
            return None
        left = len(text) - WHOLE
        more = f"\n... and {left:,} characters more" if left > 0 else ""
        return markup(h.h2(title), h.pre(text[:WHOLE] + more))

    fields = {**shown.headers, **{f"properties.{n}": v for n, v in shown.properties.items()}}
    return markup(
        block("Arguments" if shown.task else "Content", shown.arguments),
        block("Last error", shown.error),
        h.details(
            h.summary("Headers and body"),
            details((name, str(value)) for name, value in fields.items() if value is not None),
            details([("content type", shown.content_type)]),
            h.pre(shown.body[:WHOLE]),
            id=f"whole-{place}",
        ),
    )


def _acts(ask: Ask, shown: Shown) -> Markup | None:
    found = shown.found
    buttons: list[Markup] = []
    for act in ACTS.values():
        if not fits(act, shown.state) or not ask.visitor.may(act.role, found.topic):
            continue
        if act.name == "reschedule":
            buttons.append(labelled("New time", h.input(name="at", placeholder="1h30m", size=12)))
        buttons.append(
            h.button(act.title, name="act", value=act.name, class_="danger" if act.asks else None)
        )
    if not buttons:
        return None
    back = link("message", queue=found.topic, id=found.id)
    return form(
        ask,
        "do",
        hidden({"queue": found.topic, "id": found.id, "back": back}),
        h.div(buttons, class_="acts"),
    )


async def _retries(tools: Tools, queue: str) -> int | None:
    declared = await tools.center.declared(queue)
    return None if declared is None else declared.declaration.retries


async def _gone(
    tools: Tools, ask: Ask, name: str, id: str, history: Sequence[Record], now_us: int
) -> View:
    """What is said of an id that no message has: its task may run, acknowledged as it began."""
    holders = await _holders(tools, ask, [id]) if ask.visitor.may("read", None) else None
    is_held = holders is not None and "Held by" in holders
    said = "done, was cancelled, or was never there"
    return View(
        id,
        markup(
            live(
                "holders",
                h.p(f"It is not in {name}: it is {said}.", class_="about") if not is_held else None,
                holders,
            ),
            h.p(h.a(f"Queue {name}", href=link("queue", queue=name))),
            _table_of([told_of(one, tools.mask, now_us) for one in history]) if history else None,
        ),
        every=EVERY,
        status=200 if history or holders is not None else 404,
        now_us=now_us,
    )


async def _holders(tools: Tools, ask: Ask, ids: Sequence[str]) -> Markup | None:
    """Which workers say that they have one of these, if they can be asked."""
    if not tools.extras.has_workers:
        return None
    workers = await tools.extras.workers()
    if workers is None:
        return h.p("The workers are asked who has it.", class_="about")
    every = {id.rpartition("#")[0] or id for id in ids} | set(ids)
    holders = [
        (one.name, "runs it" if any(id in every for id, _ in one.running) else "has fetched it")
        for one in workers
        if any(id in every for id, _ in (*one.running, *one.held))
    ]
    if not holders:
        return h.p("No worker that answers says that it has it.", class_="about")
    return details(("Held by", f"{name}, which {what}") for name, what in holders)


async def _history(tools: Tools, ask: Ask, id: str) -> list[Record]:
    """What the task library knows of an id."""
    if not tools.api.has_library or not id or not ask.visitor.may("read", None):
        return []
    found: list[Record] = await tools.api.ask_library("history", id)
    return found


def _table_of(history: Sequence[dict[str, Any]]) -> Markup:
    """What the task library knows, the oldest first."""
    return markup(
        h.h2("In the task library"),
        table(
            (
                Column("Queue"),
                Column("Status"),
                Column("Due"),
                Column("Deliveries", "number"),
                Column("Worker", "wide"),
                Column("Changed"),
                Column("Error", "wide"),
            ),
            (
                (
                    one["queue"],
                    badge(one["status"]),
                    one["due"],
                    one.get("attempts", 0),
                    one.get("worker", ""),
                    one["changed"],
                    one.get("error", ""),
                )
                for one in history
            ),
            nothing="The task library knows nothing of it.",
        ),
    )
