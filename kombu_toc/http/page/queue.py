"""A queue: its messages by state and time, filtered; what is done to those that are chosen, or to
all that match; one message in full; and failed tasks.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, NamedTuple

from ...center.center import TimeoutCenter
from ...center.topics import ALTERABLE
from ...errors import ConfigurationError
from ...metrics import read_minutes
from ...model.failures import FailedTask
from ...model.limits import LIMITS, TERMS
from ...model.message import decode_key
from ...model.results import IN_FLIGHT, Found
from ...scripts.call import text
from ..fields import Problem, going_on, invalid, not_found
from ..library import MOST_FAILURES, shown_failures
from ..request import Answer
from ..tokens import HIDDEN, Masking
from . import jobs as selections
from . import presentation
from .overview import drawn_hour, shown_records
from .presentation import Ask, View, counted, iso, link, noted, read_time, redirect, skipped
from .snapshots import MINUTES, Minute, Tools, acts_of, check_any, check_role

#: Messages and failed tasks of a page, and milliseconds after which it is looked at again.
PAGE = 100
EVERY = 2_000

#: Seconds that a look takes from which on it is said how old it is: it is not taken again at once.
SLOW = 0.1

#: Messages that may be chosen by hand, at most.
MAX_CHOSEN = 1_000


async def queue(tools: Tools, ask: Ask) -> View | Answer:
    """The messages of a queue."""
    name = await tools.queue_of(ask, "read", ask.query.get("queue", ""))
    if id := ask.query.get("id", "").strip():
        return redirect(ask, link("message", queue=name, id=id))
    now_us = await tools.now_us()
    selection = selections.Selection.of({**ask.query, "queue": name}, now_us / 1e6)
    counts = await tools.center.counts(name)
    listing, every, seen_us = await _found(tools, ask, selection, now_us)
    paused = await tools.center.queues.is_paused(name)
    declared = await tools.center.registry.declared(name)
    numbers = {
        selections.ALL_WAITING: counts.waiting,
        presentation.SCHEDULED: counts.scheduled,
        presentation.READY: counts.ready,
        presentation.FLYING: counts.in_flight,
        presentation.DIED: counts.dead,
        selections.ANY: sum(counts),
    }
    here = {field: ask.query[field] for field in selections.FIELDS if field in ask.query}
    return View(
        name,
        "queue",
        {
            "selection": selection,
            "numbers": numbers,
            "declaration": declared and declared.declaration,
            "paused": paused,
            "listing": listing,
            "number": max(numbers[selection.state], listing.looked),
            "here": {**here, "queue": name},
            "seen_us": seen_us,
            "acts": acts_of(ask, name, selection.state),
            "has_workers": tools.extras.has_workers,
            "hour": await _hour(tools, name, now_us),
        },
        every=every,
        now_us=now_us,
        typed=True,
    )


async def _hour(tools: Tools, queue: str, now_us: int) -> str:
    """The charts of a queue."""
    present = now_us // 60_000_000
    minutes = range(present - MINUTES + 1, present)
    read = await tools.center.call(read_minutes, [queue], minutes)
    return drawn_hour(list(map(Minute.of, read[queue])), now_us, folded=True)


async def _found(
    tools: Tools, ask: Ask, selection: selections.Selection, now_us: int
) -> tuple[selections.Listing, int, int | None]:
    """What matches; milliseconds after which to look again; and when it was found, by Redis's
    clock, where that may be a while ago."""
    after = ask.query.get("after", "")
    if not selection.looks_inside:
        listing = await selections.find(
            tools.center, tools.reader, selection, now_us=now_us, limit=PAGE, after=after or None
        )
        return listing, EVERY, None
    key = (selection.queue, *(ask.query.get(field, "") for field in selections.FIELDS), after)
    is_live = bool(ask.request.header(b"x-toc-live"))  # a page that looks again by itself
    seen = await tools.searches.look(key, selection, now_us=now_us, limit=PAGE, is_live=is_live)
    if seen.goes_on:
        return seen.listing._replace(goes_on=True), EVERY, None
    again = max(EVERY, round(tools.searches.again_in(seen) * 1000))
    return seen.listing, again, seen.now_us if seen.listing.took > SLOW else None


# -- acts


async def do(tools: Tools, ask: Ask) -> View | Answer:
    """Do something to messages that were chosen."""
    name, act = ask.field("queue"), _act_of(ask)
    await tools.queue_of(ask, act.role, name)
    ids = list(dict.fromkeys(ask.fields.get("id", [])))
    if not 0 < len(ids) <= MAX_CHOSEN:
        raise invalid("id", f"choose 1 to {MAX_CHOSEN:,} messages")
    back = _back(ask, link("queue", queue=name))
    now_us = await tools.now_us()
    at = _at(ask, act, now_us / 1e6)
    wanted = set(ids)
    there: list[Found] = [
        one for one in await tools.center.get(ids, topic=name) if one.id in wanted
    ]
    if act.asks and not ask.field("sure"):
        return await _ask_if_meant(tools, ask, act, there, now_us, back)
    what = ", ".join(ids[:20]) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
    if at is not None:
        what += f" to {iso(round(at * 1e6))}"
    done = await _done(tools, ask, act, name, what, tools.actions.run(act.name, there, at))
    late = len(ids) - done.number
    said = f"{counted(done.number, 'message')} {act.done}."
    if late > 0:
        said += f" Too late for {late:,}: a worker has it, or it is gone."
    if done.skipped:
        said += f" {skipped(done.skipped)}"
    return redirect(ask, back, said)


async def _done(
    tools: Tools,
    ask: Ask,
    act: selections.Act,
    queue: str,
    what: str,
    running: Awaitable[selections.Done],
) -> selections.Done:
    """What has become of messages that something is done to: it is in the audit log, and seen."""
    async with tools.audit.doing(ask.visitor.name, act.name, queue, what) as doing:
        try:
            done = await running
        finally:
            tools.forget(queue)
        doing.number = done.number
    return done


async def _ask_if_meant(
    tools: Tools, ask: Ask, act: selections.Act, there: list[Found], now_us: int, back: str
) -> View:
    if not there:
        raise not_found("these messages are gone: they are done, or somebody else was first")
    return View(
        f"{act.title} {counted(len(there), 'message')}?",
        "sure",
        {
            "act": act,
            "queue": ask.field("queue"),
            "there": there,
            "messages": [one async for one in tools.reader.read_all(there[:20], now_us)],
            "back": back,
        },
        now_us=now_us,
    )


def _act_of(ask: Ask, acts: Mapping[str, selections.Act] = selections.ACTS) -> selections.Act:
    act = acts.get(ask.field("act"))
    if act is None:
        raise invalid("act", f"it must be one of {', '.join(acts)}")
    return act


def _at(ask: Ask, act: selections.Act, now: float) -> float | None:
    """The new time that is asked for. Raises Problem."""
    if act.name != "reschedule":
        return None
    at = read_time(ask.field("at"), "at", now)
    if at is None:
        raise invalid("at", "say the new time: a span such as 1h30m, or 2026-01-31 09:30")
    return at


def _back(ask: Ask, otherwise: str) -> str:
    """Where to go afterwards: a view of this page, and nothing else."""
    back = ask.field("back")
    view = back.partition("?")[0]
    is_here = view in ("queue", "message", "dead") and back.isascii() and back.isprintable()
    return back if is_here else otherwise


async def pause(tools: Tools, ask: Ask) -> Answer:
    """Have workers take nothing from a queue, or let them again."""
    name = await tools.queue_of(ask, "operate", ask.field("queue"))
    act = ask.field("act")
    if act not in ("pause", "resume"):
        raise invalid("act", "it must be pause or resume")
    async with tools.audit.doing(ask.visitor.name, act, name):
        await (tools.center.queues.pause if act == "pause" else tools.center.queues.resume)(name)
    return redirect(ask, link("queue", queue=name), f"{name} is {act}d.")


async def begin_all(tools: Tools, ask: Ask) -> Answer:
    """Begin something that is done to all that match: they are counted first, but for a reshard."""
    reshard = selections.RESHARD
    act = _act_of(ask, {**selections.ACTS, reshard.name: reshard})
    name = await tools.queue_of(ask, act.role, ask.field("queue"))
    now = await tools.now_us() / 1e6
    said = {field: ask.field(field) for field in selections.FIELDS if act is not reshard}
    selection = selections.Selection.of({"state": selections.ANY, **said, "queue": name}, now)
    slots = _read("slots", ask.field("slots")) if act is reshard else 0
    at = _at(ask, act, now)
    if not act.could(selection.state):
        raise Problem("conflict", f"nothing that is {selection.state} can be {act.done}")
    job = await tools.jobs.begin(act.name, selection, ask.visitor.name, at, slots=slots)
    return redirect(ask, link("job", id=job.id))


# -- what is done to all that match: whether it is meant, and how far it has come

#: Milliseconds after which it is looked at again.
EVERY_JOB = 500


async def job(tools: Tools, ask: Ask) -> View | Answer:
    """How far something has come that is done to all that match."""
    found = await tools.jobs.get(ask.query.get("id", ""))
    queue = found.selection.queue
    check_role(ask, "read", queue)
    act = selections.EVERY_ACT[found.act]
    back = "failures" if found.selection.state == selections.FAILED_TASK else "queue"
    return View(
        f"{act.title} {found.selection.described()}",
        "job",
        {
            "job": found,
            "act": act,
            "back": link(back, queue=queue),
            "may": not found.is_over and ask.visitor.may(act.role, queue),
        },
        every=0 if found.is_over else EVERY_JOB,
    )


#: Milliseconds after which the jobs are looked at again.
EVERY_LIST = 2_000


async def jobs(tools: Tools, ask: Ask) -> View:
    """The latest jobs, of the queues that the visitor may look at."""
    check_any(ask, "read")
    found = [
        (one, selections.EVERY_ACT[one.act])
        for one in await tools.jobs.latest()
        if ask.visitor.may("read", one.selection.queue)
    ]
    return View("Jobs", "jobs", {"jobs": found}, "jobs", EVERY_LIST)


async def control(tools: Tools, ask: Ask) -> Answer:
    """Begin or stop it."""
    id = ask.field("id")
    found = await tools.jobs.get(id)
    check_role(ask, selections.EVERY_ACT[found.act].role, found.selection.queue)
    who = ask.visitor.name
    if ask.field("do") == "go":
        await tools.jobs.confirm(id, who)
    elif found.is_meant and not found.is_over:
        # Its own entry says how far it has come, and who has begun it.
        selection = found.selection
        async with tools.audit.doing(
            who, f"stop {found.act} all", selection.queue, selection.described()
        ):
            await tools.jobs.stop(id)
    else:
        await tools.jobs.stop(id)
    return redirect(ask, link("job", id=id))


# -- what queues limit, what is used of it and what waits; changed while they are in use


#: Queues that are shown, at most.
MOST_LIMITED = 100

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
            "used": [await tools.center.queues.usage(name) for name in limited[:MOST_LIMITED]],
            "others": others[: 2 * MOST_LIMITED],
            "are_many": len(others) > 2 * MOST_LIMITED or len(limited) > MOST_LIMITED,
            "said": _text,
        },
        "limits",
        EVERY,
    )


async def _one(tools: Tools, ask: Ask, queue: str) -> View:
    described = await tools.center.queues.describe(queue)
    keys = await tools.center.call(waiting_keys, queue, MOST_LIMITED)
    if tools.mask.hides_header("x-key"):
        keys = [one._replace(key=HIDDEN) for one in keys]
    return View(
        f"Limits of {queue}",
        "limit",
        {
            "queue": queue,
            "used": [await tools.center.queues.usage(queue)],
            "keys": keys,
            "slots": described.slots,
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


async def change_limits(tools: Tools, ask: Ask) -> Answer:
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


# -- one message in full

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
    sees_all = ask.visitor.may("read", None)
    is_gone = sees_all and not found
    sources = await tools.extras.sources(id) if is_gone else []
    flies = any(one.state == IN_FLIGHT for one in found)
    ids = [one.id for one in found] if flies else [id]
    holders = await _holders(tools, ids) if flies or is_gone else None
    shown = [one async for one in tools.reader.read_all(found[:MOST], now_us)]
    tasks = [one.task for one in shown] + [one.task for one in (*failed, *history)]
    knows = found or failed or history or silent or any(said for _, said, _ in sources)
    is_recorded = tools.api.has_library and sees_all and not silent
    return View(
        next(filter(None, tasks), id),
        "message",
        {
            "id": id,
            "queue": name,
            "sources": sources,
            "asked": [name, "failures", *(["the task library"] if is_recorded else [])],
            "silent": silent or missing,
            "messages": [{"shown": one, "acts": acts_of(ask, name, one.state)} for one in shown],
            "left": len(found) - MOST,
            "retries": retries,
            "usage": usage,
            "holders": holders,
            "history": shown_records(tools, history),
            "failures": await failures_of(tools, failed),
            "acts": acts_of(ask, name, selections.FAILED_TASK),
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
        with going_on(selections.FIRST):
            page, shown["silent"] = await tools.as_far(asked)
        shown["failures"] = await failures_of(tools, page.failures)
        shown.update(after=page.after, acts=acts_of(ask, queue, selections.FAILED_TASK))
    else:
        every, shown["silent"] = await tools.failure_groups()
        groups = [
            one for one in every if ask.visitor.may("read", one.topic) and queue in ("", one.topic)
        ]
        shown["groups"] = [
            (one, acts_of(ask, one.topic, selections.FAILED_TASK)) for one in groups[:GROUPS]
        ]
        shown["left"] = len(groups) - GROUPS
    title = " of ".join(filter(None, (exception or "Failures", task or queue)))
    return View(title, "failures", shown, "failures", EVERY_FAILURES, now_us=now_us)


async def failures_of(
    tools: Tools, failures: Sequence[FailedTask]
) -> list[tuple[FailedTask, dict[str, Any]]]:
    """Failures, and what may be shown of each."""
    masking = Masking(tools.mask, tools.extras.parameters) if tools.mask else None
    shown = await shown_failures(failures, masking, tools.reader)
    return list(zip(failures, shown, strict=True))


async def change_failures(tools: Tools, ask: Ask) -> View | Answer:
    """Retry or delete those that were chosen, or a group."""
    act = _act_of(ask, selections.FAILED_ACTS)
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
        which = selections.Selection(name, selections.FAILED_TASK, task=task, error=exception)
        job = await tools.jobs.begin(act.name, which, ask.visitor.name, None)
        return redirect(ask, link("job", id=job.id))
    back = link("failures", queue=name, task=task, exception=exception)
    if ask.field("back") == "message" and len(ids) == 1:
        back = link("message", queue=name, id=ids[0])
    done = await _done(tools, ask, act, name, what, tools.actions.run_failed(act.name, name, ids))
    said = f"{counted(done.number, 'task')} {act.done}."
    if done.late:
        said += f" {done.late:,} retried or deleted before."
    return redirect(ask, back, said + noted(done.notes))
