"""What queues limit, what is used of it and what waits; changed while they are in use."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...center.center import TimeoutCenter
from ...center.topics import ALTERABLE
from ...errors import ConfigurationError
from ...model.limits import LIMITS, TERMS
from ...model.message import decode_key
from ...model.results import Usage
from ...scripts.call import text
from ..mask import HIDDEN
from ..problems import invalid
from ..request import Answer
from . import html
from .html import Markup, h, link, markup
from .layout import Ask, Column, View, form, hidden, labelled, live, opening, redirect, table
from .tools import Tools

#: Milliseconds after which they are looked at again.
EVERY = 2_000

#: Queues that are shown, at most.
MOST = 100

#: What a form leaves to the command line: they are about more than a queue in use.
_ELSEWHERE = ("steps", "library", "guard", "horizon")

#: What is said in a field that takes a limit away.
NONE = "none"


async def limits(tools: Tools, ask: Ask) -> View:
    """The limits of all queues, or of one, which can be changed."""
    chosen = ask.query.get("queue", "")
    if chosen:
        name = await tools.queue_of(ask, "read", chosen)
        return View(
            f"Limits of {name}",
            markup(
                live(
                    "usage",
                    _table_of([await tools.center.usage(name)]),
                    _waiting(
                        await tools.center.call(waiting_keys, name, MOST),
                        tools.mask.hides_header("x-key"),
                    ),
                ),
                await _change(tools, ask, name),
            ),
            "limits",
            EVERY,
            typed=True,
        )
    snapshot = await tools.snapshots.read("hour")
    names = [row.queue for row in snapshot.rows if ask.visitor.may("read", row.queue)]
    limited = []
    for name in names:
        known = await tools.center.known(name)
        if known is not None and (known.declaration.gates or known.declaration.put_gates):
            limited.append(name)
    used = [await tools.center.usage(name) for name in limited[:MOST]]
    others = [name for name in names if name not in limited]
    return View(
        "Limits",
        markup(
            live("usage", _table_of(used)),
            h.h2("Queues without limits") if others else None,
            h.p(
                (
                    markup(h.a(name, href=link("limits", queue=name)), " ")
                    for name in others[: 2 * MOST]
                ),
            )
            if others
            else None,
            opening("limits") if len(others) > 2 * MOST or len(limited) > MOST else None,
        ),
        "limits",
        EVERY,
    )


def _table_of(found: list[Usage]) -> Markup:
    rows = []
    for usage in found:
        waits = [
            html.number(usage.running),
            html.number(usage.waiting),
            html.number(usage.keys_waiting),
            html.span(usage.oldest_us / 1e6) if usage.oldest_us else "-",
        ]
        for place, one in enumerate(usage.limits):
            used = f"{one.used:,}" if one.of is None else f"{one.used:,} of {one.of:,}"
            full = one.of is not None and one.used >= one.of
            rows.append(
                (
                    h.a(usage.topic, href=link("limits", queue=usage.topic), class_="open"),
                    one.name.replace("_", " "),
                    str(_text(one.value)),
                    h.span(used, class_="warn" if full else None),
                    html.span(one.opens_us / 1e6) if one.opens_us else "-",
                    *(waits if not place else [""] * 4),
                )
            )
        if not usage.limits:
            rows.append((usage.topic, "none", "-", "-", "-", *waits))
    return table(
        (
            Column("Queue", "wide"),
            Column("Limit"),
            Column("Value", "number"),
            Column("Used", "number"),
            Column("Next in", "number"),
            Column("Running", "number"),
            Column("Waiting", "number"),
            Column("Keys waiting", "number"),
            Column("Oldest", "number"),
        ),
        rows,
        nothing="No queue limits anything. Choose one below to limit it.",
    )


class WaitingKey(NamedTuple):
    """A key that may not start anything now.

    opens_us: how long until its rate opens, microseconds; None: it waits for one that runs
    """

    key: str
    opens_us: int | None


def waiting_keys(center: TimeoutCenter, topic: str, most: int) -> list[WaitingKey]:
    """Keys of a topic that wait, the soonest first, at most so many of each slot."""
    client = center.client
    seconds, us = client.time()
    now = seconds * 1_000_000 + us
    with client.pipeline(transaction=False) as pipe:
        for slot in center.registry.standing(topic).all_slots():
            pipe.zrange(slot.waits, 0, most - 1, withscores=True)
        replies = pipe.execute()
    found = [
        WaitingKey(decode_key(text(raw)), None if math.isinf(at) else max(int(at) - now, 0))
        for reply in replies
        for raw, at in reply
    ]
    found.sort(key=lambda one: math.inf if one.opens_us is None else one.opens_us)
    return found[:most]


def _waiting(keys: list[WaitingKey], is_hidden: bool) -> Markup | None:
    """Keys that wait.

    is_hidden: whether keys are not shown
    """
    if not keys:
        return None
    return markup(
        h.h2("Keys that wait"),
        table(
            (Column("Key", "wide mono"), Column("For")),
            (
                (
                    HIDDEN if is_hidden else one.key,
                    "one that runs"
                    if one.opens_us is None
                    else f"its rate, {html.span(one.opens_us / 1e6)}",
                )
                for one in keys
            ),
            nothing="",
        ),
    )


def _names() -> list[str]:
    names = [name for name in ALTERABLE if name not in _ELSEWHERE]
    return sorted(names, key=lambda name: (name not in TERMS, names.index(name)))


async def _change(tools: Tools, ask: Ask, queue: str) -> Markup | None:
    if not ask.visitor.may("operate", queue):
        return None
    described = await tools.center.describe(queue)
    fields = []
    for name in _names():
        limit = described.limits[name]
        is_own = limit.source == "declared"
        fields.append(
            labelled(
                name.replace("_", " "),
                h.input(
                    name=f"limit.{name}",
                    value=_text(limit.value) if is_own else "",
                    placeholder="none" if limit.value is None else str(_text(limit.value)),
                    size=14,
                ),
            )
        )
    return markup(
        h.h2("Change"),
        h.p(
            "Workers and senders know within five seconds. An empty field is the default; a rate "
            "is 100/s, 10/m, 5000/h or 20/d.",
            class_="about",
        ),
        form(
            ask,
            "limits",
            hidden({"queue": queue}),
            h.div(fields, class_="acts"),
            h.button("Change", class_="main"),
            class_="limits",
        ),
    )


def _text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, dict):
        return ",".join(f"{name}={_text(weight)}" for name, weight in value.items())
    if isinstance(value, tuple):
        return ",".join(f"{name}={_text(weight)}" for name, weight in value)
    return value


async def change(tools: Tools, ask: Ask) -> Answer:
    """Change what differs from what is declared."""
    queue = await tools.queue_of(ask, "operate", ask.field("queue"))
    described = await tools.center.describe(queue)
    changed: dict[str, Any] = {}
    for name in _names():
        if f"limit.{name}" not in ask.fields:
            continue
        said = ask.field(f"limit.{name}").strip()
        limit = described.limits[name]
        now = str(_text(limit.value)) if limit.source == "declared" else ""
        if said == now:
            continue
        changed[name] = None if said in ("", NONE) else _read(name, said)
    if not changed:
        return redirect(ask, link("limits", queue=queue), "Nothing was changed.")
    what = ", ".join(
        f"{name} {'none' if value is None else value}" for name, value in changed.items()
    )
    async with tools.audit.doing(ask.visitor.name, "alter", queue, what):
        try:
            await tools.center.alter(queue, **changed)
        except ConfigurationError as exc:
            raise invalid("", str(exc)) from None
    return redirect(ask, link("limits", queue=queue), f"Changed: {what}.")


def _read(name: str, said: str) -> Any:
    """A limit that was typed. Raises Problem."""
    try:
        return LIMITS[name].read(name.replace("_", " "), said)
    except ConfigurationError as exc:
        raise invalid(name, str(exc)) from None
