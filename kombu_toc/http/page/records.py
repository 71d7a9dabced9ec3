"""What is kept beside Redis and of people: the task library, and the audit log."""

from __future__ import annotations

import re
from typing import Any

from ...model.library import STATUSES, Record
from ..library import read_attributes, shown_record
from ..mask import Mask
from ..problems import invalid, not_found
from . import words
from .html import Markup, h, link, markup
from .layout import Ask, Column, View, badge, filters, labelled, live, table
from .times import read_time
from .tools import Tools, check_role

#: Records of a page, and entries of the log.
PAGE = 100

#: The name of an entry of the log.
_ENTRY = re.compile(r"[0-9]{1,18}-[0-9]{1,18}")

#: Milliseconds after which the log is looked at again.
EVERY = 5_000


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
        content = _table_of(told, f"The library knows no task {id!r}.")
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
                _table_of(
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
        "due": words.when(record.action_us, now_us) if record.action_us else "",
        "changed": words.when(record.modified_us, now_us),
        "since": words.ago(record.modified_us, now_us),
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


def _table_of(found: list[dict[str, Any]], nothing: str) -> Markup:
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
                            words.when(one.us, now_us),
                            one.who,
                            one.act,
                            one.queue,
                            words.number(one.number) if one.number >= 0 else "-",
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
        0 if before else EVERY,
        now_us=now_us,
    )
