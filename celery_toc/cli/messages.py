"""``celery toc find`` and ``history``: what the task library knows, also of what has ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import click

import kombu_toc
from kombu_toc import FailedTask, Found, Record

from .. import Task
from ..app.task import sources_of
from . import session as cli
from .screen import Cell, Column, clean, counted
from .session import Session

# -- celery toc find and history

#: What went wrong, and can be sent again.
FAILURES = ("failed", "dead")

#: Tasks that are shown unless it is said, and that are counted before they are sent again.
SHOWN, COUNTED = 50, 1000

RECORD_COLUMNS = (
    Column("id", fold=True),
    Column("status"),
    Column("time"),
    Column("task", fold=True, spare=2),
    Column("queue", fold=True, spare=3),
    Column("business", fold=True, spare=1),
    Column("attempts", right=True, spare=5),
    Column("changed", spare=4),
    Column("error", fold=True, spare=6),
)


@cli.command
@cli.option("--biz-id", "ID", "Only of this business id.")
@cli.option("--biz-type", "NAME", "Only of this business type.")
@cli.choice("--status -s", kombu_toc.STATUSES, "Only of these.", multiple=True)
@cli.flag("--failed", "Only what has failed or is dead.")
@cli.option("--task", "NAME", "Only tasks of this name.")
@cli.option(
    "--attribute",
    "NAME=VALUE",
    "Only with this attribute; several: with all of them.",
    multiple=True,
)
@cli.option(
    "--since",
    "TIME",
    "Only with an action time from then on: ISO 8601, or a span from now such as -2d.",
)
@cli.option("--until", "TIME", "Only with an action time until then.")
@cli.option("--limit -n", "N", "At most so many; 50, unless with --retry.")
@cli.option("--after", "CURSOR", "Go on where another page ended.")
@cli.flag("--retry", "Send all of them again, that have failed or are dead.")
@cli.yes_option
def find(
    session: Session,
    status: tuple[str, ...],
    failed: bool,
    attribute: tuple[str, ...],
    since: str | None,
    until: str | None,
    limit: int | None,
    after: str | None,
    retry: bool,
    **which: Any,
) -> None:
    """Find tasks in the library, by the order of their action times.

    It needs no Redis. `celery toc show ID` has the traceback of one that has failed. A search by
    --biz-id asks one table, any other all tables. Exit code 1 if a database does not answer: what
    the others have is shown.

    With --retry, all that are found are sent again, each once however often this is done, and not
    more than --limit, if that is given.

    Examples:
    celery -A shop toc find --biz-id 42
    celery -A shop toc find --biz-type order --biz-id 42 --status pending --json
    celery -A shop toc find --task shop.mail.remind --since -1d --limit 20
    celery -A shop toc find --failed --task shop.mail.remind --retry
    """
    if failed and status:
        raise click.UsageError("give --failed or --status, and not both")
    which["attributes"] = dict(_attribute(text) for text in attribute)
    now = time.time()
    which["between"] = (session.time("since", since, now), session.time("until", until, now))
    if retry:
        wrong = FAILURES if failed else status
        if not wrong or not set(wrong) <= set(FAILURES) or after is not None:
            raise click.UsageError(
                "--retry goes with --failed, or with --status failed or dead, and not with --after"
            )
        _retry(session, which, wrong, limit)
        return
    page = session.library.find(
        status=(FAILURES if failed else status) or None,
        limit=SHOWN if limit is None else limit,
        after=after,
        **which,
    )
    _show(session, page.records, page.after, page.away)
    for url in page.away:
        session.complain(f"{url} does not answer: what it has is not shown")


def _attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"--attribute {text!r}: write it as NAME=VALUE")
    return name, value


def _retry(
    session: Session, which: dict[str, Any], status: tuple[str, ...], limit: int | None
) -> None:
    library = session.library
    most = min(limit or COUNTED, COUNTED)
    number = len(library.find(status=status, limit=most, **which).records)
    done = kombu_toc.FailuresRetried()
    if number:
        more = " or more" if number == COUNTED != limit else ""
        session.confirm(f"Send {counted(number, 'task')}{more} again?")
        with session.progress("Retrying", number) as bar:
            done = library.retry(status=status, limit=limit, on_progress=bar, **which)
    session.tell(
        {"retried": done.number, "not_kept": done.not_kept},
        f"Sent {counted(done.number, 'task')} again." if done.number else "No tasks match.",
    )
    if done.not_kept and not session.as_json:
        session.complain(f"{counted(done.not_kept, 'task')}: the message is not kept", cli.PARTIAL)


@cli.command
@click.argument("id", metavar="ID")
def history(session: Session, id: str) -> None:
    """Show what has become of a task: a line for each message, such as those of its retries.

    It needs no Redis. Exit code 3 if the library does not know the id.

    Examples:
    celery -A shop toc history 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    """
    records = session.library.history(id)
    if not records:
        raise cli.Failure(f"the library has no task {id!r}", cli.NOT_FOUND)
    _show(session, records, None)


def _show(
    session: Session,
    records: list[kombu_toc.Record],
    after: str | None,
    away: tuple[str, ...] = (),
) -> None:
    tasks = list(map(described, records))
    rows = [
        {
            **task,
            "time": _moment(session, record.action_us),
            "business": " ".join(filter(None, (record.biz_type, record.biz_id))) or None,
            "changed": _moment(session, record.modified_us),
            "error": (record.error or "").partition("\n")[0] or None,
        }
        for task, record in zip(tasks, records, strict=True)
    ]
    shown = {"tasks": tasks, "after": after, "away": list(away)}
    session.show(shown, RECORD_COLUMNS, rows, "No tasks match.")
    session.say_more(after and f"'{after}'")


def _moment(session: Session, us: int) -> str | None:
    return cli.local_iso(us / 1e6, session.zone) if us else None


def described(record: kombu_toc.Record) -> dict[str, Any]:
    """A record as JSON."""
    return cli.document(
        record,
        "id topic task status action_us biz_type biz_id attributes attempts worker error "
        "created_us modified_us",
    )


# -- A message as JSON for scripts, and as text for people

#: States, one word each. A waiting message is scheduled or ready.
STATES = ("scheduled", "ready", "in-flight", "dead")

_STYLES = {"scheduled": "", "ready": "yellow", "in-flight": "cyan", "dead": "red"}

#: Characters of arguments, a reason or an error that a table shows.
VALUE_WIDTH = 60

COLUMNS = (
    Column("id"),
    Column("task", fold=True),
    Column("queue", fold=True, spare=True),
    Column("state"),
    Column("time", spare=True),
    Column("in", right=True),
    Column("arguments", fold=True),
)

DEAD_COLUMNS = (
    Column("id"),
    Column("task", fold=True),
    Column("queue", fold=True, spare=True),
    Column("died", spare=True),
    Column("reason", fold=True),
    Column("error", fold=True),
)


def describe(session: Session, task: Task, *, whole: bool = False) -> dict[str, Any]:
    """A message as in JSON; docs/commands.md explains the fields.

    task: read from a message that was found
    whole: with headers, properties and body
    """
    found = task.found
    assert isinstance(found, Found)
    shown = {
        **cli.document(
            found, "id topic slot time_us far key unique visibility max_lease expiration"
        ),
        "expires": cli.iso_us(found.expires_us or 0),
        "task": task.name or None,
        "priority": _priority(session, found),
        "state": state_of(session, found),
        "retries_left": _retries_left(session, found),
        "args": _values(task.args),
        "kwargs": _values(task.kwargs),
        "argsrepr": _repr(task.headers, "argsrepr", task.args),
        "kwargsrepr": _repr(task.headers, "kwargsrepr", task.kwargs),
        "reason": found.reason or None,
        "error": found.error or None,
        "problem": task.problem or None,
    }
    if whole:
        shown.update(cli.document(task, "headers properties content_type"))
        shown["body"] = task.body.decode("utf-8", "backslashreplace")
    return shown


def _priority(session: Session, found: Found) -> int:
    """Its priority step, as its topic declares them."""
    steps = session.center.registry.topic(found.topic).steps
    return steps[min(found.step, len(steps) - 1)]


class State(click.Choice):  # type: ignore[type-arg]  # Click's is generic from 8.2 on
    """One of STATES; spaces and underscores are accepted for the hyphen."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return super().convert(value.replace(" ", "-").replace("_", "-"), param, ctx)


def state_of(session: Session, found: Found) -> str:
    """One of STATES."""
    if found.state == "waiting":
        return "ready" if found.time_us <= session.now * 1e6 else "scheduled"
    return found.state.replace(" ", "-")


def _retries_left(session: Session, found: Found) -> int | None:
    if found.retries_left is not None:
        return found.retries_left
    topic = session.center.registry.known(found.topic)  # which has just been looked at
    return topic.declaration.retries if topic else None


def _values(decoded: Any) -> Any:
    """Arguments for JSON, which shows as text what it cannot hold; None if they are not decoded."""
    if decoded is None or isinstance(decoded, str):
        return None
    try:
        return json.loads(json.dumps(decoded, default=repr))
    except (TypeError, ValueError):  # keys that are not text, or a value that contains itself
        return repr(decoded)


def _repr(headers: dict[str, Any], name: str, decoded: Any) -> str | None:
    said = headers.get(name)
    if isinstance(said, str):
        return said
    return None if decoded is None else repr(decoded)


def arguments(shown: dict[str, Any]) -> str:
    """Arguments as in a call, from what :func:`describe` returns."""
    args, kwargs = shown["argsrepr"] or "()", shown["kwargsrepr"] or "{}"
    return args if kwargs == "{}" else f"{args} {kwargs}"


def row(session: Session, shown: dict[str, Any], seconds: float) -> dict[str, Any]:
    """A row for COLUMNS and DEAD_COLUMNS.

    shown: what :func:`describe` returns
    seconds: its time, since the epoch; 0 if it was rolled back and is due at once
    """
    time = local_time(session, seconds) if seconds else None
    return {
        **shown,
        "state": Cell(shown["state"], _STYLES[shown["state"]]),
        "time": time,
        "died": time,
        "in": _signed(seconds - session.now) if seconds else None,
        "arguments": cut(arguments(shown)),
        "reason": cut(shown["reason"] or ""),
        "error": cut((shown["error"] or "").partition("\n")[0]),
    }


def local_time(session: Session, seconds: float) -> str:
    """A time: ISO 8601 with its offset in plain text. On a terminal the offset is left out, because
    a line below the table names the time zone, and so is today's date."""
    if not session.screen.is_terminal:
        return cli.local_iso(seconds, session.zone)
    text = cli.local(seconds, session.zone)
    today = cli.local(session.now, session.zone)[:10]
    return text[11:] if text[:10] == today else text


def _signed(seconds: float) -> str:
    return cli.span(seconds) if seconds >= 0 else f"-{cli.span(-seconds)}"


def cut(text: str) -> str:
    text = clean(text)
    return text if len(text) <= VALUE_WIDTH else f"{text[: VALUE_WIDTH - 3]}..."


def in_a_line(session: Session, shown: dict[str, Any], seconds: float) -> str:
    """A message in one line, for a question."""
    when = f", {cli.distance(seconds - session.now)}" if seconds else ""
    name = shown["task"] or "(no task)"
    return f"{name} {shown['id']} in {shown['queue']!r}: {shown['state']}{when}"


def named(pattern: str | None) -> Callable[[Task], bool] | None:
    """The predicate that a task has such a name; ``*`` and ``?`` are wildcards."""
    if pattern is None:
        return None
    return lambda task: fnmatchcase(task.name or "", pattern)


# -- celery toc list


#: Which messages, and how many of them.
paging = cli.together(
    cli.option(
        "--since",
        "TIME",
        "Only from that time on: ISO 8601, or a span from now such as 1h30m or -2d.",
    ),
    cli.option("--until", "TIME", "Only with a time before that one."),
    cli.task_option,
    cli.option("--limit -n", "N", "Messages on a page.", default=50),
    cli.option("--after", "CURSOR", "Go on where another page ended."),
)


@cli.command
@cli.queue_option
@click.option("--state", "-s", type=State(STATES), help="Only in this state.")
@paging
def list_(session: Session, queue: str | None, state: str | None, **which: Any) -> None:
    """The messages of a queue, or of all together, in the order of time.

    The time of one that waits is when it is due; of one in flight, when its lease ends; of a dead
    one, when it died.

    Examples:
    celery -A shop toc list --queue mail --until 1h
    celery -A shop toc list --task 'shop.tasks.*' --state scheduled --limit 20
    celery -A shop toc list --since 2030-12-24 --until 2030-12-27 --json
    """
    show_page(session, queue, state, **which)


def narrowed(
    session: Session, state: str | None, since: str | None, until: str | None
) -> tuple[str | None, float | None, float | None]:
    """The center's state, and the times in seconds since the epoch, that these filters together
    mean. Fails if nothing can ever match them."""
    now = session.now
    earliest, latest = session.time("since", since), session.time("until", until)
    if earliest is not None and latest is not None and earliest >= latest:
        raise cli.Failure("--since is not before --until: nothing can match", cli.USAGE)
    if state == "scheduled" and latest is not None and latest <= now:
        raise cli.Failure(
            "what is scheduled is due later than now, and --until is in the past: "
            "nothing can match",
            cli.USAGE,
        )
    if state in ("ready", "dead") and earliest is not None and earliest > now:
        what = "was due" if state == "ready" else "died"
        raise cli.Failure(f"what is {state} {what} before now: --since is in the future", cli.USAGE)
    if state == "ready":
        return "waiting", earliest, now if latest is None else min(now, latest)
    if state == "scheduled":
        return "waiting", now if earliest is None else max(now, earliest), latest
    return {"in-flight": "in flight", "dead": "dead"}.get(state or ""), earliest, latest


def show_page(
    session: Session,
    queue: str | None,
    state: str | None,
    *,
    since: str | None,
    until: str | None,
    task: str | None,
    limit: int,
    after: str | None,
) -> None:
    """Show a page of what there is."""
    kind, earliest, latest = narrowed(session, state, since, until)
    queue = session.queue(queue)
    try:
        with session.looking(named(task), queue, kind) as where:
            page = session.ask(
                session.center.scan,
                queue,
                state=kind,
                since=earliest,
                until=latest,
                where=where,
                limit=limit,
                after=after,
            )
    except ValueError as exc:  # a cursor that is none
        raise cli.Failure(exc, cli.USAGE) from None
    messages = [describe(session, session.center.task(found)) for found in page.messages]
    columns = DEAD_COLUMNS if state == "dead" else COLUMNS
    rows = [
        row(session, message, found.time_us / 1e6)
        for message, found in zip(messages, page.messages, strict=True)
    ]
    shown = {"messages": messages, "after": page.after}
    left_out = session.show(shown, columns, rows, "No messages match.")
    if left_out:
        session.screen.say(f"No room for {' and '.join(left_out)}.", "dim")
    if rows and session.screen.is_terminal and not {"time", "died"} & set(left_out):
        session.screen.say(f"Times are in {session.zone_name}.", "dim")
    session.say_more(page.after)


# -- celery toc show

#: What a task is in the library that has not ended.
LIVE = ("pending", "taken")

#: What the time of a message means, by its state.
_TIMES = {
    "scheduled": "due",
    "ready": "due",
    "in-flight": "lease ends",
    "dead": "died",
}


@cli.command
@click.argument("id", shell_complete=cli.complete_id)
@cli.queue_option
def show(session: Session, id: str, queue: str | None) -> None:
    """All of a message, decoded; and what the task library has of those of its id that have ended,
    with the end of the traceback of a failure.

    Messages that share the id, such as a task and its retry, are all shown.

    Examples:
    celery -A shop toc show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11
    celery -A shop toc show 3f0c81e2-6c0f-4b8e-a3a5-6f1f0a2f7a11 --json
    """
    found = session.ask(session.center.get, id, topic=session.queue(queue))
    records = session.history(id)
    if records is not None:
        records = [one for one in records if one.topic == (queue or one.topic)]
    show_all(session, id, found, records, queue)


def show_all(
    session: Session,
    id: str,
    found: list[Found],
    library: Sequence[Record] | None = None,
    queue: str | None = None,
) -> None:
    """Show the messages that were found under an id, what is recorded of others, and of a task
    without a message what became of it.

    library: the records of the task library; None: it was not asked, or has not answered
    """
    records = [one for one in library or () if one.status not in LIVE]
    failed = [] if found else session.ask(session.center.failures.get, id, topic=queue)
    sources = [] if found else sources_of(session.app, session.center, id)
    messages = [describe(session, session.center.task(each), whole=True) for each in found]
    knows = [(one.name, one.said) for one in sources if one.said]
    more: dict[str, Any] = {
        "records": [described(one) for one in records],
        "failures": [described_failure(one) for one in failed],
        "sources": [one._asdict() for one in sources],
    }
    more = {name: value for name, value in more.items() if value}
    session.json({"id": id, "messages": messages, **more})
    errors = {one.error for one in failed}  # each is shown once
    parts = [
        *(
            _fields(session, message, each.time_us / 1e6)
            for each, message in zip(found, messages, strict=True)
        ),
        *(
            _recorded(session, one._replace(error="") if one.error in errors else one)
            for one in records
        ),
        *(failure_fields(session, failure) for failure in failed),
    ]
    show_parts(session, parts)
    session.screen.fields(knows)
    if not (found or records or failed or knows):
        asked = ["the failures", *(["the task library"] if library is not None else [])]
        asked += [one.name for one in sources if not one.error]
        away = [f"{one.name} ({one.error})" for one in sources if one.error]
        session.complain_of_none(id, asked, away)


def show_parts(session: Session, parts: Iterable[list[tuple[str, Any]]]) -> None:
    """Show several things, each a line for each property, with an empty line between two."""
    for number, fields in enumerate(parts):
        if number:
            session.screen.say()
        session.screen.fields(fields)


def described_failure(one: FailedTask) -> dict[str, Any]:
    """A failed task as JSON."""
    names = "id task topic exception error args failed_us runtime retries dead masked retryable"
    return {**cli.document(one, names), "worker": one.worker or None}


def failure_fields(session: Session, one: FailedTask) -> list[tuple[str, Any]]:
    """A failed task in full, a line for each property."""
    why = "its arguments are hidden" if one.masked else "it was too large"
    runtime = None if one.runtime is None else cli.span(one.runtime)
    return [
        *(("id", one.id), ("task", one.task), ("queue", one.topic)),
        ("state", "failed, dead" if one.dead else "failed"),
        ("failed", cli.local_iso(one.failed_us / 1e6, session.zone)),
        *(("worker", one.worker or None), ("runtime", runtime), ("retries", one.retries or None)),
        ("args", one.args or None),
        ("retry", None if one.retryable else f"not possible: {why}"),
        *lines("error", one.error),
    ]


def _recorded(session: Session, record: Record) -> list[tuple[str, Any]]:
    """The library's record of a message that has ended, a line for each property."""
    return [
        *(("id", record.id), ("task", record.task), ("status", record.status)),
        ("due", _moment(session, record.action_us)),
        *(("queue", record.topic), ("business type", record.biz_type)),
        *(("business id", record.biz_id), ("attempts", record.attempts)),
        *((f"attributes.{name}", value) for name, value in record.attributes.items()),
        *(("worker", record.worker), ("created", _moment(session, record.created_us))),
        ("changed", _moment(session, record.modified_us)),
        *lines("error", record.error),
    ]


def _fields(session: Session, message: dict[str, Any], seconds: float) -> list[tuple[str, Any]]:
    when = "now: it was rolled back"
    if seconds:
        away = cli.distance(seconds - session.now)
        when = f"{cli.local_iso(seconds, session.zone)} ({away})"
    fields = [
        ("id", message["id"]),
        ("task", message["task"]),
        ("state", message["state"]),
        (_TIMES[message["state"]], when),
        ("queue", message["queue"]),
        ("slot", message["slot"]),
        ("place", "the task library, until its time comes" if message["far"] else None),
        ("priority", message["priority"]),
        ("retries left", message["retries_left"]),
        ("visibility", _seconds(message["visibility"])),
        ("max lease", _seconds(message["max_lease"])),
        *((name, message[name] or None) for name in ("expires", "key", "unique")),
        ("args", message["argsrepr"]),
        ("kwargs", message["kwargsrepr"]),
        ("reason", message["reason"]),
        *lines("error", message["error"]),
        ("problem", message["problem"]),
    ]
    for group in ("headers", "properties"):
        fields += [
            (f"{group}.{name}", _value(value))
            for name, value in message[group].items()
            if value is not None
        ]
    return [*fields, ("content type", message["content_type"]), ("body", message["body"])]


def _seconds(number: float | None) -> str | None:
    return None if number is None else f"{number:g} s"


def lines(name: str, text: str | None) -> list[tuple[str, Any]]:
    """A text of several lines, such as a traceback."""
    return [("" if at else name, line) for at, line in enumerate((text or "").splitlines())]


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
