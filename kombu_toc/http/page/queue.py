"""A queue: its messages by state and time, filtered; and what is done to those that are chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...model.results import Counts, Found
from ...model.topic import Declaration
from ..problems import Problem, invalid, not_found
from ..request import Answer
from . import html
from .actions import ACTS, Act
from .html import Markup, h, link, markup, read_time
from .layout import (
    Ask,
    Column,
    View,
    arguments_of,
    badge,
    exact,
    filters,
    form,
    hidden,
    labelled,
    live,
    message_link,
    redirect,
    table,
    tabs,
    time_of,
)
from .reading import DIED, FLYING, READY, SCHEDULED, Shown
from .selection import ALL_WAITING, ANY, FIELDS, Listing, Selection, find
from .tools import Tools, check_role

#: Messages of a page, and milliseconds after which it is looked at again.
PAGE = 100
EVERY = 2_000

#: Seconds that a look takes from which on it is said how old it is: it is not taken again at once.
SLOW = 0.1

#: Messages that may be chosen by hand, at most.
MAX_CHOSEN = 1_000

_STATES = (
    (ALL_WAITING, "waiting"),
    (SCHEDULED, "scheduled"),
    (READY, "ready"),
    (FLYING, "in flight"),
    (DIED, "dead"),
    (ANY, "all"),
)

_COLUMNS = (
    Column("", "choice"),
    Column("Id", "id"),
    Column("Task", "wide"),
    Column("State"),
    Column("Time"),
    Column("Arguments", "wide mono"),
)
_DEAD_COLUMNS = (*_COLUMNS[:4], Column("Died"), Column("Why", "wide"))


async def queue(tools: Tools, ask: Ask) -> View | Answer:
    """The messages of a queue."""
    name = await tools.queue_of(ask, "read", ask.query.get("queue", ""))
    if id := ask.query.get("id", "").strip():
        return redirect(ask, link("message", queue=name, id=id))
    now_us = await tools.now_us()
    selection = Selection.of({**ask.query, "queue": name}, now_us / 1e6)
    counts = await tools.center.counts(name)
    listing, every, seen_us = await _found(tools, ask, selection, now_us)
    paused = await tools.center.is_paused(name)
    declared = await tools.center.declared(name)
    return View(
        name,
        markup(
            live(
                "states",
                _tabs(ask, name, selection, counts),
                _stopped(declared.declaration) if declared else None,
                _pausing(ask, name, paused),
            ),
            _filters(ask, name, selection),
            h.p(f"Just the {selection.described()}.", class_="about") if selection.alike else None,
            h.p(html.FLIGHT, " The overview shows what runs.", class_="about")
            if selection.state == FLYING and tools.extras.has_workers
            else None,
            _messages(ask, selection, listing, now_us, seen_us, _number_of(counts, selection)),
        ),
        every=every,
        now_us=now_us,
        typed=True,
    )


async def _found(
    tools: Tools, ask: Ask, selection: Selection, now_us: int
) -> tuple[Listing, int, int | None]:
    """What matches; milliseconds after which to look again; and when it was found, by Redis's
    clock, where that may be a while ago."""
    after = ask.query.get("after", "")
    if not selection.looks_inside:
        listing = await find(
            tools.center, tools.reader, selection, now_us=now_us, limit=PAGE, after=after or None
        )
        return listing, EVERY, None
    key = (selection.queue, *(ask.query.get(field, "") for field in FIELDS), after)
    seen = await tools.searches.look(
        key,
        selection,
        now_us=now_us,
        limit=PAGE,
        is_live=ask.is_live,
    )
    goes_on = tools.searches.goes_on(key)
    again = EVERY if goes_on else max(EVERY, round(tools.searches.again_in(seen) * 1000))
    if goes_on:
        return seen.listing._replace(goes_on=True), again, None
    return seen.listing, again, seen.now_us if seen.listing.took > SLOW else None


def _numbers(counts: Counts) -> dict[str, int]:
    """How many messages there are of each state."""
    return {
        ALL_WAITING: counts.waiting,
        SCHEDULED: counts.scheduled,
        READY: counts.ready,
        FLYING: counts.in_flight,
        DIED: counts.dead,
        ANY: sum(counts),
    }


def _number_of(counts: Counts, selection: Selection) -> int:
    return _numbers(counts)[selection.state]


def _tabs(ask: Ask, name: str, selection: Selection, counts: Counts) -> Markup:
    numbers = _numbers(counts)
    kept = _kept(ask, "state", "after")
    return tabs(
        "State",
        selection.state,
        (
            (
                state,
                f"{title} {html.number(numbers[state])}",
                link("queue", **{**kept, "queue": name, "state": state}),
            )
            for state, title in _STATES
        ),
    )


def _kept(ask: Ask, *left_out: str) -> dict[str, str]:
    """The filters of a URL, as they were given."""
    return {
        field: ask.query[field] for field in FIELDS if field in ask.query and field not in left_out
    }


def _stopped(declaration: Declaration) -> Markup | None:
    """That a notifier sends nothing of the queue any more."""
    why = declaration.target_stopped
    if not why:
        return None
    said = (
        f" Nothing is sent to {declaration.target}: {why}. It goes on when a target is named again."
    )
    return h.p(badge("target stopped"), said)


def _pausing(ask: Ask, name: str, paused: bool) -> Markup | None:
    if not ask.visitor.may("operate", name):
        return h.p(badge("paused"), " Workers take nothing from it.") if paused else None
    act, title = ("resume", "Resume") if paused else ("pause", "Pause")
    return form(
        ask,
        "pause",
        hidden({"queue": name, "act": act}),
        h.p(badge("paused"), " Workers take nothing from it.") if paused else None,
        h.button(title, title="Whether workers take messages from this queue"),
        class_="row",
    )


def _filters(ask: Ask, name: str, selection: Selection) -> Markup:
    def text(field: str, title: str, hint: str) -> Markup:
        return labelled(
            title,
            h.input(name=field, value=ask.query.get(field, ""), placeholder=hint, size=16),
        )

    return filters(
        hidden({"queue": name, "state": selection.state}),
        hidden({field: ask.query.get(field) for field in ("reason", "error")}),
        text("task", "Task", "shop.mail.*"),
        text("text", "Arguments", "have this in them"),
        text("biz", "Business id", "42"),
        text("since", "Not before", "10m or 2026-01-31"),
        text("until", "Before", "1h30m"),
        text("id", "Id", "the whole id"),
        h.button("Show", class_="main"),
        h.a("Clear", href=link("queue", queue=name, state=selection.state), class_="button"),
        view="queue",
    )


def _messages(
    ask: Ask,
    selection: Selection,
    listing: Listing,
    now_us: int,
    seen_us: int | None,
    number: int,
) -> Markup:
    acts = [
        act
        for act in ACTS.values()
        if ask.visitor.may(act.role, selection.queue) and _could(act, selection.state)
    ]
    dead = selection.state == DIED
    rows = (_row(shown, now_us, dead, bool(acts)) for shown in listing.messages)
    nothing = "There is no such message."
    if listing.after is not None:
        nothing = f"None of the first {listing.looked:,} messages matches; there are more."
    more = None
    if listing.goes_on:
        nothing = "None yet."
        said = f"Looked through {listing.looked:,} of about {max(number, listing.looked):,}."
        bar = h.progress(value=listing.looked, max=max(number, listing.looked), aria_label=said)
        more = h.p(bar, " ", said, class_="about")
    elif listing.after is not None:
        to = link("queue", **{**_kept(ask), "after": listing.after})
        more = h.p(h.a("Next page", href=to, class_="button", rel="next"))
    here = {**_kept(ask), "queue": selection.queue}
    return markup(
        form(
            ask,
            "do",
            hidden({"queue": selection.queue, "back": link("queue", **here)}),
            live(
                "messages",
                h.p("As of ", html.when(seen_us, now_us), ".", class_="about")
                if seen_us is not None
                else None,
                table(
                    _DEAD_COLUMNS if dead else _COLUMNS,
                    rows,
                    nothing=nothing,
                ),
                more,
            ),
            _acts(acts, "chosen") if acts else None,
            data_chooses=True,
        ),
        _all(ask, acts, selection) if acts else None,
    )


def _could(act: Act, state: str) -> bool:
    """Whether an act can be done to messages of a state that is asked for."""
    if state == ANY:
        return True
    return (
        bool({SCHEDULED, READY} & set(act.states)) if state == ALL_WAITING else state in act.states
    )


def _row(shown: Shown, now_us: int, dead: bool, choice: bool) -> list[Any]:
    box = exact("checkbox", "id", shown.found.id, aria_label=f"choose {shown.found.id}")
    cells: list[Any] = [
        box if choice else None,
        message_link(shown),
        shown.task or h.span("no task", class_="dim"),
        badge(shown.state),
        time_of(shown, now_us),
    ]
    if dead:
        error = shown.error.strip().splitlines()
        cells.append(markup(shown.reason, h.div(error[-1][:300], class_="dim") if error else None))
    else:
        cells.append(arguments_of(shown))
    return cells


def _buttons(acts: Iterable[Act], to_what: str = "", **attributes: Any) -> list[Markup]:
    made = []
    for act in acts:
        if act.name == "reschedule":
            made.append(labelled("New time", h.input(name="at", placeholder="1h30m", size=12)))
        made.append(
            h.button(
                f"{act.title}{to_what}",
                name="act",
                value=act.name,
                class_="danger" if act.asks else None,
                **attributes,
            )
        )
    return made


def _acts(acts: Iterable[Act], what: str) -> Markup:
    """Buttons of a form that is sent with what was chosen."""
    return h.div(
        labelled("All of this page", h.input(type="checkbox", data_all=True, hidden=True)),
        h.span(class_="dim", data_chosen=True),
        _buttons(acts, data_needs=True),
        class_="acts sticky",
        role="group",
        aria_label=f"Do to those that are {what}",
    )


def _all(ask: Ask, acts: Iterable[Act], selection: Selection) -> Markup:
    """What is done to all that match: it is counted first."""
    return h.details(
        h.summary("To all that match"),
        form(
            ask,
            "all",
            hidden({**_kept(ask), "queue": selection.queue, "state": selection.state}),
            h.p("They are counted first, and you are asked.", class_="about"),
            h.div(_buttons(acts, " all that match"), class_="acts"),
        ),
        id="all",
    )


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
    at = None
    if act.name == "reschedule":
        at = read_time(ask.field("at"), "at", now_us / 1e6)
        if at is None:
            raise invalid("at", "say the new time: a span such as 1h30m, or 2026-01-31 09:30")
    wanted = set(ids)
    there: list[Found] = [
        one for one in await tools.center.get(ids, topic=name) if one.id in wanted
    ]
    if act.asks and not ask.field("sure"):
        return await _ask_if_meant(tools, ask, act, there, now_us, back)
    what = ", ".join(ids[:20]) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
    if at is not None:
        what += f" to {html.iso(round(at * 1e6))}"
    async with tools.audit.doing(ask.visitor.name, act.name, name, what) as doing:
        try:
            done = await tools.actions.run(act.name, there, at)
        finally:
            tools.searches.forget(name)
            tools.dead_letters.forget(name)
        doing.number = done.number
    late = len(ids) - done.number
    said = f"{html.counted(done.number, 'message')} {act.done}."
    if late > 0:
        said += f" Too late for {late:,}: a worker has it, or it is gone."
    if done.skipped:
        said += f" {html.skipped(done.skipped)}"
    return redirect(ask, back, said)


async def _ask_if_meant(
    tools: Tools, ask: Ask, act: Act, there: list[Found], now_us: int, back: str
) -> View:
    if not there:
        raise not_found("these messages are gone: they are done, or somebody else was first")
    messages = [one async for one in tools.reader.read_all(there[:20], now_us)]
    rest = len(there) - len(messages)
    number = html.counted(len(there), "message")
    return View(
        f"{act.title} {number}?",
        markup(
            h.p("This cannot be taken back.", class_="about"),
            table(
                _COLUMNS[1:],
                (_row(one, now_us, False, False)[1:] for one in messages),
                nothing="",
            ),
            h.p(f"... and {rest:,} more") if rest else None,
            form(
                ask,
                "do",
                hidden({"queue": ask.field("queue"), "act": act.name, "sure": "1", "back": back}),
                hidden(("id", one.id) for one in there),
                h.div(
                    h.button(f"{act.title} {number}", class_="danger main"),
                    h.a("Back", href=back, class_="button"),
                    class_="acts",
                ),
            ),
        ),
    )


def _act_of(ask: Ask) -> Act:
    act = ACTS.get(ask.field("act"))
    if act is None:
        raise invalid("act", f"it must be one of {', '.join(ACTS)}")
    return act


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
        await tools.center.pause(name, act == "pause")
    return redirect(ask, link("queue", queue=name), f"{name} is {act}d.")


async def begin_all(tools: Tools, ask: Ask) -> Answer:
    """Begin something that is done to all that match: they are counted first."""
    act = _act_of(ask)
    name = await tools.queue_of(ask, act.role, ask.field("queue"))
    now = await tools.now_us() / 1e6
    said: Mapping[str, str] = {field: ask.field(field) for field in FIELDS}
    selection = Selection.of({**said, "queue": name}, now)
    at = None
    if act.name == "reschedule":
        at = read_time(ask.field("at"), "at", now)
        if at is None:
            raise invalid("at", "say the new time: a span such as 1h30m, or 2026-01-31 09:30")
    if not _could(act, selection.state):
        raise Problem("conflict", f"nothing that is {selection.state} can be {act.done}")
    check_role(ask, act.role, name)
    job = await tools.jobs.begin(act.name, selection, ask.visitor.name, at)
    return redirect(ask, link("job", id=job.id))
