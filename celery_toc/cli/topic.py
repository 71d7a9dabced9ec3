"""``celery toc topic``: what queues are declared with, and how that is changed while they are in
use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click

import kombu_toc

from . import options
from .exits import FAILED, Command, Failure, Group
from .options import complete_queue, queues_argument
from .screen import Cell, Column, listed
from .session import Session, with_session

COMMANDS = {
    "list": f"{__name__}:list_",
    "show": f"{__name__}:show",
    "declare": f"{__name__}:declare",
    "set": f"{__name__}:set_",
    "delete": "celery_toc.cli.queue:delete",
}

COLUMNS = (
    Column("queue", fold=True),
    Column("slots", right=True),
    Column("retries", right=True),
    Column("visibility", right=True),
    Column("back-off", right=True, spare=2),
    Column("steps", spare=4),
    Column("expires", right=True, spare=5),
    Column("consumers", right=True, spare=1),
)

#: What takes a limit back to the connection's default; and those of starts, keys and puts away.
DEFAULT = "default"
NONE = "none"

#: Limits that a queue has only if it was declared with them.
_UNLESS_SAID = frozenset((*kombu_toc.TERMS, *kombu_toc.LIBRARY_TERMS, *kombu_toc.NOTIFIER_TERMS))

#: Limits that only `declare` takes.
_DECLARED_ONCE = ("slots", "expires")

_queue = click.argument("queue", metavar="QUEUE", shell_complete=complete_queue)


@click.group(cls=Group, commands_at=COMMANDS)
@click.pass_context
def topic(ctx: click.Context) -> None:
    """What queues are declared with: list, show, declare, set, delete."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


# -- options, one for each limit


class _Value(click.ParamType):  # type: ignore[type-arg]  # Click's is generic from 8.5 on
    """A limit as it is declared.

    may_be_default: whether it may be `DEFAULT`, and then becomes that text
    """

    def __init__(self, limit: str, may_be_default: bool) -> None:
        self.limit = limit
        self.may_be_default = may_be_default
        self.name = limit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.may_be_default and (
            value == DEFAULT or (value == NONE and self.limit in _UNLESS_SAID)
        ):
            return DEFAULT
        if self.limit == "steps":
            return value.split(",")
        kind = kombu_toc.LIMITS[self.limit]
        unit = getattr(kind, "unit", "")
        try:
            if unit:
                seconds = options.read_span(value)
                value = round(seconds * 1000) if unit == "milliseconds" else seconds
            return kind.read(option_of(self.limit), value)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)


def option_of(limit: str) -> str:
    return "--priority-steps" if limit == "steps" else f"--{limit.replace('_', '-')}"


def _limit_options(
    names: tuple[str, ...], may_be_default: bool
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            function = click.option(
                option_of(name),
                name,
                type=_Value(name, may_be_default),
                metavar=_METAVARS.get(name, "SPAN"),
                help=_HELP.get(name),
            )(function)
        return function

    return add


_HELP = {
    "slots": "How many: a power of two, up to 512.",
    "retries": "Redeliveries of a message, 0 to 31.",
    "visibility": "How long a delivery lasts without a renewal.",
    "expires": "Delete the queue when nobody has used it for so long.",
    "retry_backoff": "How long a message waits after its first failed delivery.",
    "retry_backoff_max": "The longest of these waits.",
    "dead_age": "How long DeadQueue keeps a message.",
    "dead_limit": "How many messages DeadQueue keeps.",
    "max_lease": "How long one delivery may be renewed in all; 0: for ever.",
    "message_ttl": "When a message expires, counted from its due time.",
    "dead_expired": "Whether an expired message goes to DeadQueue.",
    "requeue_limit": "How often a message may be requeued on purpose before it is dead.",
    "rate": "Starts of the whole queue: 100/s, 10/m, 5000/h.",
    "rate_burst": "How many of these may come at once.",
    "concurrency": "How many of the queue run at once.",
    "key_rate": "Starts of each key: 10/m.",
    "key_burst": "How many of these may come at once.",
    "key_concurrency": "How many of each key run at once.",
    "key_order": "serial: of each key one at a time, strictly in order.",
    "key_retry": "With serial: hold, or later: what comes back lets others pass.",
    "key_fair": "Whether keys take turns.",
    "key_weights": "How much more often a key has its turn: gold=3,silver=2.",
    "put_rate": "How many may be added to the queue: 100/s.",
    "key_put_rate": "How many may be added of each key.",
    "key_header": "The header that names the key of a message.",
    "library": "How the task library keeps the queue: through, outbox, behind, or off.",
    "guard": "Whether what has ended in the library is not run again.",
    "horizon": "What is further away is in the task library only.",
    "target": "The URL that the notifier sends the queue's messages to.",
    "steps": "The priority levels, such as 0,3,6,9.",
}
_METAVARS = {
    "slots": "N",
    "retries": "N",
    "dead_limit": "N",
    "dead_expired": "yes|no",
    "requeue_limit": "N",
    "rate": "RATE",
    "rate_burst": "N",
    "concurrency": "N",
    "key_rate": "RATE",
    "key_burst": "N",
    "key_concurrency": "N",
    "key_order": "serial",
    "key_retry": "hold|later",
    "key_fair": "yes|no",
    "key_weights": "KEY=N,...",
    "put_rate": "RATE",
    "key_put_rate": "RATE",
    "key_header": "NAME",
    "library": "MODE",
    "guard": "yes|no",
    "target": "URL",
    "steps": "N,N...",
}
_ALTERABLE = (*(name for name in kombu_toc.LIMITS if name not in _DECLARED_ONCE), "steps")


# -- commands


@click.command(
    "list",
    cls=Command,
    example="""
celery -A shop toc topic list
celery -A shop toc topic list --json
""",
)
@queues_argument
@click.option("--all", "-a", "every", is_flag=True, help="Also queues that expire.")
@with_session
def list_(session: Session, queues: tuple[str, ...], every: bool) -> None:
    """What each queue is declared with.

    A value in parentheses is the app's own: the queue was declared without.
    """
    found = []
    for name in session.queues(queues):
        described = session.ask(session.center.describe, name)
        if every or queues or described.expires_ms is None:
            found.append(described)
    if session.as_json:
        session.json({"topics": [document(one) for one in found]})
    elif found:
        session.screen.table(COLUMNS, [_line(one) for one in found])
    else:
        session.screen.say("There are no queues yet: a worker declares its own when it starts.")


@click.command(
    cls=Command,
    example="""
celery -A shop toc topic show mail
celery -A shop toc topic show mail --json
""",
)
@_queue
@with_session
def show(session: Session, queue: str) -> None:
    """What a queue is declared with, where each limit comes from, and what is in it."""
    [queue] = session.queues([queue])
    _show(session, session.ask(session.center.describe, queue))


@click.command(
    cls=Command,
    example="""
celery -A shop toc topic declare mail --slots 16 --retries 3
""",
)
@_queue
@_limit_options((*_DECLARED_ONCE, *_ALTERABLE), False)
@with_session
def declare(session: Session, queue: str, **limits: Any) -> None:
    """Declare a queue before anybody uses it. Refused if there is one of that name."""
    if queue in session.center.topics():
        raise Failure(
            f"there is a queue {queue!r}; 'celery toc topic set {queue}' changes its limits", FAILED
        )
    session.center.declare(queue, **{k: v for k, v in limits.items() if v is not None})
    _show(session, session.ask(session.center.describe, queue))


@click.command(
    "set",
    cls=Command,
    example="""
celery -A shop toc topic set mail --retries 3 --visibility 5m
celery -A shop toc topic set mail --visibility default
celery -A shop toc topic set mail --rate 100/s --key-concurrency 1
celery -A shop toc topic set mail --rate none
celery -A shop toc topic set mail --target https://shop.example.com/hook
""",
)
@_queue
@_limit_options(_ALTERABLE, True)
@with_session
def set_(session: Session, queue: str, **limits: Any) -> None:
    """Change limits of a queue while it is in use; `default` takes one back to the app's.

    What limits starts, keys and puts (--rate and those below it) is taken away by `none`.
    Workers and senders know within five seconds. Another number of slots: `reshard`.
    """
    asked = {name: limits[name] for name in _ALTERABLE if limits[name] is not None}
    wanted = {name: None if value == DEFAULT else value for name, value in asked.items()}
    if not wanted:
        raise click.UsageError(f"say what: {', '.join(map(option_of, _ALTERABLE))}")
    center = session.center
    [queue] = session.queues([queue])
    before = session.ask(center.describe, queue)
    center.alter(queue, **wanted)
    after = session.ask(center.describe, queue)
    changed = [name for name in wanted if before.limits[name] != after.limits[name]]
    if session.as_json:
        session.json({**document(after), "changed": changed})
        return
    for name in changed:
        was, now = (_shown(name, one.limits[name]) for one in (before, after))
        session.screen.say(f"{name.replace('_', ' ')} of {queue!r}: {now}; it was {was}.")
    if before.target_stopped and not after.target_stopped and after.limits["target"].value:
        session.screen.say("Its target was stopped, and is sent to again.")
    if changed:
        session.screen.say("Workers and senders know within five seconds.")
    if same := [name.replace("_", " ") for name in wanted if name not in changed]:
        session.screen.say(f"Unchanged: {', '.join(same)}.")
    if after.closed_steps:
        steps = ",".join(map(str, after.closed_steps))
        session.screen.say(f"Messages that wait under {steps} are delivered like the others.")


# -- how it is shown


def document(found: kombu_toc.Description) -> dict[str, Any]:
    """A queue, as in JSON."""
    expires = found.expires_ms
    return {
        "queue": found.topic,
        "topic": found.topic,
        "slots": found.slots,
        "limits": {name: limit._asdict() for name, limit in found.limits.items()},
        "closed_steps": list(found.closed_steps),
        "expires_seconds": None if expires is None else expires / 1000,
        "draining_counts": list(found.draining_counts),
        "paused": found.paused,
        "target_stopped": found.target_stopped,
        **found.counts._asdict(),
        "consumers": sorted(one.name for one in found.consumers),
    }


def _show(session: Session, found: kombu_toc.Description) -> None:
    if session.as_json:
        session.json(document(found))
        return
    fields: list[tuple[str, Any]] = [("queue", found.topic), ("slots", found.slots)]
    if found.draining_counts:
        fields.append(("former slots", ", ".join(map(str, found.draining_counts))))
    fields += [
        (name.replace("_", " "), _shown(name, limit))
        for name, limit in found.limits.items()
        if limit.value is not None or name not in _UNLESS_SAID
    ]
    if found.closed_steps:
        fields.append(("closed steps", ",".join(map(str, found.closed_steps))))
    if found.expires_ms is not None:
        fields.append(("expires", f"{_exactly(found.expires_ms / 1000)} after its last use"))
    if found.target_stopped is not None:
        fields.append(("target stopped", found.target_stopped))
    fields.append(("paused", "yes" if found.paused else "no"))
    fields += [(name.replace("_", " "), number) for name, number in found.counts._asdict().items()]
    consumers = sorted(one.name for one in found.consumers)
    session.screen.fields([*fields, ("consumers", listed(consumers) if consumers else "none")])


def _line(found: kombu_toc.Description) -> list[Any]:
    limits: Mapping[str, kombu_toc.Limit] = found.limits
    expires = found.expires_ms

    def cell(name: str) -> str:
        text = text_of(name, limits[name].value)
        return f"({text})" if limits[name].source == DEFAULT else text

    return [
        found.topic,
        found.slots,
        *map(cell, ("retries", "visibility", "retry_backoff", "steps")),
        None if expires is None else _exactly(expires / 1000),
        Cell("paused", "yellow") if found.paused else len(found.consumers),
    ]


def _shown(name: str, limit: kombu_toc.Limit) -> str:
    return f"{text_of(name, limit.value)} ({limit.source})"


def text_of(name: str, value: Any) -> str:
    """A limit's value, with its unit."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "steps":
        return ",".join(map(str, value))
    if name == "key_weights":
        return ", ".join(f"{key}={weight:.15g}" for key, weight in value.items())
    unit = getattr(kombu_toc.LIMITS[name], "unit", "")
    if unit:
        return _exactly(value / 1000 if unit == "milliseconds" else value)
    return str(value)


def _exactly(seconds: float) -> str:
    """A span of time as it was declared."""
    return f"{seconds:.15g}s"
