"""What queues limit, what is used of it and what waits; changed while they are in use."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...center.center import TimeoutCenter
from ...center.topics import ALTERABLE
from ...errors import ConfigurationError
from ...model.limits import LIMITS, TERMS
from ...model.message import decode_key
from ...scripts.call import text
from ..problems import invalid
from ..request import Answer
from ..tokens import HIDDEN, Mask
from .render import Ask, View, redirect
from .tools import Tools
from .words import link

#: Milliseconds after which they are looked at again.
#: Queues that are shown, at most.
MOST = 100

#: What a form leaves to the command line: they are about more than a queue in use.
_ELSEWHERE = ("steps", "library", "guard", "horizon")

#: What is said in a field that takes a limit away.
NONE = "none"


async def limits(tools: Tools, ask: Ask) -> View:
    """The limits of all queues, or of one, which can be changed."""
    if chosen := ask.query.get("queue", ""):
        return await _one(tools, ask, await tools.queue_of(ask, "read", chosen))
    snapshot = await tools.snapshots.read("hour")
    names = [row.queue for row in snapshot.rows if ask.visitor.may("read", row.queue)]
    limited = []
    for name in names:
        known = await tools.center.registry.known(name)
        if known is not None and (known.declaration.gates or known.declaration.put_gates):
            limited.append(name)
    others = [name for name in names if name not in limited]
    return View(
        "Limits",
        "limits",
        {
            "used": [await tools.center.queues.usage(name) for name in limited[:MOST]],
            "others": others[: 2 * MOST],
            "are_many": len(others) > 2 * MOST or len(limited) > MOST,
            "said": _text,
        },
        "limits",
        EVERY,
    )


async def _one(tools: Tools, ask: Ask, queue: str) -> View:
    described = await tools.center.queues.describe(queue)
    return View(
        f"Limits of {queue}",
        "limit",
        {
            "queue": queue,
            "used": [await tools.center.queues.usage(queue)],
            "keys": _shown(await tools.center.call(waiting_keys, queue, MOST), tools.mask),
            "fields": [(name, described.limits[name]) for name in _names()]
            if ask.visitor.may("operate", queue)
            else [],
            "said": _text,
        },
        "limits",
        EVERY,
        typed=True,
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


def _shown(keys: list[WaitingKey], mask: Mask) -> list[WaitingKey]:
    """Keys, hidden if the mask names them."""
    return [one._replace(key=HIDDEN) for one in keys] if mask.hides_header("x-key") else keys


def _names() -> list[str]:
    names = [name for name in ALTERABLE if name not in _ELSEWHERE]
    return sorted(names, key=lambda name: (name not in TERMS, names.index(name)))


def _text(value: Any) -> Any:
    """A limit as it is typed."""
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
    described = await tools.center.queues.describe(queue)
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
            await tools.center.queues.alter(queue, **changed)
        except ConfigurationError as exc:
            raise invalid("", str(exc)) from None
    return redirect(ask, link("limits", queue=queue), f"Changed: {what}.")


def _read(name: str, said: str) -> Any:
    """A limit that was typed. Raises Problem."""
    try:
        return LIMITS[name].read(name.replace("_", " "), said)
    except ConfigurationError as exc:
        raise invalid(name, str(exc)) from None
